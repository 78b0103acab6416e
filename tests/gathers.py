"""A gather among leaders that are threads of this process, and what a leader is to its engine."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LONGEST_S = 60.0


class Gathers:
    """The n-th call of each leader returns the values of all."""

    def __init__(self, leaders: int):
        self._barrier = threading.Barrier(leaders, timeout=LONGEST_S)
        self._values: list[Any] = [None] * leaders

    def of(self, leader: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self._values[leader] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather


class Rank:
    """What an engine asks of a communicator whose messages it does not send."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size


class Mates(Rank):
    """What the memory of a super learner asks of its learners' communicator, as this one alone sees it."""

    def bcast(self, value: Any, root: int = 0) -> Any:
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """What these return, called at the same time; the first exception is raised."""
    with ThreadPoolExecutor(max(1, len(acts))) as threads:
        return [done.result(LONGEST_S) for done in [threads.submit(act) for act in acts]]


def together(act: Callable[[Any], Any], leaders: Sequence[Any]) -> list[Any]:
    """What `act` returns for each, called at the same time."""
    with ThreadPoolExecutor(len(leaders)) as threads:
        return list(threads.map(act, leaders, timeout=LONGEST_S))
