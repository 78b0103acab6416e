"""A view of the run: reports of super learners, their record, and what is made of both."""
