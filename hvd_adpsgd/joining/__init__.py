"""How a super learner joins a running job."""
