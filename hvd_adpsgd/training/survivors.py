"""Which learners of a super learner are left, as these agree in the middle of a step (HVD_ADPSGD_SHRINK).

A learner may end in the middle of an all-reduce, which then ends well on some of its mates only. So a set of
gradients counts once *every* learner has reduced it, and each learner records that in shared memory:

    L, A, B: all-reduce of set s      B ends
    L: reduced = s + 1                A: its all-reduce fails
    L: waits for A and B              A: broken = s + 1
    L: B has ended without having     A: waits for L's decision
       reduced s; broken = s + 1
    L: all others are broken or have ended: lost = {B}, decided = s + 1
    L, A: drop set s, connect anew without B, continue with set s + 1

All find the same: a learner that has ended changes its row no more, and one whose all-reduce of s has failed
never records that it has reduced s. So a set that cannot be complete for one is never complete for another,
and a complete one stays complete. Nothing of a broken set has been applied anywhere, so no state is copied:
models, optimizers and the counts of publications are equal as after set s - 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.shared_memory import shared_counters
from hvd_adpsgd.errors import PeerFailedError
from hvd_adpsgd.inner.horovod import HorovodInternalError
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.mates import FOREVER

__all__ = ["BrokenSetError", "Survivors"]

_REDUCED, _BROKEN, _LEFT, _LOST, _DECIDED, _MET, _FLAG = range(7)  # columns of Survivors._rows
_COLUMNS = _FLAG + 2
_LEADER = 0
_LOOK_S = 0.05  # pause between two looks for mates that have ended
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-5, 1e-3  # between two polls of the rows


class BrokenSetError(Exception):
    """The gradients under way are not averaged, as a mate has ended: no learner steps with them.

    Never raised to the script.

    Attributes:
        loss: what the closure of the step has returned, for the script.
    """

    loss: Any = None


class Survivors:
    """Agreement of a super learner's learners on complete sets and lost mates; they make it together.

    Columns of a learner's row; the leader also writes `lost` of all rows:

        reduced     number of sets that the learner has reduced
        broken      1 + the last set that the learner has given up
        left        1 if the learner begins no further set
        lost        1 if the super learner trains on without this learner
        decided     1 + the last set for which `lost` is final
        met         number of barriers that the learner has entered
        flag        what `as_leader` returns; two columns, for even and odd numbers of barriers, as no learner
                    is more than one barrier ahead

    Args:
        world: returns the World of this learner.
    """

    def __init__(self, world: Callable[[], World]):
        self._world, self._me = world, world().inner_rank
        self._rows: NDArray[np.int64] = shared_counters(_COLUMNS, world().inner)
        self._mine = self._rows[self._me]
        self._look, self._ended = 0.0, set[int]()

    def leaves(self) -> None:
        """Record that this learner begins no further set: it has stopped its averaging."""
        self._mine[_LEFT] = 1

    def out(self) -> set[int]:
        """Return the inner ranks of mates that have ended or left; looks at most 20 times a second."""
        if time.monotonic() > self._look:
            self._look = time.monotonic() + _LOOK_S
            inner: Any = self._world().inner
            self._ended.update(inner.first[place] for place in inner.look_at_all())
        left = np.flatnonzero(self._rows[:, _LEFT]).tolist()
        return self._ended.union(left).difference(self._lost(), [self._me])

    def _lost(self) -> list[int]:
        return np.flatnonzero(self._rows[:, _LOST]).tolist()

    def has_lost(self, seconds: float) -> bool:
        """Whether only mates that can be missed have ended; waits up to `seconds` for the first one."""
        ends = time.monotonic() + seconds
        while not (out := self.out()) and time.monotonic() < ends:
            time.sleep(_LONGEST_PAUSE_S)
        return bool(out) and _LEADER not in out

    def confirm(self, number: int) -> None:
        """Record that this learner has reduced set `number`, and wait until all have.

        Raises:
            HorovodInternalError: on all learners, if one of them cannot reduce the set any more.
        """
        self._mine[_REDUCED] = number + 1
        pause = _SHORTEST_PAUSE_S
        while not (self._rows[:, _REDUCED] > number).all():
            # looks at other processes only if a mate is late
            if pause == _LONGEST_PAUSE_S and self._is_broken(number):
                raise HorovodInternalError("a learner of the super learner has ended")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def _is_broken(self, number: int) -> bool:
        # read before the rows: a learner that has ended no longer writes to its row
        out = sorted(self.out())
        short = self._rows[out, _REDUCED] <= number
        return bool(short.any() or (self._rows[:, _BROKEN] == number + 1).any())

    def agree(self, number: int) -> list[int]:
        """Give up set `number` on all remaining learners; return the inner ranks of those that are lost.

        Raises:
            HorovodInternalError: if the leader has ended, or counts this learner as lost.
        """
        before = self._lost()
        self._mine[_BROKEN] = number + 1
        if self._me == _LEADER:
            self._decide(number)
        while self._rows[_LEADER, _DECIDED] != number + 1:
            if _LEADER in self.out():
                raise HorovodInternalError("the leader of the super learner has ended")
            time.sleep(_LONGEST_PAUSE_S)
        lost = self._lost()
        if self._me in lost:
            raise HorovodInternalError("the leader counts this learner as one that has ended")
        for rank in lost:
            self._rows[rank, _REDUCED] = FOREVER
        return [rank for rank in lost if rank not in before]

    def _decide(self, number: int) -> None:
        """Wait until each mate has given up set `number` or has ended; record which have ended."""
        while True:
            out = self.out()
            given_up = self._rows[:, _BROKEN] == number + 1
            if (self._rows[:, _BROKEN] > number + 1).any():
                # a stopped mate counted as ended, and recorded this set when its row had been read
                raise HorovodInternalError(
                    "the learners of the super learner do not agree on a set"
                )
            if len(out.union(self._lost(), np.flatnonzero(given_up).tolist())) == len(self._rows):
                break
            time.sleep(_LONGEST_PAUSE_S)
        self._rows[sorted(out), _LOST] = 1
        self._mine[_DECIDED] = number + 1

    # ---- between two sets ---------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until each mate has entered this barrier or has ended; learners agree on nothing in it.

        Raises:
            PeerFailedError: if the leader has ended before it.
        """
        self._mine[_MET] += 1
        pause = _SHORTEST_PAUSE_S
        while behind := self._behind():
            if pause == _LONGEST_PAUSE_S:
                behind -= (out := self.out())
                if _LEADER in out:
                    raise PeerFailedError(
                        "the leader of the super learner has ended. Start the job again from a checkpoint."
                    )
                if not behind:
                    return
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def awaiting(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` (inner ranks) that wait in a barrier which this learner has not entered."""
        ahead = self._rows[:, _MET] > self._mine[_MET]
        return [rank for rank in ranks if ahead[rank] and rank not in self.out()]

    def _behind(self) -> set[int]:
        """Return the inner ranks of mates that have entered fewer barriers, without those that are lost."""
        found = np.flatnonzero(self._rows[:, _MET] < self._mine[_MET])
        return set(found.tolist()).difference(self._lost())

    def as_leader(self, flag: bool) -> bool:
        """Return the flag of the leader; all learners of the super learner call this together.

        Raises:
            PeerFailedError: if the leader has ended before.
        """
        place = _FLAG + (int(self._mine[_MET]) + 1) % 2
        if self._me == _LEADER:
            self._mine[place] = flag
        self.barrier()
        return bool(self._rows[_LEADER, place])
