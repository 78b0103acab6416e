"""Figures of the measurements of stragglers and networks. Colours: Okabe and Ito."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech.problem import require

from . import network, stragglers

LINES = (
    ("#0072b2", "-", "o"),
    ("#009e73", "-.", "^"),
    ("#56b4e9", (0, (5, 1.5)), "s"),
    ("#cc79a7", (0, (1, 1)), "D"),
    ("#e69f00", (0, (3, 1, 1, 1, 1, 1)), "v"),
    ("#999999", (0, (6, 3)), "P"),
    ("#d55e00", "-", "x"),
)
_MODELS = ("#56b4e9", "#009e73", "#0072b2")
_STYLES = {network.GOSSIP: ("-", "o"), network.SYNCHRONOUS: ("--", "x")}
_CURVES = {
    network.GOSSIP: ("H-ADPSGD, mean of the models", "#0072b2", "-", "o"),
    network.SYNCHRONOUS: ("SSGD", "#d55e00", "--", "x"),
    network.ALONE: ("averaging off, each alone", "#555555", ":", "s"),
}


def draw_stragglers(result: Mapping[str, Any], path: Path) -> None:
    """Draw the speed kept by the healthy learners, and by all learners together, over the slowdown."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
    for axis, who in zip(axes, ("healthy", "all"), strict=True):
        for (scheme, one), style in zip(result.items(), itertools.cycle(LINES), strict=False):
            _kept(axis, scheme, one["kept"], who, style)
        _axis(axis, next(iter(result.values()))["kept"])
    axes[0].axhline(stragglers.GOAL, color="#000000", linewidth=0.8, linestyle=":")
    axes[0].set_title("three healthy learners (dotted: goal)", fontsize=10)
    axes[1].set_title("all four learners (thin black: model)", fontsize=10)
    for waits in (False, True):
        _model(axes[1], result, waits)
    axes[0].set_ylabel("speed relative to no slow learner")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle("One of four learners is s times slower", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _kept(axis: Any, scheme: str, kept: Mapping[str, Any], who: str, style: Any) -> None:
    colour, line, marker = style
    slowdowns = sorted(kept, key=float)
    middle = [kept[s][who]["median"] for s in slowdowns]
    spread = [
        [kept[s][who]["median"] - kept[s][who]["min"] for s in slowdowns],
        [kept[s][who]["max"] - kept[s][who]["median"] for s in slowdowns],
    ]
    drawn = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5}
    axis.errorbar(
        [float(s) for s in slowdowns], middle, spread, capsize=3, linewidth=1.4, label=scheme,
        **drawn,
    )  # fmt: skip


def _model(axis: Any, result: Mapping[str, Any], waits: bool) -> None:
    kept = next((r["kept"] for s, r in result.items() if stragglers.waits(s) == waits), None)
    if kept:
        slowdowns = sorted(kept, key=float)
        line = [kept[s]["model"] for s in slowdowns]
        axis.plot([float(s) for s in slowdowns], line, color="#000000", linewidth=0.8)


def _axis(axis: Any, kept: Mapping[str, Any]) -> None:
    ticks = sorted(float(s) for s in kept)
    axis.set(xlabel="s", xscale="log", ylim=(0, None))
    axis.set_xticks(ticks, [f"{s:g}" for s in ticks], minor=False)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def draw_network(
    result: Mapping[str, Any], curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path
) -> None:
    """Draw the speed kept with averaging on each link, by model, and held-out loss over time and steps."""
    plt = pyplot()
    rows = 1 + bool(curves)
    figure, axes = plt.subplots(
        rows, 2, figsize=(10, 0.4 + 4 * rows), squeeze=False, layout="constrained"
    )
    for axis, kind in zip(axes[0], network.KINDS, strict=True):
        _links(axis, result, kind)
        axis.set_title(f"computation: {kind} (dotted: goal)", fontsize=10)
    axes[0][0].set_ylabel("steps/s relative to averaging off")
    if result:
        axes[0][0].legend(fontsize=8, frameon=False)
    if curves:
        _curves(axes[1][0], curves, lambda copy: copy["seconds"], "seconds")
        _curves(axes[1][1], curves, lambda copy: statistics.mean(copy["steps"]), "steps")
        link, model, kind, _ = network.CURVE
        axes[1][0].set_title(f"{model}, {link}, {kind}", fontsize=10)
        axes[1][0].set_ylabel("held-out loss in nats")
        axes[1][1].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _links(axis: Any, result: Mapping[str, Any], kind: str) -> None:
    links = list(result)
    for model, colour in zip(network.MODELS, _MODELS, strict=True):
        for scheme, (line, marker) in _STYLES.items():
            found = [result[link].get(model, {}).get(kind, {}).get(scheme) for link in links]
            known = [(x, one) for x, one in enumerate(found) if one]
            if not known:
                continue
            kept = [one["kept"] for _, one in known]
            spread = [
                [one["kept"] - one["kept_min"] for _, one in known],
                [one["kept_max"] - one["kept"] for _, one in known],
            ]
            axis.errorbar(
                [x for x, _ in known], kept, spread, color=colour, linestyle=line, marker=marker,
                capsize=3, linewidth=1.4,
                label=f"{model}, {'SSGD' if scheme == network.SYNCHRONOUS else 'H-ADPSGD'}",
            )  # fmt: skip
    axis.set_xticks(range(len(links)), links)
    axis.set_ylim(0, 1.02)
    axis.axhline(network.GOAL_KEPT, color="#000000", linewidth=0.8, linestyle=":")
    axis.grid(alpha=0.3)


def _curves(axis: Any, curves: Mapping[str, Any], across: Any, label: str) -> None:
    from matplotlib.ticker import LogLocator

    for scheme, curve in curves.items():
        name, colour, line, marker = _CURVES[scheme]
        copies = sorted(curve, key=across)
        axis.plot(
            [across(copy) for copy in copies], [copy["loss"] for copy in copies], color=colour,
            linestyle=line, marker=marker, markersize=4, linewidth=1.4, label=name,
        )  # fmt: skip
    axis.set(xlabel=label, xscale="log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def pyplot() -> Any:
    """Return matplotlib.pyplot, which draws into files."""
    require("matplotlib", "matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    return plt
