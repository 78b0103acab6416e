"""Exit statuses of learners and of jobs; this module imports the standard library only."""

import signal
from collections.abc import Sequence

FAILED_STATUS = 75  # of a job with a failed super learner: EX_TEMPFAIL of sysexits.h
LEFT_STATUS = 128 + signal.SIGTERM  # of a learner that was preempted, and left in order


def is_failure(status: int) -> bool:
    """Return whether a learner that ended with this status has failed itself."""
    return status not in (0, FAILED_STATUS, LEFT_STATUS)


def status_of_job(ends: Sequence[int]) -> int:
    """Return the exit status of a job whose learners ended with `ends`, in the order of their ends."""
    if any(status in (0, FAILED_STATUS) for status in ends):
        return 0 if all(status in (0, LEFT_STATUS) for status in ends) else FAILED_STATUS
    return next((status for status in ends if status != LEFT_STATUS), FAILED_STATUS)
