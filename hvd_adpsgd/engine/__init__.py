"""Background averaging of models between super learners."""
