"""What exchanges have corrected: how often, and which part of the model per step."""

from __future__ import annotations

from typing import NamedTuple

_STEPS = 20  # over which a pace is averaged


class Arrivals(NamedTuple):
    """Exchanges whose corrections are in the parameters; where chunks are rare (windows.pyx), of these.

    Attributes:
        exchanges: how many each corrected chunk has had; see Store.arrivals.
        pace: share of the chunks that is corrected per step, as of late.
    """

    exchanges: float
    pace: float

    def plus(self, later: Arrivals) -> Arrivals:
        """Return these and later ones."""
        return Arrivals(self.exchanges + later.exchanges, later.pace or self.pace)


NONE = Arrivals(0.0, 0.0)


class Pace:
    """The share of the chunks that is corrected per step: its mean over the last steps."""

    def __init__(self) -> None:
        self._count, self._mean = 0, 0.0
        self._step: int | None = None

    def after(self, covered: float, step: int | None = None) -> float:
        """Return the mean, with corrections of the share `covered` of all chunks.

        Args:
            covered: the share.
            step: number of the step; corrections with the number of the last ones are of the same step.
        """
        if step is None or step != self._step:
            self._count = min(self._count + 1, _STEPS)
            self._mean *= 1 - 1 / self._count
        self._step = step
        self._mean += covered / self._count
        return self._mean
