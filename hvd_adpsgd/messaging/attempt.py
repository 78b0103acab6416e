"""One attempt at an operation over all learners: collectives of the learners that are alive.

On one host, large arrays go through memory that all its learners map (host_memory). Between hosts they are
sent as messages: small arrays in few steps, large ones in segments.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.messaging.host_memory import Hosts, Sharing
from hvd_adpsgd.messaging.messages import (
    CHANNELS,
    COMPLETE,
    FEW,
    FIRST_PHASE,
    AttemptAbandonedError,
    Messages,
)
from hvd_adpsgd.messaging.mpi_transport import SEGMENT, Bytes

_SMALL = 2**16  # largest number of bytes for which latency matters more than bandwidth
_WINDOW = 16 * SEGMENT  # bytes of a broadcast that are in flight at once


class Attempt:
    """One attempt at an operation over all learners: collectives of living learners, in one order on all.

    Args:
        messages: the Messages of all learners.
        places: place in `messages` of each learner of the attempt, by its rank in the attempt.
        ranks: rank in the job of each learner of the attempt, by its rank in the attempt.
        ends: deadline of all waits, of time.monotonic; None: no deadline.
        sharing: memory that learners on one host share; None: all bytes travel as messages.

    Attributes:
        rank, size: rank of this learner, and number of learners, in the attempt.
        ranks: see the arguments.
        calls: the call (collectives/call) of each learner of the attempt, by rank.

    Every method raises AttemptAbandonedError if a learner of the attempt fails or leaves the attempt.
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

    def among(self, ranks: Sequence[int]) -> Attempt:
        """Return the same attempt of some of its learners, for collectives of these alone, by messages.

        Args:
            ranks: ranks in this attempt; that of this learner is one of them.
        """
        places = [self._places[rank] for rank in ranks]
        part = Attempt(self._messages, places, [self.ranks[rank] for rank in ranks], self._ends)
        part._phase = self._phase
        return part

    def _next_phase(self) -> None:
        self._phase = (self._phase + 1) % (CHANNELS - FIRST_PHASE)

    @property
    def _channel(self) -> int:
        return FIRST_PHASE + self._phase

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
        """Raise AttemptAbandonedError if a learner of this attempt at an operation has failed or left."""
        self._messages.check(self.number)
        if self._messages.agreement.excluded or not self._others.isdisjoint(self._messages.failed):
            raise AttemptAbandonedError

    def look(self) -> None:
        """Receive messages and `check`: for a learner that waits at a barrier in shared memory."""
        self._messages.poll()
        self._messages.look_around()
        self.check()

    def flush(self) -> None:
        """Wait until the buffers of all sent messages may be changed."""
        if not self._messages.flush(self.check, self._ends):
            raise AttemptAbandonedError

    def _hosts(self, nbytes: int) -> Hosts | None:
        """Return which learners share a host's memory; None if none do, or if `nbytes` is not worth barriers.

        All learners of the attempt call this together.
        """
        if self._sharing is None or self.size == 1 or nbytes <= _SMALL:
            return None
        hosts = self._sharing.among(self)
        if hosts is not None:
            self.flush()  # messages do not move while a learner sleeps at a barrier in shared memory
        return hosts

    def _send_all(self, rank: int, data: Any) -> None:
        """Send bytes in segments, preceded by the number of bytes, which the receiver does not know."""
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

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all learners, by rank; in 1 step for few learners, in log2 n steps for many.

        Source: Bruck et al., Efficient algorithms for all-to-all communications in multiport
            message-passing systems, IEEE TPDS 1997.
        """
        self._next_phase()
        if self.size <= FEW:
            return self._gather_directly(value)
        n, step = self.size, 1
        have = [pickle.dumps(value)]  # values of this rank and of the ranks that follow it
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
        """Overwrite a contiguous array with the array of rank `root`; inside a host through shared memory."""
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
        """Broadcast `data` from the first of `ranks` to the other ranks: a binomial tree, by segments."""
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
                self.flush()  # bounds the memory of the copies that wait to be sent

    def allreduce(self, mine: NDArray[Any], combine: Any = np.add) -> NDArray[Any]:
        """Return the arrays of all learners, combined element by element; the same bits on all learners.

        Neither `mine` nor the result may change before `flush`: MPI may still read them.

        Args:
            mine: this learner's array; contiguous, with the same dtype and number of elements on all.
            combine: a commutative ufunc; with np.minimum and np.maximum, a NaN in one array gives NaN.
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
        """Combine the arrays in each host's memory, then, by messages, among one learner of each host."""
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
        """Combine the arrays of several ranks element by element in one pass, if all share a host's memory.

        Args:
            arrays: contiguous, of one dtype; of the same dtype and shapes on all ranks.
            combine: combine(parts, result) writes into `result` the result for a part of the arrays, given
                that part of the array of each of `givers`, in their order.
            givers: ranks whose arrays are combined.
            wanted: for each array, whether this rank needs the result.

        Returns:
            The result for each array, with the same bits on all ranks, None if it is not wanted on this rank;
            on all ranks None in place of the list unless all share one host's memory.
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
        """Combine by recursive doubling; ranks beyond a power of two first send their arrays to lower ranks.

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
        """Reduce-scatter and all-gather around a ring of n ranks: each sends 2 (n - 1) / n of the array.

        Each block is summed in the order of the ring, and its sum is then copied, so all have the same bits.

        Args:
            total: array of one dimension; overwritten with the result.
            combine: see allreduce.
            ring: ranks in the order of the ring; this rank is one of them.
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
        self.flush()  # the sums overwrite buffers of sent messages
        for step in range(n - 1):
            self._pass_on(blocks[(mine - step + 1) % n], blocks[(mine - step) % n], np.copyto, ring)

    def _pass_on(
        self,
        block: NDArray[Any],
        target: NDArray[Any],
        take_in: Callable[[Any, Any], object],
        ring: Sequence[int],
    ) -> None:
        """Send `block` to the next rank of a ring, and receive a block from the rank before, in segments.

        Args:
            block: the block to send.
            target: the block into which the received one is copied or combined; it has the same size.
            take_in: take_in(part, segment) copies or combines a received segment into a part of `target`.
            ring: ranks in the order of the ring; this rank is one of them.
        """
        count, mine = SEGMENT // block.itemsize, ring.index(self.rank)
        for start in range(0, block.size, count):
            self._send(ring[(mine + 1) % len(ring)], block[start : start + count].view(np.uint8))
        for start in range(0, target.size, count):
            part = target[start : start + count]
            taken = self._take(ring[mine - 1])
            take_in(part, taken.view(target.dtype))
            self._messages.recycle(taken)

    def allgatherv(self, mine: Bytes, everything: Bytes, counts: Sequence[int]) -> None:
        """Fill `everything` with the bytes of all learners, by rank.

        Args:
            mine: this learner's bytes, counts[rank] of them.
            everything: overwritten; sum(counts) bytes.
            counts: number of bytes of each learner, by rank.
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
        """Wait until all learners of the attempt at the operation have called `barrier`."""
        self.gather(None)

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave the attempt at the operation, because of `error` if given; make all learners leave it."""
        rank = self.ranks[self.rank]
        reason = (type(error).__name__, str(error), rank) if error else None
        self._messages.abandon(self._places, reason)


def _in_order(combine: Any) -> Callable[[Sequence[NDArray[Any]], NDArray[Any]], object]:
    """Return a function that combines several arrays with the ufunc `combine`, in their order."""

    def act(parts: Sequence[NDArray[Any]], result: NDArray[Any]) -> None:
        first, *others = parts
        if not others:  # this learner is the only one on its host
            result[:] = first
        for part in others:
            first = combine(first, part, out=result)

    return act


def gather_once(messages: Messages, value: Any, ends: float | None = None) -> list[Any] | None:
    """Return the values of all learners of a communicator, by rank; None if one has failed or is late.

    Args:
        messages: the Messages over the communicator.
        value: this learner's value.
        ends: deadline, of time.monotonic; None: no deadline. All learners that do not reach the deadline
            return the same.
    """
    if messages.agreement.voted:  # an earlier gather_once has timed out before its decision
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
