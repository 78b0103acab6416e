"""Draws a storm: participation and loss of the mean model over time, with the faults as ticks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_adpsgd_lab.bench.storm.schedule import Fault

_COLOURS = {"kill": "#d9534f", "stop": "#e0a030", "slow": "#b8a04e"}
_TICK = 0.05  # length, of the height of the picture


def draw(results: Mapping[str, Mapping[str, Any]], faults: Sequence[Fault], path: str) -> None:
    """Write the picture.

    Args:
        results: by scheme, with `curves`: `participation`, `loss` and `calm_loss`, each (seconds, value) by
            time.
        faults: the faults that were played.
        path: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (part, loss) = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    for number, (scheme, result) in enumerate(results.items()):
        curves, colour = result["curves"], f"C{number}"
        part.plot(*_minutes(curves["participation"]), color=colour, label=scheme)
        loss.plot(*_minutes(curves["loss"]), color=colour)
        loss.plot(*_minutes(curves["calm_loss"]), color=colour, lw=0.8, ls=":")
    for axis in (part, loss):
        for kind, colour in _COLOURS.items():
            at = [fault.at_s / 60 for fault in faults if fault.kind == kind]
            label = kind if axis is part and at else None
            axis.vlines(
                at, 0, _TICK, color=colour, transform=axis.get_xaxis_transform(), label=label
            )
        axis.spines[["top", "right"]].set_visible(False)
    part.set(ylabel="participation of the living", ylim=(0, None))
    loss.set(xlabel="minutes", ylabel="loss of the mean model")
    loss.plot([], [], color="0.4", lw=0.8, ls=":", label="without faults")
    loss.legend(frameon=False, fontsize=8)
    part.legend(frameon=False, ncol=8, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _minutes(curve: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [t / 60 for t, _ in curve], [value for _, value in curve]
