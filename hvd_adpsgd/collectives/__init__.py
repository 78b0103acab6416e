"""Operations over all learners of a job, which continue without those that failed."""
