"""Where a step is, and which rounds the others still wait for. Pure."""

from __future__ import annotations

import enum

__all__ = ["Steps"]


class _Place(enum.Enum):
    BETWEEN = enum.auto()  # the last step has ended
    AVERAGED = enum.auto()  # the node's gradients are averaged, and step() has not come
    INSIDE = enum.auto()  # step() runs


class Steps:
    """The steps of one super learner, of which its peers in step count every one.

    A round belongs to gradients that were averaged in the node, not to the optimizer's step: whoever skips
    step() after them (GradScaler does on overflow), or leaves it by an exception and goes on, owes the others
    the round. The next gradients, or whatever comes first for which all wait, show that it was skipped.

    Attributes:
        owed: rounds of steps that never came.
    """

    def __init__(self) -> None:
        self.owed = 0
        self._place = _Place.BETWEEN
        self._ahead = False  # the round of the step that comes is over

    def averaged(self) -> None:
        """The node's gradients are averaged. Inside step() that is a part of it."""
        if self._place is _Place.INSIDE:
            return
        self.owed += self._place is _Place.AVERAGED
        self._place, self._ahead = _Place.AVERAGED, False

    def all_wait(self) -> None:
        """What comes now waits for all: the round of averaged gradients cannot wait for step()."""
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
        """Whether the round of this step is still to come."""
        return not self._ahead

    def leave(self) -> None:
        """step() is left; by an exception, if it has not ended. What comes next is another step."""
        if self._place is _Place.INSIDE:
            self.owed += self.due
            self.end()

    def end(self) -> None:
        """step() has ended."""
        self._place, self._ahead = _Place.BETWEEN, False
