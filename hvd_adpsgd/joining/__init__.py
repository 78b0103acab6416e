"""How a super learner joins a job that runs."""
