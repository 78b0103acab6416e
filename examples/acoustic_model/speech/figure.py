"""The demo's picture: held-out loss over time and over samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .problem import require

LABELS = {
    "hadpsgd": "H-ADPSGD, random pairs (4 learners in 2 super learners)",
    "ssgd": "SSGD (4 learners)",
    "single": "one learner",
}
_COLOURS = {"hadpsgd": "#0072b2", "ssgd": "#d55e00", "single": "#555555"}
_STYLES = {"hadpsgd": "-", "ssgd": "--", "single": ":"}
_AXES = (
    ("seconds", "training time in s, evaluation left out"),
    ("samples", "segments of 21 frames"),
)


def draw(runs: dict[str, list[list[dict]]], title: str, path: Path) -> None:
    """Draw one line per scheme: the mean over seeds, each seed faint behind it.

    Args:
        runs: per scheme, per seed, the entries of its heldout.jsonl.
        title: what was trained.
        path: PNG to write.
    """
    require("matplotlib", "matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, _AXES, strict=True):
        for scheme, seeds in runs.items():
            _curve(axis, scheme, seeds, key)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out cross-entropy in nats per frame")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _curve(axis, scheme: str, seeds: list[list[dict]], key: str) -> None:
    style = {"color": _COLOURS[scheme], "linestyle": _STYLES[scheme]}
    trained = [[entry for entry in run if entry["epoch"] > 0] for run in seeds]
    across = np.array([[entry[key] for entry in run] for run in trained]).mean(0)
    losses = np.array([[entry["heldout_loss"] for entry in run] for run in trained])
    if len(trained) > 1:
        for run, loss in zip(trained, losses, strict=True):
            axis.plot([entry[key] for entry in run], loss, alpha=0.25, linewidth=1, **style)
    axis.plot(across, losses.mean(0), marker="o", markersize=3, label=LABELS[scheme], **style)
