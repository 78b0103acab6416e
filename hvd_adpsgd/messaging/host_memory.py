"""Collectives of large arrays among the learners of one host, through memory that all of them map.

Arrays go through the memory block by block: while a block is combined, the next one is copied in and the
previous one is copied out, so a block is still in the processors' caches when it is read. Between two blocks
all learners wait at a barrier. If a learner fails, the others wait at the barrier until they find, by polling
their messages, that it has failed.

The memory is an unnamed file, so a process that is killed leaves no file behind. After an attempt that was
not completed the memory is not used again (see Sharing): a learner that was stopped in the attempt, and was
declared failed, may still write to it.
"""

import bisect
import contextlib
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.shared_memory import SHARED_FOLDER, host_name, try_file, try_map
from hvd_adpsgd.messaging.host_barrier import arrive, await_count

_Array = NDArray[Any]
# arguments: arrays of the learners, by place, and the array for the result
Combine = Callable[[Sequence[_Array], _Array], object]

BLOCK = 2**19  # bytes of each learner's array that are combined in one step
_HEAD = 64  # bytes before the blocks, which contain the count of the barrier
_LONGEST_S = 2e-2  # between two looks for failures at a barrier, which wakes this learner


class Waiting(Protocol):
    """An object, such as an Attempt, that a learner calls while it waits at a barrier."""

    def look(self) -> None:
        """Receive messages; raise if a learner has failed or has left the attempt at the operation."""


class HostMemory:
    """Collectives in memory that the learners of one host map; all call its methods in the same order.

    Args:
        memory: nbytes_for(size) bytes, mapped by all learners, initially zero.
        place: index of this learner among them.
        size: number of learners.
    """

    def __init__(self, memory: NDArray[np.uint8], place: int, size: int):
        self.place, self.size = place, size
        self._count, self._target = memory[:_HEAD], 0
        rows = memory[_HEAD:].reshape(2, size + 1, BLOCK)
        self._given = rows[:, :size]  # input blocks, by parity of the step and by place
        self._result = rows[:, size]
        self._whole = memory[_HEAD:].reshape(2, -1)

    @staticmethod
    def nbytes_for(size: int) -> int:
        """Return how many bytes of memory `size` learners need."""
        return _HEAD + 2 * (size + 1) * BLOCK

    def _meet(self, waiting: Waiting) -> None:
        """Wait at the barrier until all learners of the host have called this."""
        self._target = (self._target + self.size) % 2**32
        arrive(self._count, self._target)
        while not await_count(self._count, self._target, _LONGEST_S):
            waiting.look()

    def combine(
        self,
        arrays: Sequence[_Array],
        results: Sequence[_Array | None],
        combine: Combine,
        givers: Sequence[int],
        waiting: Waiting,
    ) -> None:
        """Combine the arrays of the learners `givers` element by element; all learners get the same bits.

        Args:
            arrays: contiguous, of one dtype, with the same numbers of elements on all learners.
            results: overwritten; one for each of `arrays`, None for each that this learner does not need.
            combine: combine(parts, result) writes into `result` the result for a part of the arrays, given
                that part of the array of each of `givers`, in their order.
            givers: places of the learners whose arrays are combined.
            waiting: called while this learner waits at a barrier.
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
        """Combine this learner's share of a block, for all learners of the host."""
        count = step[1] - step[0]
        part = slice(count * self.place // self.size, count * (self.place + 1) // self.size)
        given = [self._given[turn, place].view(dtype)[part] for place in givers]
        combine(given, self._result[turn].view(dtype)[part])

    def broadcast(self, data: NDArray[np.uint8], root: int, waiting: Waiting) -> None:
        """Overwrite `data` with the bytes of the learner at place `root`."""
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
        """Fill `parts`, by place, with the bytes of all learners, whose lengths may differ."""
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
    """Return [0, count) cut into ranges (start, end) of at most `step` elements."""
    return [(start, min(start + step, count)) for start in range(0, count, step)]


class _Joined:
    """Contiguous arrays of one dtype, read and written as if they were one concatenated array.

    Args:
        arrays: the arrays; None for one that is skipped in reads and writes.
        sizes: number of elements of each array, skipped ones included.
    """

    def __init__(self, arrays: Sequence[_Array | None], sizes: Sequence[int]):
        self._flat = [None if array is None else array.reshape(-1) for array in arrays]
        self._ends = list(itertools.accumulate(sizes))

    def _pieces(self, start: int, end: int) -> list[tuple[slice, _Array]]:
        """Return, for each array that overlaps [start, end), its slice of the range and elements in it."""
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


class Hosts(NamedTuple):
    """How the learners of an operation are spread over hosts, of which at least one has two learners.

    Attributes:
        groups: ranks in the attempt of the learners of each host, in the same order on all learners.
        own: ranks of the learners of this host.
        memory: the memory that the learners of this host share.
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
    """The memory that learners of a host share; reused by the next operation if the learners are the same.

    Args:
        host: a key; learners with equal keys try to map the same memory, and use messages if that fails.
            None: the key of this learner's host.
    """

    def __init__(self, host: Any = None) -> None:
        self._host = _host() if host is None else host
        self._ranks: tuple[int, ...] | None = None
        self._hosts: Hosts | None = None

    def among(self, attempt: _Member) -> Hosts | None:
        """Return which learners of an attempt at an operation share a host; all of them call this together.

        The memory is made anew if the attempt has other learners than the last one.

        Returns:
            None, on all learners, if no two of them share a host, or one of them cannot map its memory.
        """
        if self._ranks != attempt.ranks:
            self._hosts = _met(attempt, self._host)
            self._ranks = attempt.ranks
        return self._hosts

    def forget(self) -> None:
        """Drop the shared memory after an uncompleted attempt at an operation; all learners do this."""
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
        # else a forked child of a learner would keep the memory mapped
        area.madvise(mmap.MADV_DONTFORK)
    memory = np.frombuffer(area, dtype=np.uint8, count=nbytes)
    return Hosts(groups, own, HostMemory(memory, own.index(attempt.rank), len(own)))


def _host() -> Any:
    """Return the key of this host for Sharing, or, if it is unknown, a key that no other learner has."""
    with contextlib.suppress(OSError):
        return host_name(), os.stat(SHARED_FOLDER).st_dev
    return alone()


def alone() -> Any:
    """Return a key for Sharing that no other learner has, so that this one shares no memory."""
    return host_name(), os.getpid(), "alone"
