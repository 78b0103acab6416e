"""What exchanges have corrected: how often, and which part of the model per step."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NONE", "Arrivals", "Pace"]

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
        return Arrivals(self.exchanges + later.exchanges, later.pace)


NONE = Arrivals(0.0, 0.0)


class Pace:
    """The share of the chunks that is corrected per step: its mean over the last steps."""

    def __init__(self) -> None:
        self._count, self._mean = 0, 0.0

    def after(self, covered: float) -> float:
        """Return the mean, with a step that has corrected the share `covered`."""
        self._count = min(self._count + 1, _STEPS)
        self._mean += (covered - self._mean) / self._count
        return self._mean
