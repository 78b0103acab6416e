"""The picture: held-out loss over wall time, or over samples. Colours: Okabe and Ito, on white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.acoustic_model.speech.problem import require

from .curves import Point
from .records import Record
from .schemes import TITLES
from .situations import SITUATIONS
from .table import Place

STYLES: dict[str, tuple[str, Any, str]] = {
    "horovod": ("#e69f00", (0, (3, 1, 1, 1)), "s"),
    "ddp": ("#d55e00", "--", "x"),
    "post_local_sgd": ("#cc79a7", (0, (1, 1)), "D"),
    "diloco": ("#009e73", "-.", "^"),
    "hadpsgd": ("#0072b2", "-", "o"),
}
ACROSS = {"seconds": "wall time in s", "samples": "samples of all learners"}
POINTS = 60  # of a mean over seeds


def draw(
    records: Sequence[Record], absent: Mapping[Place, str], tasks: Sequence[str],
    situations: Sequence[str], path: Path, across: str = "seconds",
) -> None:  # fmt: skip
    """Draw a panel for each task and situation; a line is the mean over seeds, an area their range.

    Args:
        records: runs with equal settings.
        absent: why there is no run, by task, situation and scheme.
        tasks: rows.
        situations: columns.
        path: PNG to write.
        across: a key of ACROSS.
    """
    require("matplotlib", "matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    size = (max(6.5, 1.0 + 2.9 * len(situations)), 1.0 + 2.7 * len(tasks))
    figure, axes = plt.subplots(
        len(tasks), len(situations), figsize=size, sharey="row", squeeze=False,
        layout="constrained", facecolor="white",
    )  # fmt: skip
    for row, task in zip(axes, tasks, strict=True):
        for axis, situation in zip(row, situations, strict=True):
            its = [r for r in records if (r.key.task, r.key.situation) == (task, situation)]
            _panel(axis, its, [absent.get((task, situation, s)) for s in TITLES], across)
            axis.set_title(SITUATIONS[situation].title, fontsize=10)
        row[0].set_ylabel(f"{task}: held-out loss in nats")
    for axis in axes[-1]:
        axis.set_xlabel(ACROSS[across])
    handles = [plt.Line2D([], [], color=c, linestyle=s, marker=m) for c, s, m in STYLES.values()]
    figure.legend(
        handles, [TITLES[scheme] for scheme in STYLES], loc="outside lower center",
        ncols=len(STYLES) if len(situations) > 2 else 3, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: Any, its: Sequence[Record], why: Sequence[str | None], across: str) -> None:
    from matplotlib.ticker import LogLocator

    for scheme in STYLES:
        named = [record for record in its if record.key.scheme == scheme]
        runs = [run for run in named if shown(run.curve, across)]
        if runs:
            _line(axis, runs, STYLES[scheme], across)
    if not its:
        text = next(filter(None, why), "no run")
        axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, wrap=True)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)


def _line(axis: Any, runs: Sequence[Record], style: Any, across: str) -> None:
    colour, line, marker = style
    x, losses = between([shown(run.curve, across) for run in runs], across)
    if len(runs) > 1:
        axis.fill_between(x, losses.min(0), losses.max(0), color=colour, alpha=0.2, linewidth=0)
    axis.plot(x, losses.mean(0), color=colour, linestyle=line, linewidth=1.5)
    ends = [x[-1]], [losses.mean(0)[-1]]
    ended = any(run.ended_s is not None for run in runs)
    axis.plot(*ends, color=colour, marker="X" if ended else marker, markersize=10 if ended else 5)


def shown(curve: Sequence[Point], across: str) -> list[Point]:
    """Return the points that have a place on a logarithmic axis: not those before the first step."""
    return [point for point in curve if getattr(point, across) > 0]


def between(curves: Sequence[Sequence[Point]], across: str) -> tuple[np.ndarray, np.ndarray]:
    """Return places that all curves contain, and the loss of each curve there, linear in their logarithm."""
    logs = [np.log([getattr(point, across) for point in curve]) for curve in curves]
    low, high = max(x[0] for x in logs), min(x[-1] for x in logs)
    places = np.linspace(low, max(low, high), POINTS)
    losses = [np.interp(places, x, [p.loss for p in c]) for x, c in zip(logs, curves, strict=True)]
    return np.exp(places), np.array(losses)
