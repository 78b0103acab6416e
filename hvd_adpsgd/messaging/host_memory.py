"""Large collectives of the learners of one host, through memory that they map.

Arrays go through the memory block by block: while a block is combined, the one behind it comes in and the
one before it goes out, so a block is still in the processors' caches when it is read. Between two blocks all
learners meet at a barrier. One that fails leaves the others waiting there; they look at their messages
meanwhile.

The memory is an unnamed file: no death leaves anything behind. After an attempt that was not completed it is
thrown away (see Sharing): a learner that was stopped in its middle, and is taken for failed, may still write
to it.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.shared_memory import SHARED_FOLDER, host_name, try_file, try_map
from hvd_adpsgd.messaging.host_barrier import arrive, await_count

__all__ = ["HostMemory", "Hosts", "Sharing", "Waiting", "alone"]

_Array = NDArray[Any]
Combine = Callable[[Sequence[_Array], _Array], object]  # arrays by place, and where the result goes

BLOCK = 2**19  # bytes of each learner in one step
_HEAD = 64  # bytes before the blocks; the barrier's count is in them
_FIRST_LOOK_S, _LAST_LOOK_S = 2e-3, 2e-2  # at messages, while learners wait for each other


class Waiting(Protocol):
    """What a learner does while it waits at a barrier."""

    def look(self) -> None:
        """Take in messages; raises if a learner has failed or has left."""


class HostMemory:
    """Memory of the learners of one host; all of them use it together and in the same order.

    Args:
        memory: mapped by all, zeroed at first: `nbytes_for` so many learners.
        place: of this learner among them.
        size: how many they are.
    """

    def __init__(self, memory: NDArray[np.uint8], place: int, size: int):
        self.place, self.size = place, size
        self._count, self._target = memory[:_HEAD], 0
        rows = memory[_HEAD:].reshape(2, size + 1, BLOCK)
        self._given = rows[:, :size]  # by turn and place
        self._result = rows[:, size]
        self._whole = memory[_HEAD:].reshape(2, -1)

    @staticmethod
    def nbytes_for(size: int) -> int:
        """Bytes for so many learners."""
        return _HEAD + 2 * (size + 1) * BLOCK

    def _meet(self, waiting: Waiting) -> None:
        """Wait until all are here."""
        self._target = (self._target + self.size) % 2**32
        arrive(self._count, self._target)
        pause = _FIRST_LOOK_S
        while not await_count(self._count, self._target, pause):
            waiting.look()
            pause = min(2 * pause, _LAST_LOOK_S)

    # ---- collectives --------------------------------------------------------------------------

    def combine(
        self,
        arrays: Sequence[_Array],
        results: Sequence[_Array | None],
        combine: Combine,
        givers: Sequence[int],
        waiting: Waiting,
    ) -> None:
        """Combine the arrays of all element by element; the same bits for all.

        Args:
            arrays: contiguous, of one dtype, as many elements on all.
            results: overwritten; like `arrays`, None for each that this learner does not need.
            combine: writes the result of a part of the `givers`' arrays, in their order.
            givers: places whose arrays count.
            waiting: see there.
        """
        sizes, dtype = [array.size for array in arrays], arrays[0].dtype
        mine, out = _Joined(arrays, sizes), _Joined(results, sizes)
        steps = _ranges(sum(sizes), BLOCK // dtype.itemsize)
        for k in range(len(steps) + 2):
            if k < len(steps) and self.place in givers:
                mine.read(*steps[k], self._given[k % 2, self.place].view(dtype))
            if 0 < k <= len(steps):
                self._combine_part(steps[k - 1], (k - 1) % 2, dtype, combine, givers)
            if k > 1:
                out.write(*steps[k - 2], self._result[k % 2].view(dtype))
            self._meet(waiting)

    def _combine_part(
        self,
        step: tuple[int, int],
        turn: int,
        dtype: np.dtype[Any],
        combine: Combine,
        givers: Sequence[int],
    ) -> None:
        """The part of a block that falls to this learner."""
        count = step[1] - step[0]
        part = slice(count * self.place // self.size, count * (self.place + 1) // self.size)
        given = [self._given[turn, place].view(dtype)[part] for place in givers]
        combine(given, self._result[turn].view(dtype)[part])

    def broadcast(self, data: NDArray[np.uint8], root: int, waiting: Waiting) -> None:
        """Overwrite bytes with those of place `root`."""
        blocks = self._whole
        steps = _ranges(data.size, blocks.shape[1])
        for k in range(len(steps) + 1):
            if self.place == root and k < len(steps):
                _copy(data[slice(*steps[k])], blocks[k % 2])
            if self.place != root and k:
                start, end = steps[k - 1]
                data[start:end] = blocks[(k - 1) % 2, : end - start]
            self._meet(waiting)

    def allgather(
        self, mine: NDArray[np.uint8], parts: Sequence[NDArray[np.uint8]], waiting: Waiting
    ) -> None:
        """Fill `parts`, by place, with the bytes of all; each has its own length."""
        longest = max(part.size for part in parts)
        steps = _ranges(longest, BLOCK)
        for k in range(len(steps) + 1):
            if k < len(steps):
                _copy(mine[slice(*steps[k])], self._given[k % 2, self.place])
            if k:
                for place, part in enumerate(parts):
                    space = part[slice(*steps[k - 1])]
                    space[:] = self._given[(k - 1) % 2, place, : space.size]
            self._meet(waiting)


def _copy(source: _Array, space: _Array) -> None:
    space[: source.size] = source


def _ranges(count: int, step: int) -> list[tuple[int, int]]:
    """[0, count) in pieces of at most `step`."""
    return [(start, min(start + step, count)) for start in range(0, count, step)]


class _Joined:
    """Contiguous arrays of one dtype, read and written as if they lay one behind the other.

    Args:
        arrays: None for a gap.
        sizes: elements of each.
    """

    def __init__(self, arrays: Sequence[_Array | None], sizes: Sequence[int]):
        self._flat = [None if array is None else array.reshape(-1) for array in arrays]
        self._ends = list(itertools.accumulate(sizes))

    def _pieces(self, start: int, end: int) -> list[tuple[slice, _Array]]:
        """Where in [start, end) each array lies, and this part of it."""
        found, i = [], bisect.bisect_right(self._ends, start)
        begin = self._ends[i - 1] if i else 0
        while begin < end:
            last, flat = self._ends[i], self._flat[i]
            a, b = max(start, begin), min(end, last)
            if flat is not None:
                found.append((slice(a - start, b - start), flat[a - begin : b - begin]))
            begin, i = last, i + 1
        return found

    def read(self, start: int, end: int, space: _Array) -> None:
        for where, part in self._pieces(start, end):
            space[where] = part

    def write(self, start: int, end: int, values: _Array) -> None:
        for where, part in self._pieces(start, end):
            part[:] = values[where]


# ---- who shares memory ----------------------------------------------------------------------------


class Hosts(NamedTuple):
    """How the learners of an attempt lie on hosts, at least two of them on one.

    Attributes:
        groups: ranks of each host, in the same order on all.
        own: those of this host.
        memory: that they share.
    """

    groups: tuple[tuple[int, ...], ...]
    own: tuple[int, ...]
    memory: HostMemory


class _Member(Protocol):
    rank: int
    size: int
    ranks: tuple[int, ...]

    def gather(self, value: Any) -> list[Any]: ...


class Sharing:
    """The memory that learners share from one operation to the next, as long as all of them are there.

    Args:
        host: learners with equal keys try to map one segment, and use messages if that fails; None: learners
            of one system do.
    """

    def __init__(self, host: Any = None) -> None:
        self._host = _host() if host is None else host
        self._ranks: tuple[int, ...] | None = None
        self._hosts: Hosts | None = None

    def among(self, attempt: _Member) -> Hosts | None:
        """Of the learners of an attempt; a collective where they are others than before.

        Returns:
            None, on all of them, where no two share a host, or one cannot map the memory.
        """
        if self._ranks != attempt.ranks:
            self._hosts = _met(attempt, self._host)
            self._ranks = attempt.ranks
        return self._hosts

    def forget(self) -> None:
        """After an attempt that was not completed: on all learners, as that is decided."""
        self._ranks = self._hosts = None


def _met(attempt: _Member, host: Any) -> Hosts | None:
    told = attempt.gather(host)
    by_host: dict[Any, list[int]] = {}
    for rank, its_host in enumerate(told):
        by_host.setdefault(its_host, []).append(rank)
    groups = tuple(map(tuple, by_host.values()))
    own = next(group for group in groups if attempt.rank in group)
    if len(groups) == attempt.size:
        return None
    nbytes = HostMemory.nbytes_for(len(own))
    file = try_file(nbytes) if attempt.rank == own[0] else None
    try:
        made = attempt.gather(file)[own[0]]
        area = try_map(made, nbytes) if made else None
        mapped = attempt.gather(area is not None)
    finally:
        if file is not None:
            os.close(file.handle)
    if area is None or not all(mapped):
        return None
    with contextlib.suppress(OSError):
        area.madvise(mmap.MADV_DONTFORK)  # a child of a learner would keep the memory
    memory = np.frombuffer(area, dtype=np.uint8, count=nbytes)
    return Hosts(groups, own, HostMemory(memory, own.index(attempt.rank), len(own)))


def _host() -> Any:
    """The key of this host: learners with equal keys may share memory; alone() is equal to none."""
    with contextlib.suppress(OSError):
        return host_name(), socket.gethostname(), os.stat(SHARED_FOLDER).st_dev
    return alone()


def alone() -> Any:
    """For Sharing: of a learner that shares with nobody."""
    return host_name(), socket.gethostname(), os.getpid(), "alone"
