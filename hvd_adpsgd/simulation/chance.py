"""Random numbers that are the same on every machine and with every version of a library: splitmix64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Chance"]

T = TypeVar("T")
_BITS = 2**64 - 1


class Chance:
    """A stream of numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _BITS

    def draw(self) -> int:
        """64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _BITS
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
        return z ^ (z >> 31)

    def between(self, low: float, high: float) -> float:
        """Uniform, with four digits: a scenario can be read, and typed."""
        return low + (high - low) * ((self.draw() >> 11) % 10_000) / 10_000

    def magnitude(self, low: float, high: float) -> float:
        """10**x with x uniform, to three digits, so that no library's rounding of powers shows."""
        return float(f"{10 ** self.between(low, high):.3g}")

    def integer(self, low: int, high: int) -> int:
        """Uniform among low, ..., high."""
        return low + self.draw() % (high - low + 1)

    def choose(self, values: Sequence[T]) -> T:
        """One of them."""
        return values[self.integer(0, len(values) - 1)]

    def happens(self, probability: float) -> bool:
        """True with that probability."""
        return self.draw() < probability * 2.0**64
