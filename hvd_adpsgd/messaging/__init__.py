"""Messages between the learners of a job, and one attempt of an operation made of them."""
