"""Random numbers (splitmix64) that are equal on all machines and with all versions of other libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_BITS = 2**64 - 1


class Chance:
    """A reproducible stream of random numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _BITS

    def draw(self) -> int:
        """Return the next 64 random bits as an integer."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _BITS
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
        return z ^ (z >> 31)

    def between(self, low: float, high: float) -> float:
        """Return a uniform number between `low` and `high`, rounded to four digits to be readable."""
        return low + (high - low) * ((self.draw() >> 11) % 10_000) / 10_000

    def magnitude(self, low: float, high: float) -> float:
        """Return 10**x with x uniform between low and high, rounded to three digits.

        The rounding hides differences between libraries in the last bits of powers.
        """
        return float(f"{10 ** self.between(low, high):.3g}")

    def exponential(self, mean: float) -> float:
        """Return an exponentially distributed number: one of 2**53, so that two are seldom equal."""
        return -mean * math.log1p(-(self.draw() >> 11) / 2.0**53)

    def integer(self, low: int, high: int) -> int:
        """Return a uniform integer from low to high, both included."""
        return low + self.draw() % (high - low + 1)

    def choose(self, values: Sequence[T]) -> T:
        """Return one of `values`, uniformly at random."""
        return values[self.integer(0, len(values) - 1)]

    def happens(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.draw() < probability * 2.0**64
