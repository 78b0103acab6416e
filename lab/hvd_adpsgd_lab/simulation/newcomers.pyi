# Nothing for Python: parts of job.
