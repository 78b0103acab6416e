"""A device of CPU tensors that is behind the host, as a GPU is: what it is given is done in order, and late.

A `Scheduler` holds back all operations of its devices. It does those that somebody waits for, no earlier
than it must, and others at random whenever the host calls in (seeded). So an operation that does not wait
for another one where it must comes before it sooner or later.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd.training.devices import Device, Event, Stream


class Scheduler:
    """Which operation of which stream is done next.

    Args:
        seed: of what is done at random.
        eager: share of the host's calls at which an operation is done that nobody waits for.

    Attributes:
        forgets: a wait to leave out, in a test of tests: which stream, told by which function.
    """

    def __init__(self, seed: int = 0, eager: float = 0.3):
        self.forgets: tuple[str, str] | None = None
        self._random = random.Random(seed)
        self.eager = eager
        self._lock = threading.RLock()
        self.streams: list[LaggingStream] = []
        self.done = 0  # operations

    def give(
        self, stream: LaggingStream, item: Callable[[], object] | LaggingEvent, marks: bool
    ) -> None:
        """Append an operation, an event to wait for, or (`marks`) one that is over when it is reached."""
        with self._lock:
            stream.items.append((item, marks))
            while self._random.random() < self.eager and self.do_any():
                pass

    def do_any(self) -> bool:
        """Do the next operation of a stream that can go on. False if there is none."""
        with self._lock:
            ready = [
                stream for stream in self.streams if stream.items and not self._blocked(stream)
            ]
            if not ready:
                return False
            self._do_next(self._random.choice(ready))
            return True

    def _blocked(self, stream: LaggingStream) -> bool:
        item, marks = stream.items[0]
        return isinstance(item, LaggingEvent) and not marks and not item.over

    def _do_next(self, stream: LaggingStream) -> None:
        item, marks = stream.items.popleft()
        if not isinstance(item, LaggingEvent):
            item()
            self.done += 1
        elif marks:
            item.over = True

    def until(self, event: LaggingEvent) -> None:
        """Do what the event needs, and nothing else."""
        with self._lock:
            while not event.over:
                item, marks = event.stream.items[0]
                if isinstance(item, LaggingEvent) and not marks:
                    self.until(item)
                self._do_next(event.stream)


class LaggingEvent:
    def __init__(self, stream: LaggingStream):
        self.stream, self.over = stream, False

    def done(self) -> bool:
        self.stream.scheduler.do_any()
        return self.over

    def wait(self) -> None:
        self.stream.scheduler.until(self)


class LaggingStream:
    def __init__(self, scheduler: Scheduler, name: str):
        self.scheduler, self.name = scheduler, name
        self.items: deque[tuple[Callable[[], object] | LaggingEvent, bool]] = deque()
        scheduler.streams.append(self)

    def enqueue(self, operation: Callable[[], object]) -> None:
        self.scheduler.give(self, operation, False)

    def record(self) -> Event:
        event = LaggingEvent(self)
        self.scheduler.give(self, event, True)
        return event

    def wait(self, event: Event) -> None:
        if self.scheduler.forgets == (self.name, sys._getframe(1).f_code.co_name):
            return
        if isinstance(event, LaggingEvent):
            self.scheduler.give(self, event, False)
        else:
            event.wait()


class Lagging:
    """One device.

    Args:
        scheduler: of its operations, and maybe those of other devices.
        trainer_lags: the trainer's operations are given to `current()` too; else the script does them itself.
    """

    def __init__(self, scheduler: Scheduler, trainer_lags: bool = False):
        self.scheduler = scheduler
        own = Device(torch.device("cpu")).current()  # what waits there, the host waits for
        self._current: Stream = LaggingStream(scheduler, "trainer") if trainer_lags else own
        self._names = itertools.cycle(("up", "down"))  # in the order in which staging makes them
        self.pinned: list[int] = []  # addresses

    def current(self) -> Stream:
        return self._current

    def stream(self) -> Stream:
        return LaggingStream(self.scheduler, next(self._names))

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0x7F, dtype=torch.uint8)  # large numbers, as memory has

    def flag(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bool)

    def pin(self, memory: NDArray[np.uint8]) -> bool:
        self.pinned.append(memory.ctypes.data)
        return True

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        self.pinned.remove(memory.ctypes.data)
