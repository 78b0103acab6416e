"""The order of operations of one process that several threads ask for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["FifoLock"]


class FifoLock:
    """Numbers that are served one after the other, in the order in which they were taken.

    One worker for all operations would need no lock. But an operation that the script waits for runs on the
    script's thread: a signal ends it, and torch's thread-local state is the script's.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = 0
        self._served = 0
        self._left: set[int] = set()  # numbers given up before their turn, or done out of it
        self._mine = threading.local()

    def take(self) -> int:
        """The next number. Whoever takes one must `leave` it."""
        with self._changed:
            self._taken += 1
            return self._taken - 1

    def leave(self, number: int) -> None:
        """The turn of a number is over, or it is given up; again, nothing happens."""
        with self._changed:
            if number < self._served:
                return
            self._left.add(number)
            while self._served in self._left:
                self._left.remove(self._served)
                self._served += 1
            self._changed.notify_all()

    def wait(self, number: int, seconds: float | None = None) -> bool:
        """Wait for the turn of a number; False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._served >= number, seconds)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[bool]:
        """Whether all turns taken before are over after `seconds`; inside, none begins."""
        number = self.take()
        try:
            yield self.wait(number, seconds)
        finally:
            self.leave(number)

    @contextlib.contextmanager
    def as_taken(self, number: int) -> Iterator[None]:
        """Inside, this thread has taken `number` already, for its next turn."""
        self._mine.number = number
        try:
            yield
        finally:
            self._mine.number = None
            self.leave(number)

    def is_taken(self) -> bool:
        """Whether this thread is inside `as_taken`."""
        return getattr(self._mine, "number", None) is not None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, it is this thread's turn."""
        number = getattr(self._mine, "number", None)
        number = self.take() if number is None else number
        try:
            self.wait(number)
            yield
        finally:
            self.leave(number)
