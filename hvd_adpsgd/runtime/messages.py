"""Plain messages between all learners, and small collectives and agreements made of them.

One private communicator carries them. It is never revoked, shrunk or agreed upon: while several threads use
MPI, Open MPI's agreement gives split answers, and shrink is built on it.

    Messages      sends, receives, knows which learners have failed, moves the agreement's messages
    Attempt       one attempt of an operation: collectives of the learners that are alive

Every attempt ends with one agreement, so attempts are numbered like decisions. A message carries the number
of its attempt in its tag. A message of an attempt that is over is received and dropped; one of the next
attempt is kept, and there are none of later ones, because a decision needs all votes.

"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.agreement import Agreement, Decision
from hvd_adpsgd.errors import LearnerFailedError, TransportError
from hvd_adpsgd.runtime.host_memory import Hosts, Sharing
from hvd_adpsgd.runtime.mpi_transport import (
    SEGMENT,
    Bytes,
    Transport,
    transport_of,
)

__all__ = [
    "COMPLETE",
    "Attempt",
    "AttemptAbandonedError",
    "Messages",
    "gather_once",
]

COMPLETE, NO_ERROR = 1, 2  # flags of a vote

_SPAN, _CHANNELS = (
    2**13,
    2**9,
)  # tag = number % _SPAN * _CHANNELS + channel; UCX allows tags below 2^23
_AGREEMENT, _ABANDON, _LAST, _FIRST_PHASE = (
    0,
    1,
    2,
    3,
)  # channels; each collective of an attempt has one
_FEW = 16  # learners up to which all send to all: fewer steps, n^2 messages
_SMALL = 2**16  # bytes up to which latency counts more than bandwidth
_SHORTEST_PAUSE_S, _BUSY_PAUSE_S, _LONGEST_PAUSE_S = 1e-6, 2e-5, 1e-3
_WINDOW = 16 * SEGMENT  # bytes of a broadcast on their way
_PATIENCE_S = 1.0  # for a message that was sent before one that has arrived


class AttemptAbandonedError(Exception):
    """A learner has left this attempt, or has failed; never seen outside of the runtime.

    Attributes:
        reason: (class name, text, rank) of the error for which a learner has left it, or None.
        is_told: that learner has told all.
    """

    def __init__(self, reason: tuple[str, str, int] | None = None, is_told: bool = False):
        super().__init__(reason)
        self.reason, self.is_told = reason, is_told


class Messages:
    """Messages between the learners of one communicator, which nothing else uses.

    One thread at a time. Learners are numbered by their rank in `comm`, here called place.

    Args:
        comm: private; one of mpi4py with errors returned, or one over sockets.

    Attributes:
        agreement: of all learners of `comm`.
        failed: places believed failed: reported by the transport, or told by a peer.
    """

    def __init__(self, comm: Any):
        self.comm = comm
        self.transport: Transport = transport_of(comm)
        self.place, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.agreement = Agreement(self.size, self.place, direct=self.size <= _FEW)
        self.failed: set[int] = set()
        self._abandoned: dict[int, tuple[str, str, int] | None] = {}  # by number
        self._inbox: dict[tuple[int, int, int], deque[Bytes]] = defaultdict(deque)

    # ---- sending ------------------------------------------------------------------------------

    def send(self, place: int, channel: int, data: Any, number: int | None = None) -> None:
        """Send bytes without waiting. `data` must not change until `flush`.

        A learner that is believed failed is sent to as well, unless the transport has reported it: it may be
        alive, and wait to be told what the others have decided.
        """
        number = self.agreement.number if number is None else number
        self.transport.send(place, number % _SPAN * _CHANNELS + channel, data)
        self._believe_reported()

    def flush(self, check: Callable[[], object] | None = None, ends: float | None = None) -> bool:
        """Wait until all that was sent may change; whether it may."""
        return self.wait(lambda: not self.transport.is_sending, check, ends)

    def _send_agreement(self) -> None:
        for place, message in self.agreement.take_outgoing():
            self.send(place, _AGREEMENT, message)

    # ---- receiving ----------------------------------------------------------------------------

    def wait(
        self,
        done: Callable[[], object],
        check: Callable[[], object] | None = None,
        ends: float | None = None,
    ) -> bool:
        """Receive until `done()`; sleeps between polls, so that a waiting learner frees its core.

        Args:
            done: asked after each poll.
            check: called where it is not; may raise.
            ends: deadline, of time.monotonic; polls at least once. None: no deadline.

        Returns:
            Whether it is done.
        """
        pause = _SHORTEST_PAUSE_S
        while True:
            moved = self.poll()
            if done():
                return True
            if check is not None:
                check()
            if ends is not None and time.monotonic() > ends:
                return False
            if moved:
                pause = _SHORTEST_PAUSE_S
                continue
            if pause >= _LONGEST_PAUSE_S:
                self.look_for_failures()
            is_busy = self.transport.is_busy
            self.transport.pause(min(pause, _BUSY_PAUSE_S) if is_busy else pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def poll(self) -> bool:
        """Take in all that has arrived; whether anything has."""
        moved = False
        for source, tag, buffer in self.transport.poll():
            moved = True
            self._take_in(source, tag, buffer)
        self._believe_reported()
        return moved

    def _take_in(self, source: int, tag: int, buffer: Bytes) -> None:
        channel = tag % _CHANNELS
        if channel == _AGREEMENT:
            self._agree(source, buffer)
            return
        current = self.agreement.number
        number = current + (tag // _CHANNELS - current + _SPAN // 2) % _SPAN - _SPAN // 2
        if channel == _LAST:
            self._inbox[0, _LAST, source].append(buffer)
        elif channel == _ABANDON and number >= current - 1:
            reason = pickle.loads(buffer.tobytes())
            self._abandoned[number] = self._abandoned.get(number) or reason
        elif channel >= _FIRST_PHASE and number >= current:
            self._inbox[number, channel, source].append(buffer)

    def _agree(self, source: int, message: Bytes) -> None:
        before = self.agreement.number
        try:
            self.agreement.receive(source, message.data)
        except ValueError as error:
            raise TransportError(
                f"learners do not understand each other ({error}). Run the same release on all of them."
            ) from None
        self._after_agreement(before)

    def _after_agreement(self, before: int) -> None:
        self._send_agreement()
        self.failed.update(self.agreement.suspected)
        if self.agreement.number > before:
            self._forget()
            self._relay()

    def _forget(self) -> None:
        """Drop what belongs to attempts that are over."""
        current = self.agreement.number
        for key in [k for k in self._inbox if k[1] != _LAST and k[0] < current]:
            del self._inbox[key]
        for number in [k for k in self._abandoned if k < current - 1]:
            del self._abandoned[number]

    def _relay(self) -> None:
        """Send the decision on: a peer may still wait for it, and the coordinator may have failed.

        Without it the peer would wait until this learner comes to its next operation. It goes to the learners
        1, 2, 4, ... places further, which send it on as well.
        """
        message = self.agreement.last_commit()
        living = [i for i in range(self.size) if i not in self.failed or i == self.place]
        mine, step = living.index(self.place), 1
        while message and step < len(living):
            self.send(living[(mine + step) % len(living)], _AGREEMENT, message)
            step *= 2

    def recycle(self, buffer: Bytes) -> None:
        """A received message has been used: its memory serves again."""
        self.transport.recycle(buffer)

    # ---- failures -----------------------------------------------------------------------------

    def look_for_failures(self) -> None:
        """Ask the transport which processes have failed."""
        self.transport.look_for_failures()
        self._believe_reported()

    def _believe_reported(self) -> None:
        if not self.transport.failed <= self.failed:
            self.believe_failed(self.transport.failed)

    def believe_failed(self, places: set[int]) -> None:
        """From now on these are believed failed, for good; peers learn it with the next messages."""
        before = self.agreement.number
        for place in sorted(places - self.failed):
            self.failed.add(place)
            self.agreement.failed(place)
        self._after_agreement(before)

    # ---- attempts and decisions ---------------------------------------------------------------

    def check(self, number: int) -> None:
        """Raise AttemptAbandonedError if a peer has left this attempt."""
        if number in self._abandoned:
            raise AttemptAbandonedError(self._abandoned[number], is_told=True)

    def abandon(self, places: Sequence[int], reason: tuple[str, str, int] | None) -> None:
        """Tell these peers that this learner leaves the attempt under way, which they then leave too."""
        message = pickle.dumps(reason)
        for place in places:
            if place != self.place:
                self.send(place, _ABANDON, message)

    def reason(self, number: int) -> tuple[str, str, int] | None:
        """The error for which a peer has left an attempt; waits a moment for its message."""
        self.wait(
            lambda: self._abandoned.get(number) is not None, ends=time.monotonic() + _PATIENCE_S
        )
        return self._abandoned.get(number)

    def take(self, number: int, channel: int, place: int) -> Bytes | None:
        """The next message of this kind, if it is here."""
        arrived = self._inbox.get((number, channel, place))
        return arrived.popleft() if arrived else None

    def vote(self, flag: int, digest: int = 0) -> int:
        """Vote for the decision under way; returns its number."""
        before = self.agreement.number
        if self.agreement.excluded:  # `decision` raises
            return before
        number = self.agreement.vote(flag, digest)
        self._after_agreement(before)
        return number

    def decision(self, number: int, ends: float | None = None) -> Decision | None:
        """Wait for a decision; None after `ends`.

        Raises:
            LearnerFailedError: if the peers have declared this learner failed.
        """
        core = self.agreement
        self.wait(lambda: core.number > number or core.excluded, ends=ends)
        if core.excluded:
            raise LearnerFailedError(
                f"learner {self.place} of {self.size} was declared failed by its peers, because it was "
                "stopped or cut off for too long, and they continue without it. Start the job again; if "
                "learners stand still for so long, raise OMPI_MCA_mpi_ft_detector_timeout, without MPI "
                "HVD_ADPSGD_FAILURE_TIMEOUT_S."
            )
        return core.decision(number)

    def close(self, ends: float) -> bool:
        """Receive everything that is on its way here; whether the communicator can be freed.

        Without it, a late message would be delivered to the next communicator that has the same number.
        """
        peers = [i for i in range(self.size) if i != self.place]
        for place in peers:
            self.send(place, _LAST, b"")

        def done() -> bool:
            return not self.transport.is_sending and all(
                place in self.failed or self._inbox.get((0, _LAST, place)) for place in peers
            )

        return self.wait(done, ends=ends) and not self.failed


class Attempt:
    """One attempt of an operation: collectives of the learners that are alive, in the same order on all.

    Args:
        messages: of all learners.
        places: of the learners in it, by rank.
        ranks: their ranks in the job.
        ends: deadline of all waiting, of time.monotonic.
        sharing: of learners on one host; None: all bytes travel as messages.

    Attributes:
        rank, size: among these learners.
        ranks: see the arguments.
        calls: what each of them calls, by rank.

    Every method raises AttemptAbandonedError if one of them fails or leaves the attempt.
    """

    def __init__(
        self,
        messages: Messages,
        places: Sequence[int],
        ranks: Sequence[int],
        ends: float | None = None,
        sharing: Sharing | None = None,
    ):
        self.ranks, self.calls = tuple(ranks), ()  # type: tuple[int, ...], tuple[Any, ...]
        self.size, self.rank = len(places), list(places).index(messages.place)
        self.number = messages.agreement.number
        self._messages, self._places, self._ends = messages, tuple(places), ends
        self._sharing = sharing
        self._others = frozenset(places) - {messages.place}
        self._phase = 0

    # ---- one message --------------------------------------------------------------------------

    def _next_phase(self) -> None:
        self._phase = (self._phase + 1) % (_CHANNELS - _FIRST_PHASE)

    @property
    def _channel(self) -> int:
        return _FIRST_PHASE + self._phase

    def _send(self, rank: int, data: Any) -> None:
        self._messages.send(self._places[rank], self._channel, data, self.number)

    def _take(self, rank: int) -> Bytes:
        place, channel, found = self._places[rank], self._channel, []

        def here() -> bool:
            message = self._messages.take(self.number, channel, place)
            if message is not None:
                found.append(message)
            return bool(found)

        if not here() and not self._messages.wait(here, self.check, self._ends):
            raise AttemptAbandonedError
        return found[0]

    def check(self) -> None:
        """Raise AttemptAbandonedError if a peer has failed or has left this attempt."""
        self._messages.check(self.number)
        if self._messages.agreement.excluded or not self._others.isdisjoint(self._messages.failed):
            raise AttemptAbandonedError

    def look(self) -> None:
        """Take in messages, while this learner waits for others in another way; see `check`."""
        self._messages.poll()
        self._messages.look_for_failures()
        self.check()

    def flush(self) -> None:
        """Wait until all that was sent may change."""
        if not self._messages.flush(self.check, self._ends):
            raise AttemptAbandonedError

    def _hosts(self, nbytes: int) -> Hosts | None:
        """Who shares memory, if that is worth its barriers; all learners ask this together."""
        if self._sharing is None or self.size == 1 or nbytes <= _SMALL:
            return None
        hosts = self._sharing.among(self)
        if hosts is not None:
            self.flush()  # at a barrier nothing is sent
        return hosts

    def _send_all(self, rank: int, data: Any) -> None:
        """Send bytes whose number the receiver does not know."""
        view = memoryview(data)
        self._send(rank, len(view).to_bytes(8, "little") + bytes(view[:SEGMENT]))
        for start in range(SEGMENT, len(view), SEGMENT):
            self._send(rank, view[start : start + SEGMENT])

    def _take_all(self, rank: int) -> bytes:
        first = self._take(rank).tobytes()
        parts, missing = [first[8:]], int.from_bytes(first[:8], "little") - len(first) + 8
        while missing > 0:
            parts.append(self._take(rank).tobytes())
            missing -= len(parts[-1])
        return b"".join(parts)

    # ---- collectives --------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """The values of all, by rank, through pickle; in one step for few, in log2 n steps for many.

        Source: Bruck et al., Efficient algorithms for all-to-all communications in multiport
            message-passing systems, IEEE TPDS 1997.
        """
        self._next_phase()
        if self.size <= _FEW:
            return self._gather_directly(value)
        n, step = self.size, 1
        have = [pickle.dumps(value)]  # of this rank and those that follow it
        while step < n:
            self._send_all((self.rank - step) % n, pickle.dumps(have[: n - step]))
            have += pickle.loads(self._take_all((self.rank + step) % n))
            step *= 2
        return [pickle.loads(have[(i - self.rank) % n]) for i in range(n)]

    def _gather_directly(self, value: Any) -> list[Any]:
        mine = pickle.dumps(value)
        for step in range(1, self.size):
            self._send_all((self.rank + step) % self.size, mine)
        everything = [mine if i == self.rank else self._take_all(i) for i in range(self.size)]
        return [pickle.loads(data) for data in everything]

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        """Overwrite a contiguous array with that of rank `root`; on a host through its memory."""
        data, hosts = array.reshape(-1).view(np.uint8), self._hosts(array.nbytes)
        self._next_phase()
        if hosts is None:
            self._pass_down(data, [(root + i) % self.size for i in range(self.size)])
            return
        heads = [root if root in group else group[0] for group in hosts.groups]
        heads.sort(key=lambda rank: rank != root)
        if self.rank in heads:
            self._pass_down(data, heads)
        self.flush()
        head = next(rank for rank in heads if rank in hosts.own)
        hosts.memory.broadcast(data, hosts.own.index(head), self)

    def _pass_down(self, data: Bytes, ranks: Sequence[int]) -> None:
        """From the first of these ranks to the others: a binomial tree, segment by segment."""
        mine, n = ranks.index(self.rank), len(ranks)
        parent = mine - (1 << (mine.bit_length() - 1)) if mine else None
        steps = [1 << k for k in range(mine.bit_length(), n.bit_length())]
        children = [ranks[mine + step] for step in steps if mine + step < n]
        for start in range(0, data.size, SEGMENT):
            segment = data[start : start + SEGMENT]
            if parent is not None:
                taken = self._take(ranks[parent])
                segment[:] = taken
                self._messages.recycle(taken)
            for child in children:
                self._send(child, segment)
            if children and start % _WINDOW == 0:
                self.flush()  # what the system has not taken is held in copies

    def allreduce(self, mine: NDArray[Any], combine: Any = np.add) -> NDArray[Any]:
        """The arrays of all, combined element by element; the same bits on all.

        Args:
            mine: contiguous, the same dtype and number of elements on all.
            combine: a commutative ufunc; np.minimum and np.maximum pass a NaN on.
        """
        hosts = self._hosts(mine.nbytes)
        self._next_phase()
        if self.size == 1:
            return mine.copy()
        if mine.nbytes <= _SMALL:
            return self._doubled(mine, combine)
        if hosts is None:
            total = mine.reshape(-1).copy()
            self._scattered(total, combine, range(self.size))
            return total.reshape(mine.shape)
        return self._combined(hosts, mine, combine)

    def _combined(self, hosts: Hosts, mine: NDArray[Any], combine: Any) -> NDArray[Any]:
        """In the memory of each host, then among one learner of each."""
        heads = [group[0] for group in hosts.groups]
        has_total = len(heads) == 1 or self.rank in heads
        total, everyone = np.empty_like(mine), range(len(hosts.own))
        hosts.memory.combine(
            [mine], [total if has_total else None], _in_order(combine), everyone, self
        )
        if len(heads) > 1:
            if self.rank in heads:
                self._scattered(total.reshape(-1), combine, heads)
            self.flush()
            hosts.memory.broadcast(total.reshape(-1).view(np.uint8), 0, self)
        return total

    def elementwise(
        self,
        arrays: Sequence[NDArray[Any]],
        combine: Callable[[Sequence[NDArray[Any]], NDArray[Any]], object],
        givers: Sequence[int],
        wanted: Sequence[bool],
    ) -> list[NDArray[Any] | None] | None:
        """Combine the arrays of several ranks element by element in one pass; None where that needs messages.

        Args:
            arrays: contiguous, of one dtype; of the same dtype and shapes on all ranks.
            combine: writes what becomes of a part of the givers' arrays, in the order of `givers`.
            givers: ranks whose arrays count.
            wanted: whether this rank needs the result of each array.

        Returns:
            The results, the same bits on all, None for those not wanted here; None, on all, unless all share
            one host's memory.
        """
        hosts = self._hosts(sum(array.nbytes for array in arrays))
        if hosts is None or len(hosts.groups) > 1:
            return None
        results = [
            np.empty_like(array) if is_wanted else None
            for array, is_wanted in zip(arrays, wanted, strict=True)
        ]
        hosts.memory.combine(arrays, results, combine, givers, self)
        return results

    def _doubled(self, total: NDArray[Any], combine: Any) -> NDArray[Any]:
        """Recursive doubling; the ranks beyond a power of two first give theirs to another one.

        The lower rank's operand comes first on both sides, so both have the same bits.
        """

        def received(rank: int) -> NDArray[Any]:
            return self._take(rank).view(total.dtype).reshape(total.shape)

        power, step = 1 << (self.size.bit_length() - 1), 1
        if self.rank >= power:
            self._send(self.rank - power, total.reshape(-1).view(np.uint8))
            return received(self.rank - power)
        if self.rank + power < self.size:
            total = combine(total, received(self.rank + power))
        while step < power:
            peer = self.rank ^ step
            self._send(peer, np.ascontiguousarray(total).reshape(-1).view(np.uint8))
            other = received(peer)
            total = combine(total, other) if self.rank < peer else combine(other, total)
            step *= 2
        if self.rank + power < self.size:
            self._send(self.rank + power, np.ascontiguousarray(total).reshape(-1).view(np.uint8))
        return np.asarray(total)

    def _scattered(self, total: NDArray[Any], combine: Any, ring: Sequence[int]) -> None:
        """Reduce-scatter and all-gather around a ring of ranks: each sends 2 (n - 1) / n of the array.

        Block i is summed in the order of the ring, and its sum then travels as it is.

        Args:
            total: of one dimension; overwritten.
            combine: see allreduce.
            ring: of which this rank is one.
        """
        n, mine = len(ring), ring.index(self.rank)
        ends = [total.size * i // n for i in range(n + 1)]
        blocks = [total[a:b] for a, b in itertools.pairwise(ends)]
        for step in range(n - 1):
            target = blocks[(mine - step - 1) % n]
            self._pass_on(
                blocks[(mine - step) % n],
                target,
                lambda part, other: combine(other, part, out=part),
                ring,
            )
        self.flush()  # the sums overwrite what was sent
        for step in range(n - 1):
            self._pass_on(blocks[(mine - step + 1) % n], blocks[(mine - step) % n], np.copyto, ring)

    def _pass_on(
        self,
        block: NDArray[Any],
        target: NDArray[Any],
        take_in: Callable[[Any, Any], object],
        ring: Sequence[int],
    ) -> None:
        """Send a block to the next rank of a ring, and take in one from the rank before, by segments."""
        count, mine = SEGMENT // block.itemsize, ring.index(self.rank)
        for start in range(0, block.size, count):
            self._send(ring[(mine + 1) % len(ring)], block[start : start + count].view(np.uint8))
        for start in range(0, target.size, count):
            part = target[start : start + count]
            taken = self._take(ring[mine - 1])
            take_in(part, taken.view(target.dtype))
            self._messages.recycle(taken)

    def allgatherv(self, mine: Bytes, everything: Bytes, counts: Sequence[int]) -> None:
        """Fill `everything` with the bytes of all, by rank.

        Args:
            mine: counts[rank] bytes.
            everything: sum(counts) bytes.
            counts: of all, by rank.
        """
        ends = np.cumsum([0, *counts])
        blocks = [everything[a:b] for a, b in itertools.pairwise(ends)]
        if everything.size <= _SMALL:
            for block, part in zip(blocks, self.gather(mine.tobytes()), strict=True):
                block[:] = np.frombuffer(part, dtype=np.uint8)
            return
        hosts = self._hosts(everything.size)
        if hosts is not None and len(hosts.groups) == 1:
            hosts.memory.allgather(mine, blocks, self)
            return
        self._next_phase()
        n, blocks[self.rank][:] = self.size, mine
        for step in range(n - 1):
            source, target = blocks[(self.rank - step) % n], blocks[(self.rank - step - 1) % n]
            self._pass_on(source, target, np.copyto, range(n))

    def barrier(self) -> None:
        """Wait until all are here."""
        self.gather(None)

    # ---- leaving ------------------------------------------------------------------------------

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave it; the others leave it too."""
        rank = self.ranks[self.rank]
        self._messages.abandon(
            self._places, (type(error).__name__, str(error), rank) if error else None
        )


def _in_order(combine: Any) -> Callable[[Sequence[NDArray[Any]], NDArray[Any]], object]:
    """A ufunc applied to several arrays, the first ones first."""

    def act(parts: Sequence[NDArray[Any]], result: NDArray[Any]) -> None:
        first, *others = parts
        if not others:  # alone on its host
            result[:] = first
        for part in others:
            first = combine(first, part, out=result)

    return act


def gather_once(messages: Messages, value: Any, ends: float | None = None) -> list[Any] | None:
    """The values of all learners of a communicator; None if one has failed or does not come.

    The same answer on all learners that get one before `ends`, of time.monotonic; None: no deadline.
    """
    if messages.agreement.voted:  # in an earlier one, which timed out
        return None
    everyone = range(messages.size)
    attempt, told = Attempt(messages, everyone, everyone, ends), None
    with contextlib.suppress(AttemptAbandonedError):
        told = attempt.gather(value)
    if told is None:
        attempt.abandon()
    decision = messages.decision(messages.vote(COMPLETE if told is not None else 0), ends)
    if decision is None or not decision.flag & COMPLETE or decision.failed:
        return None
    return told
