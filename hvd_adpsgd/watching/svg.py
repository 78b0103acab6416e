"""Draws charts as SVG text: lines over one axis, bars, a heat map. All text in them is escaped."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "Mark",
    "Series",
    "bars",
    "can_draw",
    "heat_map",
    "lines",
    "number",
    "shares",
    "ticks",
]

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = (
    76,
    12,
    12,
    44,
)  # margins, wide enough for the larger font of a narrow window
_POINTS = 4800  # most points of one chart, over all its lines
_LARGEST, _LEAST = (
    1e100,
    1e-100,
)  # largest absolute value that a chart shows; a smaller range of values is drawn as a constant line
COLOURS = 8  # number of classes c0, c1, ..., to each of which the page's style gives a colour


@dataclass(frozen=True)
class Series:
    """One line of a chart, in parts with gaps between them.

    Attributes:
        name: name of the line, for its tooltip.
        parts: the points (x, y) of each part; points that cannot be drawn are left out.
    """

    name: str
    parts: Sequence[Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Mark:
    """A moment on the time axis, with the text of an event."""

    x: float
    text: str
    is_bad: bool


def can_draw(value: float) -> bool:
    """Whether a value is finite, and so small that sums and differences of such values are finite."""
    return abs(value) <= _LARGEST


def number(value: float) -> str:
    """Format a number in few characters."""
    if math.isnan(value):
        return "–"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers in [low, high] for the ticks of an axis."""
    if not high > low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / most))
    step *= next(k for k in (1, 2, 5, 10, 20) if (high - low) / (step * k) < most)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks in [10^low, 10^high]: 1, 2 and 5 times powers of ten, or powers alone; if few, `ticks`."""
    powers = range(math.floor(low), math.floor(high) + 1)
    found = [
        k * 10.0**power
        for power in powers
        for k in (1, 2, 5)
        if low <= math.log10(k) + power <= high and (k == 1 or high - low < 3)
    ]
    return found if len(found) > 2 else ticks(10**low, 10**high)


def _thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return the points; if there are more than `most`, the means of groups of neighbouring points."""
    n = len(points)
    if n <= most:
        return list(points)
    groups = [points[k * n // most : (k + 1) * n // most] for k in range(most)]
    return [
        (statistics.fmean(x for x, _ in group), statistics.fmean(y for _, y in group))
        for group in groups
    ]


class _Frame:
    """Maps values to coordinates in the picture.

    Args:
        xs, ys: least and largest value of each axis.
        log: whether the y axis is logarithmic.
    """

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float], log: bool = False):
        self.log = log and ys[0] > 0
        self.xs = xs
        if xs[1] - xs[0] <= max(1e-9 * max(map(abs, xs)), _LEAST):
            self.xs = xs[0], xs[0] + max(1.0, 1e-6 * abs(xs[0]))
        low, high = (math.log10(ys[0]), math.log10(ys[1])) if self.log else ys
        margin = 0.05 * (high - low)
        largest = max(abs(low), abs(high))
        # equal values, some of which were rounded to float32
        if margin <= max(1e-7 * largest, _LEAST):
            margin = 0.05 * largest if largest > _LEAST else 0.5
        self.low, self.high = low - margin, high + margin

    def x(self, value: float) -> float:
        share = (value - self.xs[0]) / (self.xs[1] - self.xs[0])
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_label: str) -> str:
        """Draw the grid, the numbers of both axes and the name of the x axis."""
        if self.log:
            heights = log_ticks(self.low, self.high)
        else:
            heights = ticks(self.low, self.high)
        out = [
            f'<path class="grid" d="M{_LEFT} {self.y(v):.1f}H{WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 6}" y="{self.y(v) + 4:.1f}" text-anchor="end">{number(v)}</text>'
            for v in heights
        ]
        out += [
            f'<text x="{self.x(v):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{number(v)}</text>'
            for v in ticks(*self.xs)
        ]
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        out.append(
            f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>'
        )
        return "".join(out)


def _picture(title: str, body: str, height: float = HEIGHT) -> str:
    box = f"0 0 {WIDTH} {height:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{html.escape(title)}">{body}</svg>'


def lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    *,
    log: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """Draw a chart of lines; "" if no line has a point that can be drawn.

    Args:
        title: description of the picture for screen readers.
        series: the lines.
        x_label: name and unit of the x axis.
        log: a logarithmic y axis; points that are not above 1e-100 are left out.
        marks: moments, as vertical lines.
    """
    most = max(60, _POINTS // max(1, len(series)))
    kept = [(one.name, _kept(one, log, most)) for one in series]
    every = [point for _, parts in kept for part in parts for point in part]
    if not every:
        return ""
    frame = _Frame(_range([x for x, _ in every]), _range([y for _, y in every]), log)
    body = frame.axes(x_label) + "".join(_drawn_mark(frame, mark) for mark in marks)
    for i, (name, parts) in enumerate(kept):
        body += _drawn_line(frame, i, name, parts)
    return _picture(title, body)


def _kept(series: Series, log: bool, most: int) -> list[list[tuple[float, float]]]:
    """Return the drawable points of each part: at most about `most` in all, and at least one per part."""
    parts = [
        [(x, y) for x, y in part if can_draw(x) and can_draw(y) and (y > _LEAST or not log)]
        for part in series.parts
    ]
    total = max(1, sum(map(len, parts)))
    return [_thinned(part, max(1, most * len(part) // total)) for part in parts if part]


def _drawn_mark(frame: _Frame, mark: Mark) -> str:
    if not frame.xs[0] <= mark.x <= frame.xs[1]:
        return ""
    kind = "bad" if mark.is_bad else "good"
    path = f"M{frame.x(mark.x):.1f} {_TOP}V{HEIGHT - _BOTTOM}"
    return f'<path class="mark {kind}" d="{path}"><title>{html.escape(mark.text)}</title></path>'


def _drawn_line(
    frame: _Frame, i: int, name: str, parts: Sequence[Sequence[tuple[float, float]]]
) -> str:
    """Draw the i-th line; a part with a single point is drawn as a dot."""
    if not parts:
        return ""
    path = ""
    for points in parts:
        shown = [points[0], points[0]] if len(points) == 1 else points
        path += "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in shown)
    name = html.escape(name)
    return f'<path class="line c{i % COLOURS}" d="{path}"><title>{name}</title></path>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def bars(title: str, counts: Mapping[int, int], x_label: str) -> str:
    """Return a histogram as SVG: one bar per key, its share of all counts; "" without counts."""
    total = sum(counts.values())
    if not total:
        return ""
    last = max(key for key, count in counts.items() if count)
    frame = _Frame((-0.5, last + 0.5), (0.0, max(counts.values()) / total))
    frame.low = 0.0
    wide = 0.8 * (frame.x(1) - frame.x(0))
    body = frame.axes(x_label)
    for key, count in sorted(counts.items()):
        top = frame.y(count / total)
        body += (
            f'<rect class="bar" x="{frame.x(key) - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" '
            f'height="{frame.y(0.0) - top:.1f}"><title>{key}: {count / total:.1%}</title></rect>'
        )
    return _picture(title, body)


def heat_map(title: str, names: Sequence[str], counts: Sequence[Sequence[int]], label: str) -> str:
    """Draw a square of counts with one row and one column per name; "" if all counts are 0."""
    n, largest = len(names), max((max(row, default=0) for row in counts), default=0)
    if not largest:
        return ""
    size = min(48.0, (WIDTH - _LEFT - _RIGHT) / n)
    every = max(1, math.ceil(14 / size))
    body = f'<text x="{_LEFT}" y="16">{html.escape(label)}</text>'
    for i, row in enumerate(counts):
        top = 46 + i * size
        if i % every == 0:
            middle, name = _LEFT + (i + 0.5) * size, html.escape(names[i])
            body += (
                f'<text x="{_LEFT - 6}" y="{top + size / 2 + 4:.1f}" text-anchor="end">{name}</text>'
                f'<text x="{middle:.1f}" y="39" text-anchor="middle">{name}</text>'
            )
        for j, count in enumerate(row):
            shown = f"{names[i]} with {names[j]}: {count}"
            body += (
                f'<rect class="cell" x="{_LEFT + j * size:.1f}" y="{top:.1f}" width="{size - 1:.1f}" '
                f'height="{size - 1:.1f}" fill-opacity="{0.06 + 0.94 * count / largest:.2f}">'
                f"<title>{html.escape(shown)}</title></rect>"
            )
    return _picture(title, body, 54 + n * size)


def shares(title: str, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str]) -> str:
    """Draw one bar per row, divided into parts; "" without rows.

    Args:
        title: description of the picture for screen readers.
        rows: for each bar its name, and a share in [0, 1] for each part.
        parts: names of the parts.
    """
    if not rows:
        return ""
    high, wide = 18, WIDTH - _LEFT - _RIGHT
    body = ""
    for i, (name, values) in enumerate(rows):
        left, top = float(_LEFT), 4 + i * (high + 4)
        body += f'<text x="{_LEFT - 6}" y="{top + 13}" text-anchor="end">{html.escape(name)}</text>'
        for k, share in enumerate(values):
            width = wide * max(0.0, min(share, 1.0))
            body += (
                f'<rect class="part c{k % COLOURS}" x="{left:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{high}">'
                f"<title>{html.escape(parts[k])}: {share:.0%}</title></rect>"
            )
            left += width
    return _picture(title, body, 8 + len(rows) * (high + 4))
