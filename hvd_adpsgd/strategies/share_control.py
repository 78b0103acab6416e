"""The law of `exchange_share="auto"`: how much of the model the next exchanges move.

Pure: it knows neither a clock nor an engine. A leader gives it totals of what its steps, its exchanges and
its link have spent, and gets a share. The two sides of an exchange may want different shares; it moves the
smaller one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hvd_adpsgd.config import FIRST_SHARE

__all__ = ["FLOOR", "LINK", "ShareControl", "Spent"]

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
    """Chooses the share so that neither the cost of averaging nor the use of the link exceeds its bound.

    With pressure = max(overhead / (b bound), demand / (b LINK)), e = -log2 of it, within [-2, 2],

        log2 share += e / 2 + (e - e before) / 4            (PI, in its velocity form: nothing winds up)

    within [FLOOR, 1]. Overhead: of the time of steps. Demand: the part of the time in which exchanges use the
    link; if less than half of the due ones have ended, the part in which any runs, times due exchanges /
    finished ones: above 1, as the link cannot carry what is due. The part b of the bounds is spent by need:
    3/4, up to all if the consensus distance rises, down to a half if it falls. An exchange keeps the share
    with which it began, so until one ends the share falls 16 times at most. It is at most 4 times what
    exchanges have moved: a peer that wants less decides for both.

    Args:
        bound: largest overhead, as a part of the time of steps.
        due: exchanges per step.
        share: the share to begin with.

    Attributes:
        share: the share of the next exchanges.
        overhead, demand: as measured for the last decision; NaN before.
        budget: b of the last decision.
        decisions: number of decisions so far.
    """

    def __init__(self, bound: float, due: float, share: float = FIRST_SHARE):
        self._bound, self._due = bound, due
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
        self._move(self._pressure(), exchanges > 0)
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

    def _pressure(self) -> float:
        return max(self.overhead / self._bound, self.demand / LINK) / self.budget

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
