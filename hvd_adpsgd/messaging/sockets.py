"""Communicators of learners over TCP, where no MPI joins the processes.

    Hub             the connections of this process to all other learners
    Communicator    some of the learners, by rank; with messages of its own, as an MPI communicator has

A message begins with the number of its communicator and its tag. All learners make their communicators
together and in the same order, so the numbers are the same on all of them.
"""

from __future__ import annotations

import select
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.connections import Connections
from hvd_adpsgd.errors import PeerFailedError
from hvd_adpsgd.messaging.attempt import gather_once
from hvd_adpsgd.messaging.messages import Messages
from hvd_adpsgd.messaging.mpi_transport import Bytes

__all__ = ["Communicator", "Hub"]

_HEAD = struct.Struct("=ii")  # communicator, tag
_CHANNEL = 0  # of the wire; the only one
_NOBODY = -1
_EMPTY = np.empty(0, dtype=np.uint8)

_Inbox = deque[tuple[int, int, Bytes]]  # sender, tag, bytes


class Hub:
    """The connections of this process to the other learners; all of them make theirs together.

    Args:
        rank, size: of this learner, of how many.
        config: as for Connections.
        gather: the values of all learners, by rank; called Connections.GATHERS times.

    Attributes:
        rank, size: see the arguments.
        ended: ranks of learners whose process has ended, or whose host is silent.
        heard: ranks of learners from which something has come, and this one.
    """

    def __init__(
        self, rank: int, size: int, config: Config, gather: Callable[[Any], list[Any]]
    ) -> None:
        self.rank, self.size = rank, size
        self.ended: set[int] = set()
        self.heard = {rank}
        self._lock = (
            threading.Lock()
        )  # operations, shutdown and the super learner may be on different threads
        self._inboxes: dict[int, _Inbox] = defaultdict(deque)
        self._made = 0
        self._freed: set[int] = set()
        self._connections = Connections(rank, size, config, "learner", self._tend)
        self._wire = self._connections.wire
        self._connections.meet(gather)

    @property
    def address(self) -> str:
        """On which this learner listens to the others."""
        return self._connections.address

    def address_of(self, rank: int) -> str:
        """Where another learner listens, for messages."""
        return self._connections.address_of(rank)

    def communicator(self, ranks: Sequence[int]) -> Communicator | None:
        """One of these learners; None on others. All learners call this together."""
        number = self._made
        self._made += 2  # one for messages, one for what the communicator gathers
        return Communicator(self, number, ranks) if self.rank in ranks else None

    def send(self, rank: int, number: int, tag: int, data: Any) -> None:
        """Queue a copy; one to a learner that has ended is dropped."""
        view = memoryview(data)
        with self._lock:
            self._wire.post(
                rank, _CHANNEL, _HEAD.pack(number, tag), view.cast("B") if view else _EMPTY
            )

    def take(self, number: int) -> _Inbox:
        """Move bytes; what has arrived for a communicator."""
        with self._lock:
            self._wire.progress()
            while (found := self._wire.take()) is not None:
                rank, data = found
                self.heard.add(rank)
                of, tag = _HEAD.unpack_from(data)
                if of not in self._freed:
                    message = np.frombuffer(data, dtype=np.uint8, offset=_HEAD.size)
                    self._inboxes[of].append((rank, tag, message))
            self._note_ended(look=False)
            return self._inboxes[number]

    def wait(self, seconds: float) -> None:
        """Sleep until bytes can move, at most so long; another thread may move them first."""
        if self._wire.fileno() < 0:  # closed
            time.sleep(seconds)
            return
        poll = select.poll()  # one of its own: threads may wait at once
        poll.register(self._wire, select.POLLIN)
        poll.poll(1e3 * seconds)

    def look(self, ranks: Sequence[int]) -> None:
        """Bring `ended` up to date for these: the end of a process ends its connections."""
        with self._lock:
            for rank in ranks:
                if rank != self.rank and rank not in self.ended:
                    self._wire.call(rank)
            self._wire.progress()
            self._note_ended(look=True)

    def _tend(self) -> None:
        """Between operations: confirm what has come, and repeat what was lost with a connection.

        On the connections' thread, which `close` waits for under the lock.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._wire.progress()
                self._note_ended(look=True)
            finally:
                self._lock.release()

    def _note_ended(self, look: bool) -> None:
        while (rank := self._wire.next_failed(look)) != _NOBODY:
            self.ended.add(rank)

    @property
    def is_sending(self) -> bool:
        """Whether messages have not been handed to the system yet."""
        with self._lock:
            return self._wire.unsent

    def free(self, number: int) -> None:
        """Drop what comes for a communicator."""
        with self._lock:
            self._freed.add(number)
            self._inboxes.pop(number, None)

    def close(self) -> None:
        """Say what was not said yet, and close all connections."""
        with self._lock:
            self._connections.close()


class Communicator:
    """Some of the learners, numbered by rank; the names are those of mpi4py.

    Also a Transport of plain messages (mpi_transport), of which the buffers are copied at once.

    Attributes:
        hub: of this process.
        ranks: of its learners among all.
        ends: deadline of `allgather`, of time.monotonic; None: no limit.
    """

    ends: float | None = None
    is_busy = False  # `pause` ends when bytes can move

    def __init__(self, hub: Hub, number: int, ranks: Sequence[int]):
        self.hub, self.ranks = hub, tuple(ranks)
        self._number = number
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._gathering: Messages | None = None

    # ---- as of mpi4py -------------------------------------------------------------------------

    def Get_rank(self) -> int:  # noqa: N802
        """Rank of this learner in it."""
        return self._places[self.hub.rank]

    def Get_size(self) -> int:  # noqa: N802
        """How many learners it has."""
        return len(self.ranks)

    def Free(self) -> None:  # noqa: N802
        """What still comes for it is dropped."""
        self.hub.free(self._number)
        self.hub.free(self._number + 1)

    def allgather(self, value: Any) -> list[Any]:
        """The values of all, by rank.

        Raises:
            PeerFailedError: if one of the learners fails before, or does not come before `ends`.
        """
        if self._gathering is None:
            self._gathering = Messages(Communicator(self.hub, self._number + 1, self.ranks))
        told = gather_once(self._gathering, value, self.ends)
        if told is None:
            failed = sorted(self.ranks[place] for place in self._gathering.failed)
            raise PeerFailedError(
                f"learners {failed} failed while all waited for them. Start the job again."
            )
        return told

    def bcast(self, value: Any, root: int = 0) -> Any:
        """That of rank `root`."""
        return self.allgather(value if self.Get_rank() == root else None)[root]

    # ---- as a transport -----------------------------------------------------------------------

    @property
    def failed(self) -> set[int]:
        """Places whose process has ended."""
        return {self._places[rank] for rank in self.hub.ended if rank in self._places}

    @property
    def is_sending(self) -> bool:
        """Whether the system has not taken all yet: bytes move only while somebody polls."""
        return self.hub.is_sending

    def send(self, place: int, tag: int, data: Any) -> None:
        """See Transport."""
        self.hub.send(self.ranks[place], self._number, tag, data)

    def poll(self) -> Iterator[tuple[int, int, Bytes]]:
        """See Transport."""
        arrived = self.hub.take(self._number)
        while arrived:
            rank, tag, data = arrived.popleft()
            yield self._places[rank], tag, data

    def pause(self, seconds: float) -> None:
        """See Transport."""
        self.hub.wait(seconds)

    def recycle(self, buffer: Bytes) -> None:
        """Nothing to do: each message has memory of its own."""

    def look_for_failures(self) -> None:
        """Watch the living learners 1, 2, 4, ... ranks further: those tell the others."""
        living = [rank for rank in self.ranks if rank not in self.hub.ended]
        mine, steps = living.index(self.hub.rank), range((len(living) - 1).bit_length())
        self.hub.look([living[(mine + (1 << k)) % len(living)] for k in steps])

    def look_at_all(self) -> set[int]:
        """Places whose process has ended, after a look at each."""
        self.hub.look(self.ranks)
        return self.failed
