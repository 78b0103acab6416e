"""Operations over all learners of a job, which continue without failed learners."""
