"""The page of a run, for `report` and `top --web`: charts of its record, drawn by plotly."""

from __future__ import annotations

import html
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_adpsgd.engine.metrics import PEER_TABLES, TABLES, Table
from hvd_adpsgd.errors import MissingRequirementError
from hvd_adpsgd.watching.record import Run, Track
from hvd_adpsgd.watching.reports import METRICS, PARTS, Report, can_draw
from hvd_adpsgd.watching.table import COLUMNS, rows

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SHOWN_EVENTS, _MARKED_EVENTS = 200, 50
_SHOWN_SCALARS = 12
_POINTS = 20_000  # most points of a chart, over all its lines
# a line is interrupted between reports that are farther apart, or than five intervals
_GAP_S = 10.0
_CHART_PX, _ROW_PX = 320, 26
_STYLES = {"failed": "red", "suspect": "orange", "alert": "red"}  # of events that are marked


class _Chart(NamedTuple):
    title: str
    traces: list[dict[str, Any]]
    x: str
    axis: str = "linear"


def page(run: Run, now_s: float, plotly_js: bool | str = True) -> str:
    """Return the page of a run at `now_s` as HTML; it contains plotly's script, or has the URL of one."""
    _require_plotly()
    text: str = _figure(run, now_s).to_html(include_plotlyjs=plotly_js)
    return text


def script() -> str:
    """Return plotly's script for browsers; raise MissingRequirementError if plotly is not installed."""
    _require_plotly()
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text


def _require_plotly() -> None:
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise MissingRequirementError(
            "no page: the package plotly is not installed. Run: python -m pip install 'hvd_adpsgd[view]'."
        ) from error


def _figure(run: Run, now_s: float) -> Figure:
    """Return a figure with the table of super learners, the charts in two columns, and the events."""
    from plotly.subplots import make_subplots

    charts = [chart for chart in _charts(run) if chart.traces]
    table, events = _table(run, now_s), _events(run)
    heights = [_ROW_PX * (2 + len(table["cells"]["values"][0]))]
    heights += [_CHART_PX] * math.ceil(len(charts) / 2) + [2 * _CHART_PX]
    wide = [{"type": "table", "colspan": 2}, None]
    figure = make_subplots(
        rows=len(heights),
        cols=2,
        row_heights=heights,
        specs=[wide, *[[{}, {}]] * (len(heights) - 2), wide],
        subplot_titles=[
            "",
            *(chart.title for chart in charts),
            *[""] * (len(charts) % 2),
            "Events",
        ],
        vertical_spacing=0.2 / len(heights),
    )
    figure.add_trace(table, row=1, col=1)
    for k, chart in enumerate(charts):
        where = {"row": 2 + k // 2, "col": 1 + k % 2}
        for trace in chart.traces:
            figure.add_trace({"showlegend": k == 0, **trace}, **where)
        figure.update_xaxes(title_text=chart.x, **where)
        figure.update_yaxes(type=chart.axis, **where)
        if chart.x == "time":
            _mark(figure, run, where)
    figure.add_trace(events, row=len(heights), col=1)
    return figure.update_layout(
        title=html.escape(_headline(run)), height=sum(heights) + 200, barmode="stack"
    )


def _headline(run: Run) -> str:
    times = [report.time_s for track in run.tracks.values() for report in track.reports]
    steps = max((t.reports[-1].step for t in run.tracks.values() if t.reports), default=0)
    return (
        f"Run of {run.about.get('script') or 'a script'}: {len(run.tracks)} super learners, averaging "
        f"{run.about.get('averaging', '?')}; {_clock(min(times, default=0.0))} to "
        f"{_clock(max(times, default=0.0))}, {steps} steps"
    )


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _table(run: Run, now_s: float) -> dict[str, Any]:
    shown = rows(run, now_s)
    cells = [[column.cell(row) for row in shown] for column in COLUMNS]
    return _as_table([column.title for column in COLUMNS], cells)


def _events(run: Run) -> dict[str, Any]:
    shown = run.events[-_SHOWN_EVENTS:][::-1]
    cells = [[_clock(e.time_s) for e in shown], [e.what for e in shown], [e.text for e in shown]]
    return {**_as_table(["time", "event", "text"], cells), "columnwidth": [2, 1, 12]}


def _as_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> dict[str, Any]:
    values = [[html.escape(text) for text in column] for column in cells]
    return {
        "type": "table",
        "header": {"values": list(header), "align": "left"},
        "cells": {"values": values, "align": "left", "height": _ROW_PX},
    }


def _mark(figure: Figure, run: Run, where: dict[str, int]) -> None:
    """Draw a line at the newest failures, suspicions and alerts."""
    for event in [e for e in run.events if e.what in _STYLES][-_MARKED_EVENTS:]:
        figure.add_vline(
            x=datetime.fromtimestamp(event.time_s),
            line={"dash": "dot", "color": _STYLES[event.what]},
            label={"text": event.what},
            exclude_empty_subplots=False,  # else plotly looks for the axes of tables
            **where,
        )


def _charts(run: Run) -> Iterator[_Chart]:
    for name in _scalar_names(run):
        value = _scalar(name)
        yield _lines(run, name, "step", value)
        yield _lines(run, name, "time", value)
    for metric in METRICS:
        for over in metric.charts:
            yield _lines(run, metric.meaning, over, attrgetter(metric.name), metric.axis)
    for table in TABLES:
        yield _pairs(run, table) if table in PEER_TABLES else _bars(run, table)
    yield _shares(run)


def _scalar(name: str) -> Callable[[Report], float]:
    return lambda report: report.scalars.get(name, math.nan)


def _scalar_names(run: Run) -> list[str]:
    """Return the names of the scalars that the script logs, losses first."""
    names = {name for t in run.tracks.values() for r in t.reports[-1:] for name in r.scalars}
    return sorted(names, key=lambda name: ("loss" not in name.lower(), name))[:_SHOWN_SCALARS]


def _lines(
    run: Run, title: str, x: str, value: Callable[[Report], float], axis: str = "linear"
) -> _Chart:
    """Return a chart with a line for each super learner, over its steps or over time."""
    from plotly.colors import qualitative

    stride = 1 + sum(len(track.reports) for track in run.tracks.values()) // _POINTS
    traces = []
    for i, track in run.tracks.items():
        points = [
            (_x(x, report), value(report) if can_draw(value(report)) else None)
            for report in _with_gaps(track, stride)
        ]
        if any(y is not None for _, y in points):
            line: dict[str, Any] = {
                "type": "scatter",
                "mode": "lines",
                "name": str(i),
                "legendgroup": str(i),
            }
            line["line"] = {"color": qualitative.Plotly[i % len(qualitative.Plotly)]}
            line["x"], line["y"] = zip(*points, strict=True)
            traces.append(line)
    return _Chart(html.escape(title), traces, x, axis)


def _x(x: str, report: Report) -> float | datetime:
    return report.step if x == "step" else datetime.fromtimestamp(report.time_s)


def _with_gaps(track: Track, stride: int) -> Iterator[Report]:
    """Yield every `stride`-th report, and an empty one at gaps in time, and where steps go back."""
    longest_s = max(_GAP_S, 5 * track.every_s * stride)
    before: Report | None = None
    for report in track.reports[::stride]:
        if before and (report.step < before.step or report.time_s - before.time_s > longest_s):
            yield Report(time_s=before.time_s, step=before.step)
        yield report
        before = report


def _pairs(run: Run, table: Table) -> _Chart:
    counts = [
        [track.tables.get(table.name, {}).get(j, 0) for j in run.tracks]
        for track in run.tracks.values()
    ]
    names = [f"super learner {i}" for i in run.tracks]
    heat = {"type": "heatmap", "x": names, "y": names, "z": counts, "showscale": False}
    return _Chart(table.title, [heat] if any(map(any, counts)) else [], table.by)


def _bars(run: Run, table: Table) -> _Chart:
    total: Counter[int] = Counter()
    for track in run.tracks.values():
        total.update(track.tables.get(table.name, {}))
    bars = {"type": "bar", "x": list(total), "y": list(total.values()), "showlegend": False}
    return _Chart(table.title, [bars] if total else [], table.by)


def _shares(run: Run) -> _Chart:
    """Show where time went lately: parts of the step, global collectives, the rest."""
    last = {f"super learner {i}": t.reports[-1] for i, t in run.tracks.items() if t.reports}
    shares = {part.replace("_", " "): [getattr(r, part) for r in last.values()] for part in PARTS}
    rest = [max(0.0, 1.0 - sum(each)) for each in zip(*shares.values(), strict=True)]
    bars = [
        {
            "type": "bar",
            "x": list(last),
            "y": values,
            "name": part,
            "text": part,
            "showlegend": False,
        }
        for part, values in {**shares, "forward, backward, rest": rest}.items()
    ]
    return _Chart("where the time goes, last 10 s", bars if last else [], "")
