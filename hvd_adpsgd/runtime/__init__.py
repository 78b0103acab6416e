"""The processes of a job: which are alive, how they start, communicate and end."""
