"""Figures of held-out loss over samples, batch or period. Colours: Okabe and Ito."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from examples.acoustic_model.speech.problem import require

_LINES = (  # colour, style, marker of the lines of a panel
    ("#0072b2", "-", "o"),
    ("#d55e00", (0, (5, 1.5)), "s"),
    ("#009e73", "-.", "^"),
    ("#cc79a7", (0, (1, 1)), "D"),
    ("#e69f00", (0, (3, 1, 1, 1, 1, 1)), "v"),
)
_TICKS = (1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 8)
_TOP = 7.0  # nats, upper end of the axis: higher losses are worse than a uniform guess of some hundred states
_REFERENCE = ("#000000", ":", "x")


def draw_families(
    runs: dict[str, list[list[dict]]],
    panels: dict[str, list[str]],
    reference: str,
    title: str,
    path: Path,
) -> None:
    """Draw held-out loss over samples: one line per scheme, with the range over its seeds as a band.

    Args:
        runs: per scheme, per seed, the entries of its heldout.jsonl.
        panels: schemes of each panel, by the panel's title.
        reference: a scheme that is drawn in every panel, if `runs` has it.
        title: title of the figure.
        path: PNG to write.
    """
    require("matplotlib", "matplotlib").use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = _panels(plt, len(panels))
    for axis, (name, schemes) in zip(axes[0], panels.items(), strict=True):
        styles = dict(zip(schemes, itertools.cycle(_LINES), strict=False))
        styles |= {reference: _REFERENCE} if reference in runs else {}
        for scheme, style in styles.items():
            _band(axis, scheme, runs[scheme], style)
        axis.set(title=name, xlabel="segments of 21 frames, thousands", yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=_TICKS, numticks=20))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7.5, loc="upper right")
    axes[0][0].set_ylabel("held-out cross-entropy in nats per frame")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _band(axis, label: str, seeds: list[list[dict]], style: tuple) -> None:
    trained = [[entry for entry in run if entry["epoch"] > 0] for run in seeds]
    samples = [entry["samples"] / 1000 for entry in trained[0]]
    losses = np.array([[entry["heldout_loss"] for entry in run] for run in trained])
    colour, line, marker = style
    axis.fill_between(samples, losses.min(0), losses.max(0), color=colour, alpha=0.15, linewidth=0)
    drawn = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
    axis.plot(samples, losses.mean(0), linewidth=1.4, label=label, **drawn)


def draw_batches(
    panels: dict[str, dict[str, dict[int, list[float]]]], bound: float, title: str, path: Path
) -> None:
    """Draw held-out loss over the batch: one line per scheme, with its range over seeds.

    Args:
        panels: a loss per seed, by panel's title, scheme and batch. A batch at which a loss is infinite is
            marked near the upper edge; a batch at which a loss is NaN is left out.
        bound: loss at which a horizontal line is drawn.
        title: title of the figure.
        path: PNG to write.
    """
    require("matplotlib", "matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = _panels(plt, len(panels))
    for axis, (name, schemes) in zip(axes[0], panels.items(), strict=True):
        styles = itertools.cycle((_REFERENCE, *_LINES))
        for place, (scheme, style) in enumerate(zip(schemes, styles, strict=False)):
            _batches(axis, scheme, schemes[scheme], style)
            _mark_diverged(axis, schemes[scheme], style[0], place)
        axis.axhline(bound, color="#555555", linewidth=1, label="1.05 x baseline")
        batches = sorted({batch for row in schemes.values() for batch in row})
        _scale(axis, name, "batch of all learners, in segments (X: diverged)", batches)
    axes[0][0].set_ylim(top=min(axes[0][0].get_ylim()[1], _TOP))
    _finish(figure, axes, title, path)


def _batches(axis, label: str, losses: dict[int, list[float]], style: tuple) -> None:
    colour, line, marker = style
    finite = sorted(batch for batch, row in losses.items() if np.isfinite(row).all())
    means = np.array([np.mean(losses[batch]) for batch in finite])
    least, most = (np.array([end(losses[batch]) for batch in finite]) for end in (min, max))
    spread = (means - least, most - means)
    drawn = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5}
    axis.errorbar(finite, means, spread, capsize=3, linewidth=1.4, label=label, **drawn)


def _mark_diverged(axis, losses: dict[int, list[float]], colour: str, place: int) -> None:
    """Mark diverged batches by a cross near the upper edge, at a height of its own for each scheme."""
    lost = [batch for batch, row in losses.items() if np.isinf(row).any()]
    height = [0.96 - 0.05 * place] * len(lost)  # from 0, lower edge, to 1, upper edge
    drawn = {"color": colour, "marker": "X", "markersize": 8, "linestyle": "none"}
    (marks,) = axis.plot(lost, height, transform=axis.get_xaxis_transform(), **drawn)
    marks.set_in_layout(False)


def draw_periods(
    panels: dict[str, tuple[list[float], dict[str, dict[int, list[float]]]]], title: str, path: Path
) -> None:
    """Draw held-out loss over the steps between two means, with its range over seeds.

    Args:
        panels: by the panel's title, losses of one learner, which are drawn as a band, and losses of several
            learners by their number and the period; each a loss per seed. An infinite loss is marked near
            the upper edge.
        title: title of the figure.
        path: PNG to write.
    """
    require("matplotlib", "matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(1.2 + 3.1 * len(panels), 4.6), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (name, (alone, several)) in zip(axes[0], panels.items(), strict=True):
        for place, ((label, losses), style) in enumerate(
            zip(several.items(), itertools.cycle(_LINES), strict=False)
        ):
            _batches(axis, label, losses, style)
            _mark_diverged(axis, losses, style[0], place)
        if np.isfinite(alone).all() and alone:
            axis.axhspan(min(alone), max(alone), color="#000000", alpha=0.15, linewidth=0)
            axis.axhline(np.mean(alone), color="#000000", linestyle=":", label="1 learner")
        periods = sorted({period for losses in several.values() for period in losses})
        _scale(axis, name, "K, minibatches between means", periods)
    _finish(figure, axes, title, path)


def _scale(axis, title: str, label: str, ticks: list[int]) -> None:
    """Make the horizontal axis logarithmic, with ticks at `ticks` only."""
    axis.set(title=title, xlabel=label, xscale="log")
    axis.set_xticks(ticks, ticks, minor=False)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _panels(plt, number: int):
    """Return a figure of panels in one row, and their axes, in a row of a matrix."""
    size = (1.2 + 4.4 * number, 4.8)
    return plt.subplots(1, number, figsize=size, sharey=True, squeeze=False, layout="constrained")


def _finish(figure, axes, title: str, path: Path) -> None:
    """Add the label, legend and title that all panels share, and write the file."""
    import matplotlib.pyplot as plt

    axes[0][0].set_ylabel("held-out cross-entropy in nats per frame")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)
