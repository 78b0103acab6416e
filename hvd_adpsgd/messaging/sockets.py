"""Communicators of learners over TCP, for jobs whose processes MPI does not join.

    Hub             the connections of this process to all other learners
    Communicator    some of the learners, by rank; its messages are separate from those of other ones

A message begins with the number of its communicator and its tag. All learners make their communicators
together and in the same order, so a communicator has the same number on all of them.
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

_HEAD = struct.Struct("=ii")  # in front of each message: number of its communicator, tag
_CHANNEL = 0  # the only channel of the wire that is used
_NOBODY = -1
_EMPTY = np.empty(0, dtype=np.uint8)

_Inbox = deque[tuple[int, int, Bytes]]  # (rank of the sender, tag, bytes) of each message


class Hub:
    """The connections of this process to the other learners; all learners make their Hub together.

    Args:
        rank, size: rank of this learner, and number of learners, in the job.
        config: options of the connections, see Connections.
        gather: returns the values of all learners, by rank; called Connections.GATHERS times.

    Attributes:
        rank, size: see the arguments.
        ended: ranks of learners whose process has ended, or whose host is silent.
        heard: ranks of learners from which a message has arrived, and of this learner.
    """

    def __init__(self, rank: int, size: int, config: Config, gather: Callable[[Any], list[Any]]):
        self.rank, self.size = rank, size
        self.ended: set[int] = set()
        self.heard = {rank}
        # operations over all learners, shutdown and `_tend` use the wire on different threads
        self._lock = threading.Lock()
        self._inboxes: dict[int, _Inbox] = defaultdict(deque)
        self._made = 0
        self._freed: set[int] = set()
        self._connections = Connections(rank, size, config, "learner", self._tend)
        self._wire = self._connections.wire
        self._connections.meet(gather)

    @property
    def address(self) -> str:
        """Address on which this learner listens for connections of the others."""
        return self._connections.address

    def address_of(self, rank: int) -> str:
        """Return the address on which another learner listens, for error messages."""
        return self._connections.address_of(rank)

    def communicator(self, ranks: Sequence[int]) -> Communicator | None:
        """Make a communicator of the learners `ranks`; None on others. All learners call this together."""
        number = self._made
        self._made += 2  # numbers of the communicator's messages, and of its allgather's messages
        return Communicator(self, number, ranks) if self.rank in ranks else None

    def send(self, rank: int, number: int, tag: int, data: Any) -> None:
        """Queue a copy of a message to `rank`; messages to learners that have ended are dropped.

        Args:
            rank: rank of the receiver in the job.
            number: number of the communicator.
            tag: tag of the message.
            data: the message.
        """
        view = memoryview(data)
        with self._lock:
            self._wire.post(
                rank, _CHANNEL, _HEAD.pack(number, tag), view.cast("B") if view else _EMPTY
            )

    def take(self, number: int) -> _Inbox:
        """Move bytes over all connections; return the messages that have arrived for one communicator."""
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
        """Sleep until bytes can move, at most for `seconds`; another thread may move them first."""
        if self._wire.fileno() < 0:  # the wire is closed
            time.sleep(seconds)
            return
        poll = select.poll()  # one poll object per call, because several threads may wait at once
        poll.register(self._wire, select.POLLIN)
        poll.poll(1e3 * seconds)

    def look(self, ranks: Sequence[int]) -> None:
        """Update `ended` for the learners `ranks` by connecting: a connection ends with the process."""
        with self._lock:
            for rank in ranks:
                if rank != self.rank and rank not in self.ended:
                    self._wire.call(rank)
            self._wire.progress()
            self._note_ended(look=True)

    def _tend(self) -> None:
        """Between operations, confirm received messages, and repeat messages that a connection has lost.

        Runs on the connections' thread, for which `close` waits while it has the lock; so it must not wait
        for the lock.
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
        """Whether there are messages that the operating system has not taken over yet."""
        with self._lock:
            return self._wire.unsent

    def free(self, number: int) -> None:
        """Drop messages for communicator `number`: those that have arrived, and later ones."""
        with self._lock:
            self._freed.add(number)
            self._inboxes.pop(number, None)

    def close(self) -> None:
        """Send what has not been sent yet, and close all connections."""
        with self._lock:
            self._connections.close()


class Communicator:
    """A group of learners, numbered by rank, that communicates over a Hub, with methods as in mpi4py.

    It is also a Transport of plain messages (mpi_transport), which copies buffers at once.

    Attributes:
        hub: the connections of this process.
        ranks: rank in the job of each learner, by rank in this communicator.
        ends: deadline of `allgather`, of time.monotonic; None: no limit.
    """

    ends: float | None = None
    is_busy = False  # False, as `pause` ends when bytes can move

    def __init__(self, hub: Hub, number: int, ranks: Sequence[int]):
        self.hub, self.ranks = hub, tuple(ranks)
        self._number = number
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._gathering: Messages | None = None

    def Get_rank(self) -> int:  # noqa: N802
        """Return the rank of this learner in the communicator."""
        return self._places[self.hub.rank]

    def Get_size(self) -> int:  # noqa: N802
        """Return the number of learners of the communicator."""
        return len(self.ranks)

    def Free(self) -> None:  # noqa: N802
        """Free the communicator: messages that still arrive for it are dropped."""
        self.hub.free(self._number)
        self.hub.free(self._number + 1)

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all learners, by rank.

        Raises:
            PeerFailedError: if a learner fails before it has called this, or does not call it before `ends`.
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
        """Return the value of rank `root`."""
        return self.allgather(value if self.Get_rank() == root else None)[root]

    @property
    def failed(self) -> set[int]:
        """Places (ranks in this communicator) of learners whose process has ended."""
        return {self._places[rank] for rank in self.hub.ended if rank in self._places}

    @property
    def is_sending(self) -> bool:
        """Whether bytes of this or another communicator wait to be sent: bytes move only while polled."""
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
        """Do nothing: each received message has memory of its own."""

    def look_for_failures(self) -> None:
        """Check if living learners 1, 2, 4, ... ranks further have ended; other learners check the rest."""
        living = [rank for rank in self.ranks if rank not in self.hub.ended]
        mine, steps = living.index(self.hub.rank), range((len(living) - 1).bit_length())
        self.hub.look([living[(mine + (1 << k)) % len(living)] for k in steps])

    def look_at_all(self) -> set[int]:
        """Check whether each learner has ended; return the places of the ended learners."""
        self.hub.look(self.ranks)
        return self.failed
