"""Messages between the learners of a job, and attempts of operations that consist of such messages."""
