"""The one way to wait for an event that no thread, socket or condition announces."""

import math
import time
from collections.abc import Iterator

_SHORTEST_S, _LONGEST_S = 1e-6, 1e-3


def polls(ends: float | None = None, longest_s: float = _LONGEST_S) -> Iterator[None]:
    """Yield before each poll, which ends the loop; sleep between polls, longer each time.

    A short wait ends at once, and a learner that waits for long leaves its core to others.

    Args:
        ends: deadline, of time.monotonic, after which the iterator ends; it yields at least once. None: none.
        longest_s: longest pause; longer than the default where a poll is costly.
    """
    pause_s, ends = _SHORTEST_S, math.inf if ends is None else ends
    while True:
        yield
        if time.monotonic() > ends:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
