"""The phase of a step, and the rounds that peers still wait for. Pure."""

from __future__ import annotations

import enum

__all__ = ["Steps"]


class _Place(enum.Enum):
    BETWEEN = enum.auto()  # the last step has ended
    AVERAGED = enum.auto()  # the super learner's gradients are averaged, step() has not begun
    INSIDE = enum.auto()  # step() runs


class Steps:
    """The steps of one super learner. With strategies in step its peers expect a round for each.

    A round belongs to the gradients averaged in the super learner, not to step(). If step() is skipped after
    them (GradScaler does on overflow) or raises, peers still wait for the round, and it is owed. The next
    gradients, or the next operation over all learners, show that the step was skipped.

    Attributes:
        owed: rounds of skipped steps.
    """

    def __init__(self) -> None:
        self.owed = 0
        self._place = _Place.BETWEEN
        self._ahead = False  # the round of the next step is over

    def averaged(self) -> None:
        """The super learner's gradients are averaged. Inside step() (a closure) this changes nothing."""
        if self._place is _Place.INSIDE:
            return
        self.owed += self._place is _Place.AVERAGED
        self._place, self._ahead = _Place.AVERAGED, False

    def all_wait(self) -> None:
        """An operation over all learners comes next: run the round of averaged gradients before it."""
        if self._place is _Place.AVERAGED:
            self.owed += 1
            self._place, self._ahead = _Place.BETWEEN, True

    def begin(self) -> None:
        """step() begins."""
        self._place = _Place.INSIDE

    @property
    def inside(self) -> bool:
        """Whether step() runs."""
        return self._place is _Place.INSIDE

    @property
    def due(self) -> bool:
        """Whether the round of this step has not run."""
        return not self._ahead

    def leave(self) -> None:
        """step() returns or raises; if it raises, its round is owed."""
        if self._place is _Place.INSIDE:
            self.owed += self.due
            self.end()

    def end(self) -> None:
        """step() has ended."""
        self._place, self._ahead = _Place.BETWEEN, False
