"""Many engines in one process, in virtual time."""
