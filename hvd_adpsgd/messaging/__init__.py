"""Messages between the learners of a job, and attempts at operations that consist of such messages."""
