"""Where the other learners of a super learner are: shared counters, read between its all-reduces.

A set of gradients is what one all-reduce of all parameters averages; sets are numbered from 0, alike on all
learners of the super learner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.shared_memory import shared_counters

__all__ = ["Mates"]

_COMPLETE, _JOINED, _ASKED, _CLOSED, _QUORUM, _REFUSED = range(6)  # columns
_COLUMNS = _REFUSED + 2
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 1e-3  # between two looks; Horovod's own cycle is 1 ms


class Mates:
    """Counters of the learners of one super learner. All of them make it together.

        complete    sets of which the learner has submitted every gradient
        joined      0, or 1 + the first set to which it contributes zeros because it has called join()
        asked       operations other than gradient averaging that it has begun since the last set, behind the
                    number of that set: a count that differed before (after an error) is alike again
        closed      whether it submits nothing more
        quorum      0, or 1 + the first set that no learner steps with, because this one knows of no quorum
        refused     1 + the last set that it averages but does not step with, of the even and of the odd sets:
            a learner may refuse the next set before its mates have looked, but not the one after that

    Args:
        inner: communicator of the super learner (mpi4py).
        rank: of this learner in it.

    Attributes:
        sets: sets of gradients that are averaged.
    """

    def __init__(self, inner: Any, rank: int):
        self._rows: NDArray[np.int64] = shared_counters(_COLUMNS, inner)
        self._mine = self._rows[rank]
        self.sets = 0
        self._asked = 0

    def averaged(self) -> None:
        """One more set of gradients is averaged."""
        self.sets += 1
        self._asked = 0
        self._mine[_ASKED] = self.sets << 32

    def submitted(self) -> None:
        """Every gradient of the set under way is submitted, or is submitted next without a wait."""
        self._mine[_COMPLETE] = self.sets + 1

    def late(self) -> list[int]:
        """Learners that have not submitted every gradient of the set that this one has submitted."""
        return np.flatnonzero(self._are_late()).tolist()

    def _are_late(self) -> NDArray[np.bool_]:
        late: NDArray[np.bool_] = self._rows[:, _COMPLETE] <= self.sets
        return late & (self._rows[:, _JOINED] == 0)

    def closes(self) -> None:
        """Note that this learner submits no more gradients."""
        self._mine[_CLOSED] = 1

    def have_closed(self, ranks: Iterable[int]) -> list[int]:
        """Those of these learners that submit no more gradients."""
        return [rank for rank in ranks if self._rows[rank, _CLOSED]]

    def refuses(self) -> None:
        """Note, before the last gradient is submitted, that no learner may step with the set under way."""
        self._mine[_REFUSED + self.sets % 2] = self.sets + 1

    def refusing(self) -> list[int]:
        """The learners for which no learner may step with the set that was averaged last."""
        refused = self._rows[:, _REFUSED + (self.sets - 1) % 2].tolist()
        return [rank for rank, sets in enumerate(refused) if sets == self.sets]

    def loses_quorum(self) -> None:
        """Note, before a gradient of the set under way is submitted, that no learner steps with that set."""
        self._mine[_QUORUM] = self._mine[_QUORUM] or self.sets + 1

    def regains_quorum(self) -> None:
        """Note, between two sets, that this learner knows of a quorum again."""
        self._mine[_QUORUM] = 0

    @property
    def lack_quorum(self) -> bool:
        """Whether no learner may step with the set that was averaged last.

        Alike on all learners: the number of the set decides, not the moment at which one looks.
        """
        lost = self._rows[:, _QUORUM]
        return bool(((lost > 0) & (lost <= self.sets)).any())

    def asks(self) -> None:
        """Note that this learner begins an operation of all learners, or of the super learner."""
        self._asked += 1
        self._mine[_ASKED] = (self.sets << 32) + self._asked

    def joins(self) -> None:
        """Note that this learner makes no more steps until all learners have called join()."""
        self._mine[_JOINED] = self.sets + 1

    @property
    def is_away(self) -> bool:
        """Whether this learner has called join(), and not all learners have."""
        return bool(self._mine[_JOINED])

    def returns(self, sets: int) -> None:
        """All learners have called join(): the next set of this one has number `sets`."""
        self.sets, self._asked = sets, 0
        self._mine[[_COMPLETE, _JOINED, _ASKED]] = sets, 0, sets << 32

    def has_joined(self, rank: int) -> bool:
        """Whether a learner contributes zeros to the set that was averaged last.

        Alike on all learners that contribute: the number of the set decides, not the moment of the call.
        """
        joined = self._rows[rank, _JOINED]
        return bool(0 < joined <= self.sets)

    def someone_has_joined(self) -> bool:
        """Whether any learner contributes zeros to the set that was averaged last."""
        return any(map(self.has_joined, range(len(self._rows))))

    def all_submit(self, others: Iterable[Mates], are_averaged: Callable[[], bool]) -> bool:
        """Wait until every learner has submitted the set that this one has submitted.

        Args:
            others: of further optimizers.
            are_averaged: whether Horovod has finished with this set, also in failure.

        Returns:
            False if a learner that lacks gradients of this set waits in an operation that this learner has
            not begun, or for the gradients of another optimizer, or has closed its optimizer: to wait for it
            would never end.
        """
        others = list(others)
        pause = _SHORTEST_PAUSE_S
        while True:
            # `elsewhere` first: a learner that is ahead because it has averaged this set is not late then
            elsewhere = self._elsewhere(others)
            late = self._are_late()
            if not late.any() or are_averaged():
                return True
            if (elsewhere & late).any() or self._rows[late, _CLOSED].any():
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def _elsewhere(self, others: Iterable[Mates]) -> NDArray[np.bool_]:
        """Which learners are ahead of this one in operations, or in the gradients of another optimizer."""
        ahead: NDArray[np.bool_] = self._rows[:, _ASKED] > self._mine[_ASKED]
        for other in others:
            ahead |= other._rows[:, _COMPLETE] > other._mine[_COMPLETE]
        return ahead
