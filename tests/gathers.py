"""A gather among leaders that are threads of this process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LONGEST_S = 60.0


class Gathers:
    """The n-th call of each leader returns the values of all."""

    def __init__(self, leaders: int):
        self._barrier, self._values = (
            threading.Barrier(leaders, timeout=LONGEST_S),
            [None] * leaders,
        )

    def of(self, leader: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[leader] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather


def together(act: Callable[[Any], Any], leaders: Sequence[Any]) -> list[Any]:
    """What `act` returns for each, called at the same time."""
    with ThreadPoolExecutor(len(leaders)) as threads:
        return list(threads.map(act, leaders, timeout=LONGEST_S))
