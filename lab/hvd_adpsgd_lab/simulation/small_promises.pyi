# Nothing for Python: parts of explore.
