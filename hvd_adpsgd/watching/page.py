"""The page of a run: one self-contained HTML text with SVG charts, without scripts, that fetches nothing."""

from __future__ import annotations

import html
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from hvd_adpsgd.watching import svg
from hvd_adpsgd.watching.record import Event, Run, Track
from hvd_adpsgd.watching.reports import PARTS, Report
from hvd_adpsgd.watching.svg import Mark, Series
from hvd_adpsgd.watching.table import Row, rows

__all__ = ["live", "page", "style"]

log = logging.getLogger("hvd_adpsgd")

_BAD = ("failed", "suspect", "alert")
_SHOWN_EVENTS = 200
_SHOWN_SCALARS = 12
_GAP_S = (
    10.0  # a line is interrupted between two reports that are farther apart than this, at least
)
_told: set[str] = set()  # titles of sections whose drawing has failed, so that each is logged once

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #d8dee4; --soft: #57606a;
        --bad: #cf222e; --warn: #bc4c00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --faint: #30363d; --soft: #9198a1;
          --bad: #ff7b72; --warn: #ffa657; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1360px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0 0 .3rem; }
.grid2 { display: grid; gap: 1.2rem;
         grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
section { border: 1px solid var(--faint); border-radius: 8px; padding: .8rem; min-width: 0;
          margin-top: 1.2rem; }
.grid2 section { margin-top: 0; }
.grid2 { margin-top: 1.2rem; }
.wide { overflow-x: auto; }
p { margin: .2rem 0; color: var(--soft); }
h1, h2, p { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--faint); fill: none; } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.mark { stroke-dasharray: 3 3; stroke-width: 1.5; } .bad { stroke: var(--bad); } .good { stroke: #8c959f; }
.bar, .cell { fill: #2f81f7; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .15rem .6rem; white-space: nowrap;
         border-bottom: 1px solid var(--faint); }
th:nth-child(2), td:nth-child(2), th:nth-child(3), td:nth-child(3) { text-align: left; }
ul { list-style: none; margin: 0; padding: 0; max-height: 20rem; overflow-y: auto; }
li { padding: .1rem 0; overflow-wrap: anywhere; } time { color: var(--soft); margin-right: .6rem; }
.key { display: inline-flex; align-items: center; gap: .35rem; margin-right: .9rem; font-size: .85rem; }
.swatch { width: .8rem; height: .8rem; border-radius: 2px; display: inline-block; }
@media (max-width: 600px) { svg text { font-size: 19px; } }
.warn { color: var(--warn); } .fail { color: var(--bad); }
"""
_PALETTE = ("#2f81f7", "#d4731c", "#2da44e", "#bf3989", "#8250df", "#1b9e9e", "#9a6700", "#768390")


def page(run: Run) -> str:
    """Return the page of a run as HTML."""
    last_s = max((t.reports[-1].time_s for t in run.tracks.values() if t.reports), default=0.0)
    sections = "".join(_charts(run))
    head = _drawn("A run", lambda: _head(run, last_s))
    events = _drawn("Events", lambda: _section("Events", _events(run.events[-_SHOWN_EVENTS:])))
    title = html.escape(_headline(run))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style()}</style></head><body><header>{head}</header>"
        f'{_states(run, last_s)}<div class="grid2">{sections}</div>{events}</body></html>\n'
    )


def live(run: Run, now_s: float) -> dict[str, str]:
    """Return the parts of the live dashboard's page as HTML, by name (head, table, chart0, ..., events).

    Args:
        run: the reports and events of the run so far.
        now_s: the current time (time.time).
    """
    parts = {
        "head": _drawn("A run", lambda: _head(run, now_s)),
        "table": _states(run, now_s),
    }
    parts |= {f"chart{k}": chart for k, chart in enumerate(_charts(run))}
    events = _drawn(
        "Events", lambda: _section("Events", _events(run.events[-_SHOWN_EVENTS:][::-1]))
    )
    return parts | {"events": events}


def style() -> str:
    """Return the CSS of the page."""
    return _STYLE + "".join(
        f".line.c{i}{{stroke:{c}}}.part.c{i},.swatch.c{i}{{fill:{c};background:{c}}}"
        for i, c in enumerate(_PALETTE)
    )


def _headline(run: Run) -> str:
    return f"Run of {run.about.get('script') or 'a script'}"


def _drawn(title: str, draw: Callable[[], str]) -> str:
    """Return the section that draw() makes; if draw() raises, a section with the error instead."""
    try:
        return draw()
    except Exception as error:
        if title not in _told:
            log.error("a section of the page cannot be drawn (%s): %s", title, error, exc_info=True)
        _told.add(title)
        body = f'<p class="fail">This section cannot be drawn: {type(error).__name__}.</p>'
        return _section(title, body)


def _head(run: Run, last_s: float) -> str:
    return f"<h1>{html.escape(_headline(run))}</h1><p>{_about(run, last_s)}</p>"


def _states(run: Run, now_s: float) -> str:
    title = "Super learners"
    return _drawn(title, lambda: _section(title, _table(rows(run, now_s)), "wide"))


def _about(run: Run, last_s: float) -> str:
    began = _began(run)
    steps = max((t.reports[-1].step for t in run.tracks.values() if t.reports), default=0)
    text = (
        f"{len(run.tracks)} super learners, averaging {run.about.get('averaging', '?')}; {_clock(began)} to "
        f"{_clock(last_s)}, {(last_s - began) / 60:.1f} min, {steps} steps"
    )
    return html.escape(text)


def _began(run: Run) -> float:
    return min((t.reports[0].time_s for t in run.tracks.values() if t.reports), default=0.0)


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _section(title: str, body: str, kind: str = "", note: str = "") -> str:
    """Return a titled section of the page; "" if the body is empty."""
    if not body:
        return ""
    note = f"<p>{note}</p>" if note else ""
    return f'<section class="{kind}"><h2>{html.escape(title)}</h2>{note}{body}</section>'


def _table(found: Sequence[Row]) -> str:
    head = (
        "#",
        "host",
        "state",
        "step",
        "steps/s",
        "staleness p50/p95",
        "distance",
        "exchanges/s",
        "share",
        "MB/s",
        "loss",
    )
    out = "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"
    kinds = {"ok": "", "left": "", "SLOW": "warn", "SUSPECT": "warn", "JOINING": "warn"}
    for row in found:
        cells = (
            str(row.super_learner),
            row.host,
            row.state,
            str(row.step),
            svg.number(row.steps_per_s),
            f"{row.staleness_p50}/{row.staleness_p95}",
            svg.number(row.distance),
            svg.number(row.exchanges_per_s),
            row.moved(svg.number),
            svg.number(row.sent_per_s / 1e6),
            svg.number(row.loss),
        )
        kind = kinds.get(row.state, "fail")
        out += (
            f'<tr class="{kind}">' + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>"
        )
    return out + "</table>"


def _events(events: Sequence[Event]) -> str:
    shown = [
        f'<li class="{"fail" if event.what in _BAD else ""}"><time>{_clock(event.time_s)}</time>'
        f"{html.escape(event.what)}: {html.escape(event.text)}</li>"
        for event in events
    ]
    return f"<ul>{''.join(shown)}</ul>" if shown else ""


# ---- charts -------------------------------------------------------------------------------------


def _charts(run: Run) -> list[str]:
    """Return the sections of all charts that have data."""
    plots = _Plots(run)
    names = _scalar_names(run)
    out = [section for name in names for section in plots.both(name, _scalar(name))]
    out += plots.both("consensus distance", lambda report: report.distance, log=True)
    out += [
        plots.over_time("steps per second", lambda report: report.steps_per_s),
        plots.over_time("exchanges per second", lambda report: report.exchanges_per_s),
        plots.over_time("share of the model per exchange", lambda report: report.share),
    ]
    for title, draw in (
        ("Who exchanges with whom", lambda: _heat_map(run)),
        ("Staleness of corrections", lambda: _staleness(run)),
    ):
        out.append(_chart(title, draw, _told_by(run)))
    out.append(_chart("Where the time goes, last 10 s", lambda: _shares(run)))
    return [section for section in out if section]


def _chart(title: str, draw: Callable[[], str], note: str = "") -> str:
    """Return a section with the chart that draw() makes; "" if draw() returns no picture."""

    def section() -> str:
        body = draw()
        return _section(title, body, note=note) if "<svg" in body else ""

    return _drawn(title, section)


class _Plots:
    """Makes sections with line charts; a chart shows one number, with a line per super learner.

    Args:
        run: the record of the run.
    """

    def __init__(self, run: Run):
        self._run, self._began, self._key = run, _began(run), _key(run)
        lasted = max((t.reports[-1].time_s for t in run.tracks.values() if t.reports), default=0.0)
        self._unit, self._unit_s = _unit(lasted - self._began)
        self._marks = [
            Mark(self._time(e.time_s), f"{e.what}: {e.text}", e.what in _BAD) for e in run.events
        ]

    def _time(self, time_s: float) -> float:
        return (time_s - self._began) / self._unit_s

    def both(
        self, title: str, value: Callable[[Report], float], log: bool = False
    ) -> tuple[str, str]:
        """Return two sections with line charts: a number over steps, and over time."""

        def draw() -> str:
            series = _series(self._run, lambda report: float(report.step), value)
            return svg.lines(title, series, "step", log=log) + self._key

        return (
            _chart(f"{title}, over steps", draw),
            self.over_time(f"{title}, over time", value, log),
        )

    def over_time(self, title: str, value: Callable[[Report], float], log: bool = False) -> str:
        """Return a section with a line chart of a number over time, in which the run's events are marked."""

        def draw() -> str:
            series = _series(self._run, lambda report: self._time(report.time_s), value)
            label = f"time ({self._unit})"
            return svg.lines(title, series, label, log=log, marks=self._marks) + self._key

        return _chart(title, draw)


def _unit(seconds: float) -> tuple[str, int]:
    """Return a suitable unit for a duration in seconds, and the unit's length in seconds."""
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 300 * size:
            return unit, size
    return "days", 86400


def _series(run: Run, x: Callable[[Report], float], y: Callable[[Report], float]) -> list[Series]:
    return [
        Series(
            f"super learner {i}",
            [[(x(report), y(report)) for report in part] for part in _parts(track)],
        )
        for i, track in sorted(run.tracks.items())
    ]


def _parts(track: Track) -> list[list[Report]]:
    """Split a super learner's reports at gaps in time (a failure), and where steps go back (a new run)."""
    longest_s = max(_GAP_S, 5 * track.every_s)
    parts: list[list[Report]] = []
    for report in track.reports:
        before = parts[-1][-1] if parts else None
        follows = before and report.step >= before.step
        if before and follows and report.time_s - before.time_s <= longest_s:
            parts[-1].append(report)
        else:
            parts.append([report])
    return parts


def _scalar(name: str) -> Callable[[Report], float]:
    return lambda report: report.scalars.get(name, float("nan"))


def _scalar_names(run: Run) -> list[str]:
    """Return the names of the scalars that the script logs, losses first."""
    names = {name for t in run.tracks.values() for r in t.reports[-1:] for name in r.scalars}
    return sorted(names, key=lambda name: ("loss" not in name.lower(), name))[:_SHOWN_SCALARS]


def _key(run: Run) -> str:
    """Return the colour legend of super learners; "" if there are too many: tooltips of lines name them."""
    if len(run.tracks) > svg.COLOURS:
        return ""
    return "".join(
        f'<span class="key"><span class="swatch c{k}"></span>{i}</span>'
        for k, i in enumerate(sorted(run.tracks))
    )


def _heat_map(run: Run) -> str:
    who = sorted(run.tracks)
    counts = [[run.tracks[i].peers.get(j, 0) for j in who] for i in who]
    return svg.heat_map(
        "exchanges by pair", [str(i) for i in who], counts, "row: by its count; column: with whom"
    )


def _told_by(run: Run) -> str:
    """Return a note that names the super learners whose exchanges by peer are known; "" if all are known."""
    known = [str(i) for i, track in sorted(run.tracks.items()) if track.peers]
    if len(known) == len(run.tracks):
        return ""
    return f"Of super learner {', '.join(known)} only: the others have no file in the record here."


def _staleness(run: Run) -> str:
    total: Counter[int] = Counter()
    for track in run.tracks.values():
        total.update(track.staleness)
    return svg.bars("staleness", total, "steps between snapshot and correction (63: or more)")


def _shares(run: Run) -> str:
    """Draw each super learner's shares of time: parts of the step, operations over all learners, the rest."""
    found = []
    for i, track in sorted(run.tracks.items()):
        if track.reports:
            parts = [getattr(track.reports[-1], part) for part in PARTS]
            found.append((str(i), [*parts, max(0.0, 1.0 - sum(parts))]))
    names = [part.replace("_", " ") for part in PARTS] + ["forward, backward, rest"]
    key = "".join(
        f'<span class="key"><span class="swatch c{k}"></span>{name}</span>'
        for k, name in enumerate(names)
    )
    return svg.shares("parts of a step", found, names) + key
