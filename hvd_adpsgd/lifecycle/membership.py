"""Which super learners are alive, suspect, left or failed: the one record of this process.

    engine's thread  -->  Engine.report  -->  Membership.update  -->  line in the log

Collectives, shutdown, replacement and the public queries read it; the first three also update it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.peers import PeerState

__all__ = ["Membership"]

log = logging.getLogger("hvd_adpsgd")

_REPEATED_S = 5.0  # a super learner that fails so soon may not have logged a peer's failure
_NEWS = {
    PeerState.SUSPECT: "is silent{where}. Averaging skips it until it answers; raise "
    "HVD_ADPSGD_DEADLINE_S if it is only slow.",
    PeerState.ALIVE: "answers again{where}. Averaging continues with it.",
    PeerState.LEFT: "has left{where}. Averaging continues among its peers.",
    PeerState.FAILED: "has failed{where}. Training continues without it.",
}


class Membership:
    """The states of all super learners, as known to this learner.

    A failed super learner stays failed until it is replaced. One that has left is alive again for an engine
    made later. The first surviving super learner logs failures as warnings, its peers as information.

    Args:
        groups: ranks of the learners of each super learner, by super_rank.
        names: what to call each super learner in messages.
        own: this learner's super_rank.
        left: a byte per super learner, shared by the learners of this one: it has left, as the leader knows.

    Attributes:
        is_minority: whether half or more of the super learners that have not left have failed.
        states: of the super learners, by super_rank.
        sources: each returns changes for `update`, whenever it is asked.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        names: Sequence[str],
        own: int,
        left: NDArray[np.uint8] | None = None,
    ):
        self.states = [PeerState.ALIVE] * len(groups)
        self.own = own
        self._groups, self.names = groups, list(names)
        self.sources: list[Callable[[], Iterable[tuple[int, PeerState]]]] = []
        self._left = np.zeros(len(groups), dtype=np.uint8) if left is None else left
        self.is_minority = False
        self._departed: set[int] = set()  # have left in order, with all their engines
        self._told: set[tuple[int, PeerState]] = set()
        self._informed: dict[
            int, tuple[float, str]
        ] = {}  # failures for a lower super_rank to warn of

    def update(self, news: Iterable[tuple[int, PeerState]], step: int | None = None) -> None:
        """Record changes that an engine reports; all of them before the first line is logged.

        Args:
            news: (super_rank, state).
            step: of the trainer, for the lines.
        """
        final = PeerState.FAILED
        news = [(i, PeerState.LEFT if i in self._departed else state) for i, state in news]
        news = [(i, state) for i, state in news if self.states[i] is not final or state is final]
        for i, state in news:
            self.states[i] = state
            self._left[i] = state is PeerState.LEFT
        where = "" if step is None else f" at step {step}"
        for i, state in news:
            if (i, state) not in self._told:
                self._told.add((i, state))
                line = f"super learner {i} ({self.names[i]}) {_NEWS[state].format(where=where)}"
                self._tell(i, state, line)
        if any(state is PeerState.FAILED for _, state in news):
            self._repeat()
            self.is_minority = 2 * self._staying(failed=False) <= self._staying(failed=True)

    def _staying(self, failed: bool) -> int:
        """Super learners that have not left, with or without those that have failed."""
        gone = {PeerState.LEFT} if failed else {PeerState.LEFT, PeerState.FAILED}
        return sum(state not in gone for state in self.states)

    @property
    def is_alone(self) -> bool:
        """Whether no other super learner trains: all others have left or failed."""
        return self._staying(failed=False) <= 1

    def are_minority(self, ranks: Collection[int]) -> bool:
        """Whether the super learners of these ranks are half or fewer of those that have not left."""
        known = zip(self._groups, self._left, strict=False)
        staying = [group for group, left in known if not left]
        whole = sum(set(ranks).issuperset(group) for group in staying)
        return 2 * whole <= len(staying)

    def look(self) -> None:
        """Ask all sources, between two steps."""
        for source in list(self.sources):
            self.update(source())

    def _tell(self, i: int, state: PeerState, line: str) -> None:
        warns = state is PeerState.FAILED and self._warns
        log.log(logging.WARNING if warns else logging.INFO, "%s", line)
        if state is PeerState.FAILED and not warns:
            self._informed[i] = time.monotonic(), line

    def _repeat(self) -> None:
        """Log recent failures as warnings: the super learner that should have may have failed first."""
        if self._warns:
            for when, line in self._informed.values():
                if time.monotonic() - when < _REPEATED_S:
                    log.warning("%s", line)
            self._informed.clear()

    @property
    def _warns(self) -> bool:
        gone = (PeerState.LEFT, PeerState.FAILED)
        return all(state in gone for state in self.states[: self.own])

    def fail(self, ranks: Collection[int]) -> None:
        """Mark the super learners of these learners as failed; the caller logs it."""
        for i, group in enumerate(self._groups):
            if not set(ranks).isdisjoint(group):
                self.states[i] = PeerState.FAILED

    def note_left(self, ranks: Collection[int]) -> None:
        """Learners have left in order: mark super learners of which all have, unless failed."""
        for i, group in enumerate(self._groups):
            if set(ranks).issuperset(group) and self.states[i] is not PeerState.FAILED:
                self.states[i] = PeerState.LEFT
                self._left[i] = True
                self._departed.add(i)

    def mates_ended(self, ranks: Collection[int]) -> None:
        """Processes have exited: mark this super learner if one was its own; engines report on peers."""
        self.fail(set(ranks).intersection(self._groups[self.own]))

    def grow(self, groups: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """There are more super learners: of all of them, as in the arguments of the class."""
        self._groups = groups
        self.names.extend(names[len(self.names) :])  # others show them
        self.states += [PeerState.ALIVE] * (len(groups) - len(self.states))

    def meet(self, members: Collection[int]) -> None:
        """After a merge: these super learners are alive, all others have failed."""
        for i in range(len(self.states)):
            self.states[i] = PeerState.ALIVE if i in members else PeerState.FAILED
            self._left[i] = False
        self._departed.clear()
        self.is_minority = False
        self._told.clear()

    def rejoin(self) -> None:
        """An engine was stopped while training continues: a super learner that left it may be alive."""
        for i, state in enumerate(self.states):
            if state is PeerState.LEFT and i not in self._departed:
                self.states[i] = PeerState.ALIVE
                self._left[i] = False

    @property
    def own_failed(self) -> bool:
        """Whether this super learner has failed."""
        return self.states[self.own] is PeerState.FAILED

    def have_left(self, ranks: Collection[int]) -> bool:
        """Whether all super learners of these learners have left."""
        groups = enumerate(self._groups)
        return all(self._left[i] for i, group in groups if not set(ranks).isdisjoint(group))

    def failed_ranks(self, ended: Collection[int] = ()) -> tuple[int, ...]:
        """Ranks of the learners of failed super learners, ascending.

        Args:
            ended: ranks of learners whose process has exited; not a failure if they had left.
        """
        states = zip(self._groups, self.states, self._left, strict=False)
        return tuple(
            sorted(
                rank
                for group, state, left in states
                if state is PeerState.FAILED or (not left and not set(ended).isdisjoint(group))
                for rank in group
            )
        )
