"""Membership: this process's record of which super learners are alive, suspect, left or failed.

    engine's thread  -->  Engine.report  -->  Membership.update  -->  line in the log

Collectives, shutdown, replacement and the public queries read the Membership; the first three also update it.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.peers import PeerState

log = logging.getLogger("hvd_adpsgd")

_REPEATED_S = 5.0  # a super learner that fails this soon may not have logged a peer's failure
_THERE, _LEFT, _FAILED = range(3)  # bytes that the learners of a super learner share
# by state: what has happened to a super learner, and what follows while this one trains
_NEWS = {
    PeerState.SUSPECT: (
        "is silent",
        "Averaging skips it until it answers; raise HVD_ADPSGD_DEADLINE_S if it is only slow.",
    ),
    PeerState.ALIVE: ("answers again", "Averaging continues with it."),
    PeerState.LEFT: ("has left", "Averaging continues among its peers."),
    PeerState.FAILED: ("has failed", "Training continues without it."),
}
_ALONE = {
    PeerState.LEFT: "No other super learner trains.",
    PeerState.FAILED: "Training continues without it, and no other super learner trains.",
}


class Membership:
    """The states of all super learners, as known to this learner.

    A failed super learner stays failed until it is replaced. If training continues after an engine was
    stopped, a super learner that left that engine counts as alive again (`rejoin`). The first surviving super
    learner logs failures as warnings, its peers log them as information.

    Args:
        groups: ranks of the learners of each super learner, by super_rank.
        names: names of the super learners for messages, by super_rank.
        own: this learner's super_rank.
        left: a byte per super learner, in memory that this super learner's learners share: _LEFT if it has
            left, _FAILED if one of them has found it failed, which stays.

    Attributes:
        is_leader: whether this learner leads its super learner, and so may log failures as warnings.
        founders: number of super learners at the start.
        is_minority: whether half or more of the super learners that have not left have failed.
        states: states of the super learners, by super_rank.
        sources: functions that return state changes, which `poll_sources` passes to `update`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        names: Sequence[str],
        own: int,
        left: NDArray[np.uint8] | None = None,
    ):
        self.states = [PeerState.ALIVE] * len(groups)
        self.own, self.founders = own, len(groups)
        self._groups, self.names = groups, list(names)
        self.sources: list[Callable[[], Iterable[tuple[int, PeerState]]]] = []
        self._left = np.zeros(len(groups), dtype=np.uint8) if left is None else left
        self.is_minority = False
        self.is_leader = True
        self._departed: set[int] = set()  # super learners that have left the job, not one engine
        self._logged: set[tuple[int, PeerState]] = set()
        # by super_rank: failures logged as information, as a lower super_rank logs the warning
        self._logged_as_information: dict[int, tuple[float, str]] = {}

    def update(
        self, news: Iterable[tuple[int, PeerState]], step: int | None = None, ends: bool = False
    ) -> None:
        """Record the state changes of super learners that an engine reports, then log a line for each change.

        Args:
            news: pairs (super_rank, new state).
            step: this super learner's present step, for the log; None: not known.
            ends: whether this super learner stops to average, so that nothing continues here.
        """
        final = PeerState.FAILED
        news = [(i, PeerState.LEFT if i in self._departed else state) for i, state in news]
        news = [(i, state) for i, state in news if self.states[i] is not final or state is final]
        for i, state in news:
            self.states[i] = state
            self._publish(i, state)
        where = "" if step is None else f" at step {step} of super learner {self.own}"
        for i, state in news:
            if (i, state) not in self._logged:
                self._logged.add((i, state))
                what, then = _NEWS[state]
                if self.is_alone:
                    then = _ALONE.get(state, then)
                then = "" if ends else f" {then}"
                self._log(i, state, f"super learner {i} ({self.names[i]}) {what}{where}.{then}")
        if any(state is PeerState.FAILED for _, state in news):
            self._repeat()
            self.is_minority = 2 * self._staying(failed=False) <= self._staying(failed=True)

    def _publish(self, i: int, state: PeerState) -> None:
        """Show the local peers the state of super learner `i`; a failure stays."""
        if self._left[i] != _FAILED:
            kinds = {PeerState.LEFT: _LEFT, PeerState.FAILED: _FAILED}
            self._left[i] = kinds.get(state, _THERE)

    def _staying(self, failed: bool) -> int:
        """Return how many super learners have not left; `failed`: whether to count failed super learners."""
        return self.training_count + failed * self.states.count(PeerState.FAILED)

    @property
    def training_count(self) -> int:
        """The number of super learners that train: all that have neither left nor failed."""
        states = self.states
        return len(states) - states.count(PeerState.LEFT) - states.count(PeerState.FAILED)

    @property
    def is_alone(self) -> bool:
        """Whether no other super learner trains: all others have left or failed."""
        return self.training_count <= 1

    def are_minority(self, ranks: Collection[int]) -> bool:
        """Whether at most half of the super learners that have not left have all learners in `ranks`."""
        known = zip(self._groups, self._left, strict=False)
        staying = [group for group, left in known if left != _LEFT]
        whole = sum(set(ranks).issuperset(group) for group in staying)
        return 2 * whole <= len(staying)

    def poll_sources(self) -> None:
        """Call all `sources`, and record the state changes that they return; called between two steps."""
        for source in list(self.sources):
            self.update(source())

    def _log(self, i: int, state: PeerState, line: str) -> None:
        warns = state is PeerState.FAILED and self._warns
        log.log(logging.WARNING if warns else logging.INFO, "%s", line)
        if state is PeerState.FAILED and not warns:
            self._logged_as_information[i] = time.monotonic(), line

    def _repeat(self) -> None:
        """Log recent failures as warnings: the super learner that had to do so may have failed first."""
        if self._warns:
            for when, line in self._logged_as_information.values():
                if time.monotonic() - when < _REPEATED_S:
                    log.warning("%s", line)
            self._logged_as_information.clear()

    @property
    def _warns(self) -> bool:
        gone = (PeerState.LEFT, PeerState.FAILED)
        return self.is_leader and all(state in gone for state in self.states[: self.own])

    def fail(self, ranks: Collection[int]) -> None:
        """Mark the super learners with a learner in `ranks` as failed; the caller logs the failure."""
        for i, group in enumerate(self._groups):
            if not set(ranks).isdisjoint(group):
                self.states[i] = PeerState.FAILED

    def note_left(self, ranks: Collection[int]) -> None:
        """Mark super learners as left whose learners are all in `ranks`, except failed super learners.

        Args:
            ranks: ranks of the learners that have left in order.
        """
        for i, group in enumerate(self._groups):
            if set(ranks).issuperset(group) and self.states[i] is not PeerState.FAILED:
                self.states[i] = PeerState.LEFT
                self._publish(i, PeerState.LEFT)
                self._departed.add(i)

    def note_failing(self, ranks: Collection[int]) -> None:
        """Mark as failed the super learners of `ranks`, which say that they fail, unless an engine will."""
        for i, group in enumerate(self._groups):
            is_due = self.states[i] is PeerState.LEFT or not self.sources
            if is_due and not set(ranks).isdisjoint(group):
                self.update([(i, PeerState.FAILED)])

    def note_local_exits(self, ranks: Collection[int]) -> None:
        """Mark this super learner as failed if a learner of it has exited; engines report other failures.

        Args:
            ranks: ranks of learners whose process has exited.
        """
        self.fail(set(ranks).intersection(self._groups[self.own]))

    def grow(self, groups: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """Add new super learners, as alive; `groups` and `names` describe all super learners, old and new."""
        self._groups = groups
        self.names.extend(names[len(self.names) :])  # in place: other objects refer to this list
        self.states += [PeerState.ALIVE] * (len(groups) - len(self.states))

    def use(self, members: Collection[int]) -> None:
        """After a super learner has joined: mark those in `members` as alive, and all others as failed."""
        for i in range(len(self.states)):
            self.states[i] = PeerState.ALIVE if i in members else PeerState.FAILED
            self._left[i] = _THERE
        self._departed.clear()
        self.is_minority = False
        self._logged.clear()

    def rejoin(self) -> None:
        """After an engine has stopped: mark super learners as alive that have left only that engine.

        A super learner that stops an engine leaves that engine, and may still be training.
        """
        for i, state in enumerate(self.states):
            if state is PeerState.LEFT and i not in self._departed:
                self.states[i] = PeerState.ALIVE
                self._publish(i, PeerState.ALIVE)

    @property
    def own_failed(self) -> bool:
        """Whether this super learner has failed."""
        return self.states[self.own] is PeerState.FAILED

    def have_left(self, ranks: Collection[int]) -> bool:
        """Whether all super learners with a learner in `ranks` have left."""
        groups = enumerate(self._groups)
        return all(self._left[i] == _LEFT for i, its in groups if not set(ranks).isdisjoint(its))

    def failed_ranks(self, ended: Collection[int] = ()) -> tuple[int, ...]:
        """Return the ranks of the learners of failed super learners, in ascending order.

        Super learners of learners in `ended`, whose process has exited, count unless they have left.
        """
        failed: set[int] = set()
        for group, state, left in zip(self._groups, self.states, self._left, strict=False):
            if state is PeerState.FAILED or (left != _LEFT and not set(ended).isdisjoint(group)):
                failed.update(group)
        return tuple(sorted(failed))
