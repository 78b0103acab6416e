"""Draws the traces of `bench overlap`: computation, waiting and means of trainers and engines over time."""

from __future__ import annotations

import json
from typing import Any

from hvd_adpsgd.errors import ConfigError

__all__ = ["SCHEMES", "draw", "shown"]

SCHEMES = {
    "delay": "delay_by_one: the mean of all runs beside the computation",
    "periodic": "periodic_averaging:period=1: the step waits for the mean of all",
}
COLOURS = {
    "computation": "#b8c4ce",
    "update": "#e0a030",
    "waiting": "#d9534f",
    "mean of all": "#2f6db5",
}
STEPS = 5

# A bar: learner, whether it belongs to the engine, kind, start and length in ms.
Bar = tuple[int, bool, str, float, float]


def shown(events: list[dict[str, Any]], steps: int = STEPS) -> list[Bar]:
    """Return the bars of `steps` steps at the end of a trace (without the last step), starting at time 0.

    The trace does not record the computation, which is drawn between the end of a step and the start of the
    next. The part of `collect` and `offer` that overlaps the learner's own mean of all is drawn as waiting.
    """
    mine = [e for e in events if e.get("ph") == "X"]
    bars: list[Bar] = []
    for pid in sorted({e["pid"] for e in mine}):
        own = sorted((e for e in mine if e["pid"] == pid), key=lambda e: e["ts"])
        means = [e for e in own if e["name"] == "mean of all"]
        bars += [(pid, True, "mean of all", e["ts"], e["dur"]) for e in means]
        parts = [
            e for e in own if e["name"] in ("inner_allreduce", "optimizer", "collect", "offer")
        ]
        ended = None
        for part in parts:
            begins = part["name"] == "inner_allreduce"
            if begins and ended is not None:
                bars.append((pid, False, "computation", ended, part["ts"] - ended))
            ended = part["ts"] + part["dur"]
            split = min(max([part["ts"], *_ends_within(means, part)]), ended)
            bars.append((pid, False, "waiting", part["ts"], split - part["ts"]))
            bars.append((pid, False, "update", split, ended - split))
    starts = [ts for pid, engine, what, ts, _ in bars if not engine and what == "computation"]
    firsts = sorted(starts)[-2 * (steps + 1) : -1 : 2]
    if not firsts:
        raise ConfigError(f"nothing to draw: the trace has {len(mine)} records, no whole step.")
    low, high = firsts[0], firsts[-1]
    return [
        (pid, engine, what, (ts - low) / 1e3, duration / 1e3)
        for pid, engine, what, ts, duration in bars
        if ts < high and ts + duration > low and duration > 0
    ]


def _ends_within(means: list[dict[str, Any]], part: dict[str, Any]) -> list[float]:
    """Return the end times of means of all models within a part of a step, if that part waits for means."""
    if part["name"] not in ("collect", "offer"):
        return []
    ends = [e["ts"] + e["dur"] for e in means]
    return [end for end in ends if part["ts"] < end < part["ts"] + part["dur"]]


def draw(traces: dict[str, str], path: str) -> None:
    """Draw the traces of `bench overlap`, with one panel per scheme.

    Args:
        traces: path of each scheme's trace.
        path: path of the picture to write.

    Raises:
        ConfigError: if a trace holds no whole step.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(traces), 1, figsize=(9, 2.1 * len(traces)), sharex=True)
    for axis, scheme in zip(axes, SCHEMES, strict=True):
        with open(traces[scheme]) as source:
            content = json.load(source)
        events = content["traceEvents"] if isinstance(content, dict) else content
        bars = shown(events)
        rows = sorted({(pid, engine) for pid, engine, *_ in bars})
        for pid, engine, what, begins, lasts in bars:
            axis.broken_barh(
                [(begins, lasts)], (len(rows) - rows.index((pid, engine)) - 0.9, 0.8),
                color=COLOURS[what],
            )  # fmt: skip
        names = [f"{'engine' if engine else 'trainer'} {pid}" for pid, engine in rows]
        axis.set_yticks([len(rows) - i - 0.5 for i in range(len(rows))], names)
        axis.set_title(SCHEMES[scheme], fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlim(left=0)
    axes[-1].set_xlabel("ms")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="lower center", ncol=len(COLOURS), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
