"""The law of `exchange_share="auto"`: how much of the model the next exchanges move, and in how many bits.

Pure: it knows neither a clock nor an engine. A leader gives it totals of what its steps, its exchanges and
its link have spent, and gets a share, and with `wire_dtype="auto"` bits per element. The two sides of an
exchange may want different ones; it has the smaller share and the fewer bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hvd_adpsgd.config import FIRST_SHARE
from hvd_adpsgd.formats import CHOSEN, OWN, Format

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
_SPARE = 0.7  # part of the link's bound below which more bits have to stay
_HOLD = 32  # decisions from a trial of fewer bits that gained nothing to the next


def _nbytes(wire_format: Format) -> float:
    """Return the bytes of an element in few bits: with a step per block, and one offer of 16 in 16 bits."""
    return round(15 / 16 * wire_format.bits / 8 + 2 / 16 + 2 / 256, 2)


class Spent(NamedTuple):
    """Totals of a super learner since some moment; none decreases.

    Attributes:
        steps: steps.
        seconds: their time.
        overhead_s: the part of it that exchanges have cost.
        busy_s: the time in which exchanges were under way.
        link_s: the time that those over the link would take if no peer were much slower than others.
        exchanges: finished exchanges.
        models: what they have moved, in models.
        compared: those in which the two models were compared.
        square: the sum of their squared distances.
        shared: the part of `models` that went through memory of the host, which is no use of the link.
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
    shared: float = 0.0


class _Trial(NamedTuple):
    """Fewer bits on trial.

    Attributes:
        before: the format before.
        pressure: what a model moved has cost with them.
        has_ended: whether an exchange has ended since, which may have had the bits before.
    """

    before: Format
    pressure: float
    has_ended: bool = False


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

    Few bits lose less than a small share (docs/log/0336). So where in two decisions in a row the link holds
    the share down, or does not carry the whole model, the next fewer bits are tried, and the share stays.
    The bits before come back for 32 decisions, if the pressure per model moved has not fallen by half of
    what the bytes promise: few bits cost more of the CPU, and a round trip per chunk, and on one host they
    change nothing. More bits are taken if the link would stay below 0.7 of its bound with them and does not
    hold the share down: the share is 1, a peer wants less, or the overhead is larger.

    Args:
        bound: largest overhead, as a part of the time of steps.
        due: exchanges per step.
        share: the share to begin with.
        chooses_bits: whether it chooses bits, too; else all exchanges have all bits.

    Attributes:
        share: the share of the next exchanges.
        wire_format: their format between hosts.
        element_nbytes: bytes of an element in all bits, mean of the model.
        overhead, demand: as measured for the last decision; NaN before.
        budget: b of the last decision.
        decisions: number of decisions so far.
    """

    def __init__(
        self, bound: float, due: float, share: float = FIRST_SHARE, chooses_bits: bool = False
    ):
        self._bound, self._due, self._chooses_bits = bound, due, chooses_bits
        self.wire_format = OWN
        self.element_nbytes = 4.0
        self._trial: _Trial | None = None
        self._part = 1.0  # of the models, those over the link; while a trial lasts, as it began
        self._hold = 0
        self._wants = False  # fewer bits, in the last decision
        self._is_capped = False  # a peer wants a smaller share
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
        moved = now.models - before.models
        each = self._each(cost, link, moved, now, before) * seconds
        stays = self._chooses_bits and self._choose_bits(cost, link, each, exchanges > 0)
        if stays and cost <= 2**_QUIET:
            self.decisions += 1
            return self.share
        self._move(cost if stays else max(cost, link), exchanges > 0)
        if exchanges > 0 and moved > 0:
            most = math.log2(moved / exchanges) + _ABOVE
            self._is_capped = self._level > most
            self._level = max(min(self._level, most), math.log2(FLOOR))
        return self.share

    def _each(self, cost: float, link: float, moved: float, now: Spent, before: Spent) -> float:
        """Return the pressure per model moved; NaN if no chunk was merged, or none over the link.

        That of the link is per model over the link: of a few exchanges any part may be on the host.
        """
        linked = moved - (now.shared - before.shared)
        if moved <= 0 or linked < moved / 1000:  # the two counters are not read at the same moment
            return math.nan
        if self._trial is None:
            self._part = 1 - now.shared / now.models
        return max(cost / moved, link * self._part / linked)

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

    def _choose_bits(self, cost: float, link: float, each: float, is_seen: bool) -> bool:
        """Choose the bits of the next exchanges; return whether the link's pressure has been answered so.

        Args:
            cost: the pressure of the overhead.
            link: that of the link.
            each: the larger one, times seconds per model moved, see `_each`.
            is_seen: whether an exchange has ended since the last decision.
        """
        if self._trial is not None:
            return is_seen and self._judge_trial(self._trial, each)
        self._hold = max(0, self._hold - 1)
        i, is_whole = CHOSEN.index(self.wire_format), self._level >= 0
        most = 2.0 ** (_QUIET if is_whole else -_QUIET)
        wanted, self._wants = self._wants, link > max(cost, most)
        is_known = not math.isnan(each)  # a trial is judged by it
        if wanted and self._wants and i + 1 < len(CHOSEN) and not self._hold and is_known:
            self._trial, self.wire_format = _Trial(self.wire_format, each), CHOSEN[i + 1]
            return True
        is_free = is_whole or self._is_capped or cost > link
        if i and is_free and link / self._ratio(self.wire_format, CHOSEN[i - 1]) < _SPARE:
            self.wire_format = CHOSEN[i - 1]
            return True
        return False

    def _judge_trial(self, trial: _Trial, each: float) -> bool:
        """Give up bits on trial if they have not gained half of what they promise."""
        if not trial.has_ended or math.isnan(each):
            self._trial = trial._replace(has_ended=True)
            return True
        self._trial = None
        if each > trial.pressure * (1 + self._ratio(self.wire_format, trial.before)) / 2:
            self.wire_format, self._hold = trial.before, _HOLD
        return True

    def _ratio(self, few: Format, many: Format) -> float:
        """Return the bytes of an exchange in `few` bits, divided by those in `many`."""
        return _nbytes(few) / (self.element_nbytes if many is OWN else _nbytes(many))

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
