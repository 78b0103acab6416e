"""Phases of a training step, and the number of rounds that peers still wait for; pure computation."""

import enum


class _Place(enum.Enum):
    BETWEEN = enum.auto()  # between steps: the last step has ended
    AVERAGED = enum.auto()  # the super learner's gradients are averaged, step() has not begun
    INSIDE = enum.auto()  # step() is running


class Steps:
    """The steps of one super learner, and the rounds of averaging for which its peers still wait.

    With a strategy in step, peers expect one round per set of averaged gradients, whether or not step() runs.
    If step() is skipped after the gradients are averaged (GradScaler does on overflow) or raises, peers still
    wait for the round, so this super learner owes it. The next gradients, or the next operation over all
    learners, show that step() was skipped.

    Attributes:
        owed: number of rounds that were not run because their step() was skipped or raised.
    """

    def __init__(self) -> None:
        self.owed = 0
        self._place = _Place.BETWEEN
        self._ahead = False  # whether the round of the next step was already run, before step()

    def averaged(self) -> None:
        """Record that the super learner's gradients are averaged; no effect inside step() (for a closure)."""
        if self._place is _Place.INSIDE:
            return
        self.owed += self._place is _Place.AVERAGED
        self._place, self._ahead = _Place.AVERAGED, False

    def all_wait(self) -> None:
        """Count the round of averaged gradients as owed to peers, before an operation over all learners."""
        if self._place is _Place.AVERAGED:
            self.owed += 1
            self._place, self._ahead = _Place.BETWEEN, True

    def begin(self) -> None:
        """Record that step() begins."""
        self._place = _Place.INSIDE

    @property
    def inside(self) -> bool:
        """Whether step() is running."""
        return self._place is _Place.INSIDE

    @property
    def due(self) -> bool:
        """Whether the round of the present step has not been run yet."""
        return not self._ahead

    def leave(self) -> None:
        """Record that step() returns or raises; if it raised before its round, peers are owed that round."""
        if self._place is _Place.INSIDE:
            self.owed += self.due
            self.end()

    def end(self) -> None:
        """Record that step() and its round have ended."""
        self._place, self._ahead = _Place.BETWEEN, False
