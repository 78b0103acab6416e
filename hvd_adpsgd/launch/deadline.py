"""The deadline of a call of hvd.init(), common to all of its waits for other processes."""

import time
from collections.abc import Callable
from typing import TypeVar

from hvd_adpsgd.lifecycle.threads import in_thread

T = TypeVar("T")

# extra time in which a call that checks the deadline itself raises a more precise error
_GRACE_S = 0.5


class Deadline:
    """A deadline that is `seconds` after this object was made.

    Args:
        seconds: HVD_ADPSGD_START_TIMEOUT_S.

    Attributes:
        ends: the deadline, of time.monotonic.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.ends = time.monotonic() + seconds

    def __str__(self) -> str:
        return f"HVD_ADPSGD_START_TIMEOUT_S={self._seconds:g} s"

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self.ends - time.monotonic())

    def bounded(self, act: Callable[[], T]) -> T:
        """Run act() on a new thread; return its result or raise its error. The deadline ends the wait only.

        Raises:
            TimeoutError: at the deadline.
        """
        return in_thread("hvd_adpsgd.start", act).result(self.left + _GRACE_S)
