"""Progress of a super learner's learners in gradients and operations: counters in shared memory.

A set of gradients is what one all-reduce of all parameters averages; sets are numbered from 0, the same on
all learners of the super learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.shared_memory import shared_table
from hvd_adpsgd.messaging.host_barrier import fence
from hvd_adpsgd.polling import polls

COLUMNS = (
    *((name, "i8") for name in ("complete", "joined", "asked", "closed", "quorum")),
    ("model", "f8"),
    *((name, "i8", 2) for name in ("refused", "stepped", "bits")),
)
_CLOSES, _ENDS = 1, 2


class Mates:
    """Counters of one super learner: a row per learner, in shared memory. All its learners make it together.

    Columns of a learner's row:

        complete    number of sets of which the learner has submitted every gradient
        joined      0, or 1 + the first set to which the learner contributes zeros as it has called join()
        asked       number of sets << 32, plus the number of operations other than gradient averaging that the
                    learner has begun since the last set; so counts that differ after an error agree again
                    from the next set on
        closed      _CLOSES if the learner submits no more gradients, _ENDS if it has also entered shutdown()
        quorum      0, or 1 + the first set that no learner steps with, as this learner has lost the quorum
        model       sum of the learner's parameters before its first step; 0 before
        refused     1 + the last set that the learner averages but does not step with; two numbers, for even
                    and for odd sets: a learner may refuse the next set before its mates have read the column,
                    but not the one after that
        stepped     1 + the last set with which the learner has made a step; two numbers as well
        bits        checksum of the gradients with which it replaced averaged ones in that step

    Args:
        inner: communicator of the super learner (mpi4py).
        rank: rank of this learner in `inner`.

    Attributes:
        sets: number of sets of gradients that are averaged; also the number of the set under way.
        is_away: whether this learner has called join() and waits for other learners to call join().
    """

    def __init__(self, inner: Any, rank: int):
        self._rows = shared_table(COLUMNS, inner)
        self._row = self._rows[rank]
        self.sets = 0
        self.is_away = False
        self._asked = 0

    def averaged(self) -> None:
        """Count one more averaged set of gradients."""
        self.sets += 1
        self._asked = 0
        self._row["asked"] = self.sets << 32

    def submitted(self) -> None:
        """Record that each gradient of this learner's present set is submitted, or will be without a wait."""
        self._row["complete"] = self.sets + 1

    def starts_from(self, total: float) -> None:
        """Record the sum of the parameters, before the first step."""
        self._row["model"] = total

    def other_models(self, difference: float) -> list[int]:
        """Return the inner ranks of learners whose first step is from a sum that differs by more."""
        models, mine = self._rows["model"], self._row["model"]
        are_known = (models != 0) & (mine != 0)
        return np.flatnonzero(are_known & (np.abs(models - mine) > difference)).tolist()

    def late(self) -> list[int]:
        """Return the inner ranks that have not submitted every gradient of this learner's present set."""
        return np.flatnonzero(self._are_late()).tolist()

    def are_uneven(self) -> bool:
        """Whether some learner has submitted more or fewer sets of gradients than were averaged here."""
        return bool((self._rows["complete"] != self.sets).any())

    def _are_late(self) -> NDArray[np.bool_]:
        late: NDArray[np.bool_] = self._rows["complete"] <= self.sets
        return late & (self._rows["joined"] == 0)

    def closes(self, ends: bool = False) -> None:
        """Record that this learner submits no more gradients; `ends`: as it has entered shutdown()."""
        fence()  # a mate that sees this also sees the last set as submitted
        self._row["closed"] = _ENDS if ends else self._row["closed"] or _CLOSES

    def have_ended(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that `have_closed`, and have entered shutdown()."""
        return [rank for rank in self.have_closed(ranks) if self._rows["closed"][rank] == _ENDS]

    def submitted_by(self, rank: int) -> int:
        """Return how many sets of gradients learner `rank` (inner rank) has submitted."""
        return int(self._rows["complete"][rank])

    def have_closed(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` (inner ranks) that are late with the present set, and have closed.

        Lateness is read last: one that submits this set may close as soon as it is averaged.
        """
        closed = [rank for rank in ranks if self._rows["closed"][rank]]
        fence()
        return [rank for rank in closed if self._are_late()[rank]]

    def refuses(self) -> None:
        """Record, before submitting the last gradient, that no learner may step with the present set."""
        self._row["refused"][self.sets % 2] = self.sets + 1

    def refusing(self) -> list[int]:
        """Return the inner ranks of learners that refuse to step with the set of gradients averaged last."""
        refused = self._rows["refused"][:, (self.sets - 1) % 2]
        ranks: list[int] = np.flatnonzero(refused == self.sets).tolist()
        return ranks

    def steps_with(self, bits: int) -> None:
        """Record, at a step, a checksum of the gradients that the script has set in place of averaged ones.

        All compare these after the next all-reduce, which no learner enters before its step: so no learner
        waits to compare, and all get the same result.
        """
        self._row["bits"][self.sets % 2] = bits
        self._row["stepped"][self.sets % 2] = self.sets + 1

    def differ(self) -> bool:
        """Whether learners made the step before the last set with different checksums; see `steps_with`."""
        last = self.sets - 1
        stepped = self._rows["stepped"][:, last % 2] == self.sets
        return len(set(self._rows["bits"][stepped, last % 2])) > 1

    def loses_quorum(self) -> None:
        """Record, before submitting a gradient of the present set, that no learner may step with that set."""
        self._row["quorum"] = self._row["quorum"] or self.sets + 1

    def regains_quorum(self) -> None:
        """Record, between two sets of gradients, that this learner knows of a quorum again."""
        self._row["quorum"] = 0

    @property
    def lack_quorum(self) -> bool:
        """Whether no learner may step with the set of gradients averaged last, as the quorum is lost.

        The same on all learners, whenever they read it: it depends on the number of the set alone.
        """
        lost = self._rows["quorum"]
        return bool(((lost > 0) & (lost <= self.sets)).any())

    def asks(self) -> None:
        """Record that this learner begins an operation over all learners, or over the super learner."""
        self._asked += 1
        fence()  # a mate that sees this also sees the sets before as submitted
        self._row["asked"] = (self.sets << 32) + self._asked

    def ahead(self) -> list[int]:
        """Return the inner ranks that have begun an operation which this learner has not begun."""
        return np.flatnonzero(self._elsewhere(())).tolist()

    def joins(self) -> None:
        """Record that this learner makes no more steps until all learners have called join()."""
        self.is_away = True
        self._row["joined"] = self.sets + 1

    def returns(self, sets: int) -> None:
        """Reset the counters after all learners have called join(): the next set is number `sets`."""
        self.sets, self._asked, self.is_away = sets, 0, False
        self._row["complete"], self._row["joined"], self._row["asked"] = sets, 0, sets << 32

    def has_joined(self, rank: int) -> bool:
        """Whether learner `rank`, in join(), contributed zeros to the set of gradients averaged last.

        The same on all learners that contribute gradients, whenever they read it: it depends on the number of
        the set alone.
        """
        joined = self._rows["joined"][rank]
        return bool(0 < joined <= self.sets)

    def someone_has_joined(self) -> bool:
        """Whether any learner, in join(), contributed zeros to the set of gradients averaged last."""
        return any(map(self.has_joined, range(len(self._rows))))

    def all_submit(self, others: Iterable[Mates], are_averaged: Callable[[], bool]) -> bool:
        """Wait until all learners of the super learner have submitted the set that this one has submitted.

        Args:
            others: the `Mates` of the other optimizers of this learner.
            are_averaged: tells whether Horovod has finished with this set, with or without an error.

        Returns:
            False if the wait would never end: a learner that lacks gradients of this set waits in an
            operation that this learner has not begun, or for gradients of another optimizer, or has closed
            its optimizer.
        """
        others = list(others)
        for _ in polls():
            # read `elsewhere` before `late`: in the other order, a learner that submits and averages this set
            # between the two reads would count both as late and as ahead
            elsewhere = self._elsewhere(others)
            fence()
            late = self._are_late()
            if not late.any() or are_averaged():
                return True
            if (elsewhere & late).any() or self.have_closed(np.flatnonzero(late).tolist()):
                return False
        raise AssertionError("polls() has no end")

    def _elsewhere(self, others: Iterable[Mates]) -> NDArray[np.bool_]:
        """Return, by inner rank, whether a learner is ahead of this one in operations or other optimizers."""
        ahead: NDArray[np.bool_] = self._rows["asked"] > self._row["asked"]
        for other in others:
            ahead |= other._rows["complete"] > other._row["complete"]
        return ahead
