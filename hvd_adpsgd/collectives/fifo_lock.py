"""FifoLock: runs the operations that several threads of a process request in the order of their requests."""

import contextlib
import threading
from collections.abc import Iterator


class FifoLock:
    """A lock that threads hold one after the other, in the order in which they have taken numbers.

    One worker thread for all operations would need no lock. But an operation that the script waits for must
    run on the script's thread, where signals can end it, and with the thread-local state of torch.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = 0
        self._served = 0
        # numbers above `_served` that threads gave up before their turn
        self._left: set[int] = set()
        self._of_thread = threading.local()

    def take(self) -> int:
        """Take the next number in the queue for the lock, which the caller must `leave` later; return it."""
        with self._changed:
            self._taken += 1
            return self._taken - 1

    def leave(self, number: int) -> None:
        """Release the lock held under `number`, or give up `number` before its turn; callable twice."""
        with self._changed:
            if number < self._served:
                return
            self._left.add(number)
            while self._served in self._left:
                self._left.remove(self._served)
                self._served += 1
            self._changed.notify_all()

    def wait(self, number: int, seconds: float | None = None) -> bool:
        """Wait until `number` holds the lock; return False if that takes more than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._served >= number, seconds)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[bool]:
        """Context manager that queues for the lock, and yields whether it gets the lock within `seconds`.

        Inside, no thread that queues later gets the lock.
        """
        number = self.take()
        try:
            yield self.wait(number, seconds)
        finally:
            self.leave(number)

    @contextlib.contextmanager
    def as_taken(self, number: int) -> Iterator[None]:
        """Context manager in which this thread's `turn` uses `number`, which `take` returned before."""
        self._of_thread.number = number
        try:
            yield
        finally:
            self._of_thread.number = None
            self.leave(number)

    def is_taken(self) -> bool:
        """Whether this thread has a number taken before: it is inside `as_taken`."""
        return getattr(self._of_thread, "number", None) is not None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Context manager that waits until this thread holds the lock, and releases the lock on exit."""
        number = getattr(self._of_thread, "number", None)
        number = self.take() if number is None else number
        try:
            self.wait(number)
            yield
        finally:
            self.leave(number)
