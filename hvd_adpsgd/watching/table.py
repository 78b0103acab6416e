"""A table of a run, from its record: one row per super learner, with its current state."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_adpsgd.watching.health import hung_after_s, slow
from hvd_adpsgd.watching.record import Run, Track, plain
from hvd_adpsgd.watching.reports import main_scalar
from hvd_adpsgd.watching.svg import can_draw

__all__ = ["Row", "rows", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_SILENT_S = (
    10.0  # a super learner is SILENT after this time without a report, or five intervals if longer
)
_STATES = {"suspect": "SUSPECT", "left": "left", "failed": "FAILED"}
_BEGINNINGS = ("alive", "joining", "joined", "start")


@dataclass(frozen=True)
class Row:
    """State of one super learner, as a row of the table.

    Attributes:
        super_learner: its super_rank.
        host: names of its host and its leader.
        state: ok, SLOW, HUNG, SUSPECT, SILENT, JOINING, FAILED, left.
        since_s: seconds that it has been in this state; 0 for ok, SLOW and JOINING.
        step, steps_per_s, staleness_p50, staleness_p95, distance, exchanges_per_s, share, bits,
            sent_per_s: see Report.
        apart_s: seconds since the super learner's last exchange, the age of the report included.
        loss, losses: the last value of the loss, and the last 200 reported values, oldest first.
        age_s: age of the super learner's newest report, in seconds.
    """

    super_learner: int
    host: str
    state: str
    since_s: float
    step: int
    steps_per_s: float
    staleness_p50: int
    staleness_p95: int
    distance: float
    exchanges_per_s: float
    share: float
    bits: int
    sent_per_s: float
    apart_s: float
    loss: float
    losses: tuple[float, ...]
    age_s: float

    def moved(self, form: Callable[[float], str]) -> str:
        """Return the share, and the bits if they are fewer than the model has, as text: 0.25, or 0.25/8b."""
        return form(self.share) + (f"/{self.bits}b" if self.bits else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a dict for JSON, without `losses`; numbers that are not finite as by `plain`."""
        found = asdict(self)
        del found["losses"]
        row: dict[str, Any] = plain(found)
        return row


def rows(run: Run, now_s: float) -> list[Row]:
    """Return a row for each super learner that has reported, in order of super_rank.

    Args:
        run: the record of the run.
        now_s: the current time (time.time).
    """
    fresh = {
        i: track.reports[-1]
        for i, track in run.tracks.items()
        if track.reports and now_s - track.reports[-1].time_s < _silent_s(track)
    }
    ill = {**dict.fromkeys(slow(fresh), "SLOW"), **dict.fromkeys(hung_after_s(fresh), "HUNG")}
    return [
        _row(run, i, track, ill.get(i, "ok"), now_s)
        for i, track in sorted(run.tracks.items())
        if track.reports
    ]


def _row(run: Run, i: int, track: Track, health: str, now_s: float) -> Row:
    last = track.reports[-1]
    state, since_s = _state(run, i, track, health, now_s)
    found = main_scalar(last)
    name = found[0] if found else ""
    losses = tuple(r.scalars[name] for r in track.reports[-200:] if name in r.scalars)
    return Row(
        super_learner=i,
        host=track.name,
        state=state,
        since_s=since_s,
        step=last.step,
        steps_per_s=last.steps_per_s,
        staleness_p50=last.staleness_p50,
        staleness_p95=last.staleness_p95,
        distance=last.distance,
        exchanges_per_s=last.exchanges_per_s,
        share=last.share,
        bits=last.bits,
        sent_per_s=last.sent_per_s,
        apart_s=last.apart_s + max(0.0, now_s - last.time_s),
        loss=found[1] if found else math.nan,
        losses=losses,
        age_s=now_s - last.time_s,
    )


def _state(run: Run, i: int, track: Track, health: str, now_s: float) -> tuple[str, float]:
    """Return state and since_s of super learner i, by the last event about it, else by its reports."""
    last = track.reports[-1]
    told = [e for e in run.events if e.about == i and e.what in (*_STATES, *_BEGINNINGS)]
    if told and told[-1].what in _STATES and told[-1].time_s >= last.time_s - 2 * track.every_s:
        return _STATES[told[-1].what], now_s - told[-1].time_s
    if now_s - last.time_s >= _silent_s(track):
        return "SILENT", now_s - last.time_s
    if told and told[-1].what == "joining":
        return "JOINING", 0.0
    return health, last.idle_s + now_s - last.time_s if health == "HUNG" else 0.0


def _silent_s(track: Track) -> float:
    return max(_SILENT_S, 5 * track.every_s)


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Draw the values as at most `width` bar characters, each for the mean of a group of values."""
    finite = [value for value in values if can_draw(value)]
    if not finite:
        return ""
    n = min(width, len(finite))
    parts = [finite[k * len(finite) // n : (k + 1) * len(finite) // n] for k in range(n)]
    means = [statistics.fmean(part) for part in parts]
    low, high = min(means), max(means)
    span = high - low if high > low else math.inf
    return "".join(_BARS[round((len(_BARS) - 1) * ((mean - low) / span))] for mean in means)
