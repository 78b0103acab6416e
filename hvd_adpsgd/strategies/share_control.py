"""The law of `exchange_share="auto"`: how much of the model the next exchanges move, and in how many bits.

Pure: it knows neither a clock nor an engine. A leader gives it totals of what its steps, its exchanges and
its link have spent, and gets a share, and with `wire_dtype="auto"` bits per element. The two sides of an
exchange may want different ones; it has the smaller share and the fewer bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hvd_adpsgd.config import FIRST_SHARE

__all__ = ["BYTES", "FLOOR", "LINK", "ShareControl", "Spent"]

FLOOR = 1 / 256  # smallest share; an exchange moves at least one chunk
LINK = 0.8  # most of the time in which exchanges may run
_INTEGRAL, _PROPORTIONAL = 0.5, 0.25  # in doublings of the share per halving of the pressure
_MOST = 2.0  # largest deviation that a decision takes into account, in doublings
_QUIET = 0.2  # largest deviation that a decision ignores
_ABOVE = 2.0  # doublings by which the share may exceed what exchanges move
_BLIND = 4.0  # most halvings that no exchange has confirmed yet
_MET = 0.5  # part of the due exchanges below which they wait for the link, not for one slow peer
_MEETINGS, _DUE = 2, 16  # exchanges, and due exchanges, after which a decision is made
_FAST, _SLOW = 1 / 8, 1 / 64  # weights of a new distance in its two averages
# bytes of an exchange in so many bits per element, of those in float32; from all bits (0) to the fewest
BYTES = {0: 1.0, 8: 0.27, 4: 0.15}
_BITS = list(BYTES)
_SPARE = 0.5  # part of the link's bound below which more bits have to stay


class Spent(NamedTuple):
    """Totals of a super learner since some moment; none decreases.

    Attributes:
        steps: steps.
        seconds: their time.
        overhead_s: the part of it that exchanges have cost.
        busy_s: the time in which exchanges were under way.
        link_s: the time that they would have taken if no peer were much slower than the others.
        exchanges: finished exchanges.
        models: what they have moved, in models.
        compared: those in which the two models were compared.
        square: the sum of their squared distances.
    """

    steps: int = 0
    seconds: float = 0.0
    overhead_s: float = 0.0
    busy_s: float = 0.0
    link_s: float = 0.0
    exchanges: int = 0
    models: float = 0.0
    compared: int = 0
    square: float = 0.0


class ShareControl:
    """Chooses share and bits so that neither the cost of averaging nor the use of the link exceeds its bound.

    With pressure = max(overhead / (b bound), demand / (b LINK)), e = -log2 of it, within [-2, 2],

        log2 share += e / 2 + (e - e before) / 4            (PI, in its velocity form: nothing winds up)

    within [FLOOR, 1]. Overhead: of the time of steps. Demand: the part of the time in which exchanges use the
    link; if less than half of the due ones have ended, the part in which any runs, times due exchanges /
    finished ones: above 1, as the link cannot carry what is due. The part b of the bounds is spent by need:
    3/4, up to all if the consensus distance rises, down to a half if it falls. An exchange keeps the share
    with which it began, so until one ends the share falls 16 times at most. It is at most 4 times what
    exchanges have moved: a peer that wants less decides for both.

    Few bits lose less than a small share (docs/log/0425). So where the link holds the share down, or does not
    carry the whole model, the next fewer bits are taken and the share stays: for the link's sake it falls at
    4 bits only. More bits are taken again if the link would stay below half of its bound with them and does
    not hold the share down: the share is 1, or the overhead is larger, as few bits cost more of the CPU.

    Args:
        bound: largest overhead, as a part of the time of steps.
        due: exchanges per step.
        share: the share to begin with.
        chooses_bits: whether it chooses bits, too; else all exchanges have all bits.

    Attributes:
        share: the share of the next exchanges.
        bits: their bits per element between hosts: 0 (all), 8 or 4.
        overhead, demand: as measured for the last decision; NaN before.
        budget: b of the last decision.
        decisions: number of decisions so far.
    """

    def __init__(
        self, bound: float, due: float, share: float = FIRST_SHARE, chooses_bits: bool = False
    ):
        self._bound, self._due, self._chooses_bits = bound, due, chooses_bits
        self.bits = 0
        self._level = math.log2(share)
        self.overhead = self.demand = math.nan
        self.budget = 0.75
        self.decisions = 0
        self._before: Spent | None = None
        self._error = 0.0
        self._blind = 0.0  # doublings since an exchange ended
        self._fast = self._slow = math.nan

    @property
    def share(self) -> float:
        return float(2.0**self._level)

    def restart(self) -> None:
        """Leave out of the next decision what was spent since the last one; the share stays."""
        self._before = None

    def decide(self, now: Spent) -> float:
        """Return the share of the next exchanges; it changes if enough has happened since the last change.

        Args:
            now: the totals so far. Smaller ones than before begin anew: the engine was replaced.
        """
        before = self._before
        if before is None or any(a < b for a, b in zip(now, before, strict=True)):
            self._before = now
            return self.share
        steps, seconds = now.steps - before.steps, now.seconds - before.seconds
        exchanges = now.exchanges - before.exchanges
        if seconds <= 0 or (exchanges < _MEETINGS and steps * self._due < _DUE):
            return self.share
        busy = (now.busy_s - before.busy_s) / seconds
        self._before = now
        if exchanges == 0 and busy < LINK / 2:
            return self.share  # no peer answers: neither side has spent anything
        self.overhead = (now.overhead_s - before.overhead_s) / seconds
        met = max(exchanges, 0.5) / (steps * self._due)
        link = (now.link_s - before.link_s) / seconds
        self.demand = busy / met if met < _MET else min(busy, link)
        self._look(now.square - before.square, now.compared - before.compared)
        cost, link = self.overhead / self._bound / self.budget, self.demand / LINK / self.budget
        if self._chooses_bits and (bits := self._next_bits(cost, link)) != self.bits:
            self.bits = bits
            self.decisions += 1
            return self.share
        self._move(max(cost, link), exchanges > 0)
        moved = now.models - before.models
        if exchanges > 0 and moved > 0:
            most = math.log2(moved / exchanges) + _ABOVE
            self._level = max(min(self._level, most), math.log2(FLOOR))
        return self.share

    def _look(self, square: float, compared: int) -> None:
        """Compare the distances of models with earlier ones, and set the part of the bounds that is spent."""
        if not (compared and 0 < square < math.inf):
            return
        level = math.log2(square / compared) / 2
        if math.isnan(self._fast):
            self._fast = self._slow = level
        self._fast += _FAST * (level - self._fast)
        self._slow += _SLOW * (level - self._slow)
        self.budget = 0.75 + min(max(self._fast - self._slow, -0.25), 0.25)

    def _next_bits(self, cost: float, link: float) -> int:
        """Return the bits of the next exchanges, at most one stage from those before."""
        i, is_whole = _BITS.index(self.bits), self._level >= 0
        most = 2.0 ** (_QUIET if is_whole else -_QUIET)
        if link > max(cost, most) and i + 1 < len(_BITS):
            return _BITS[i + 1]
        if (
            i
            and (is_whole or cost > link)
            and link * BYTES[_BITS[i - 1]] / BYTES[self.bits] < _SPARE
        ):
            return _BITS[i - 1]
        return self.bits

    def _move(self, pressure: float, is_seen: bool) -> None:
        error = min(max(-math.log2(max(pressure, 1e-9)), -_MOST), _MOST)
        if abs(error) <= _QUIET:
            error = 0.0
        change = _INTEGRAL * error + _PROPORTIONAL * (error - self._error)
        self._error = error
        self._blind = change if is_seen else self._blind + change
        if self._blind < -_BLIND:
            change, self._blind = change - self._blind - _BLIND, -_BLIND
        self._level = min(max(self._level + change, math.log2(FLOOR)), 0.0)
        self.decisions += 1
