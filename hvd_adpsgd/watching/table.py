"""A table of a run, from its record: one row per super learner, with its current state."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_adpsgd.watching.health import hung_after_s, slow
from hvd_adpsgd.watching.record import Run, Track, plain
from hvd_adpsgd.watching.reports import METRICS, Metric, Report, can_draw, main_scalar, short

_BARS = "▁▂▃▄▅▆▇█"
# a super learner is SILENT after this time without a report, or five intervals if longer
_SILENT_S = 10.0
# each state of a super learner, with its style for rich
STATES = {
    "ok": "", "left": "", "SLOW": "yellow", "HUNG": "bold red", "SUSPECT": "yellow", "SILENT": "red",
    "JOINING": "cyan", "FAILED": "bold red",
}  # fmt: skip
_BY_EVENT = {"suspect": "SUSPECT", "left": "left", "failed": "FAILED"}
_BEGINNINGS = ("alive", "joining", "joined", "start")


@dataclass(frozen=True)
class Row:
    """State of one super learner, as a row of the table.

    Attributes:
        super_learner: its super_rank.
        host: names of its host and its leader.
        state: one of STATES.
        since_s: seconds that it has been in this state; 0 for ok, SLOW and JOINING.
        report: its newest report.
        apart_s: seconds since the super learner's last exchange, the age of the report included.
        loss, losses: the last value of the loss, and the last 200 reported values, oldest first.
        age_s: age of the super learner's newest report, in seconds.
    """

    super_learner: int
    host: str
    state: str
    since_s: float
    report: Report
    apart_s: float
    loss: float
    losses: tuple[float, ...]
    age_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a dict for JSON, without `losses`; numbers that are not finite as by `plain`."""
        own = {k: value for k, value in vars(self).items() if k not in ("report", "losses")}
        row: dict[str, Any] = plain({**self.report.to_dict(), **own})
        return row


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, the text of a row in it, and whether that is left-aligned."""

    title: str
    cell: Callable[[Row], str]
    is_left: bool = False


def _column(metric: Metric) -> Column:
    """Return the column of a metric, which shows Metric.cell."""
    text = metric.cell or (lambda report: _number(getattr(report, metric.name)))
    return Column(metric.column or "", lambda row: text(row.report))


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else short(value)


def _since(row: Row) -> str:
    """Return the state, and how long it has lasted."""
    if not row.since_s:
        return row.state
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if row.since_s >= 2 * size:
            return f"{row.state} {row.since_s / size:.0f} {unit}"
    return f"{row.state} {row.since_s:.0f} s"


COLUMNS = (
    Column("#", lambda row: str(row.super_learner)),
    Column("host", lambda row: row.host, is_left=True),
    Column("state", _since, is_left=True),
    *(_column(metric) for metric in METRICS if metric.column),
    Column("loss", lambda row: short(row.loss)),
    Column("", lambda row: sparkline(row.losses), is_left=True),
)


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
    main = main_scalar(last)
    name = main[0] if main else ""
    losses = tuple(r.scalars[name] for r in track.reports[-200:] if name in r.scalars)
    return Row(
        super_learner=i,
        host=track.name,
        state=state,
        since_s=since_s,
        report=last,
        apart_s=last.apart_s + max(0.0, now_s - last.time_s),
        loss=main[1] if main else math.nan,
        losses=losses,
        age_s=now_s - last.time_s,
    )


def _state(run: Run, i: int, track: Track, health: str, now_s: float) -> tuple[str, float]:
    """Return state and since_s of super learner i, by the last event about it, else by its reports."""
    last = track.reports[-1]
    news = [e for e in run.events if e.about == i and e.what in (*_BY_EVENT, *_BEGINNINGS)]
    if news and news[-1].what in _BY_EVENT and news[-1].time_s >= last.time_s - 2 * track.every_s:
        return _BY_EVENT[news[-1].what], now_s - news[-1].time_s
    if now_s - last.time_s >= _silent_s(track):
        return "SILENT", now_s - last.time_s
    if news and news[-1].what == "joining":
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
