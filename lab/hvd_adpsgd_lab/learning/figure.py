"""A figure of training in virtual time: curves over samples and over time, distance, staleness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_adpsgd_lab.learning.outcome import Outcome, Point


def draw(outcomes: Sequence[Outcome], path: str | Path) -> None:
    """Write a figure of the runs: the first evaluation, else the loss, and the consensus distance."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (samples, time, distance, stale) = plt.subplots(1, 4, figsize=(14, 3.2))
    name = next(iter(outcomes[0].points[-1].evaluation), "loss")

    def shown(point: Point) -> float:
        return point.evaluation.get(name, point.loss)

    for number, outcome in enumerate(outcomes):
        color = f"C{number}"
        points, label = outcome.points, outcome.strategy.split(":")[0]
        samples.plot(
            [p.samples for p in points], [shown(p) for p in points], color=color, label=label
        )
        time.plot([p.time_s for p in points], [shown(p) for p in points], color=color)
        apart = [(p.time_s, p.distance) for p in points if p.distance > 0]
        if apart:
            distance.semilogy(*zip(*apart, strict=True), color=color)
        if sum(outcome.staleness):
            stale.step(range(16), outcome.staleness[:16], where="mid", color=color)
    for axis, text in ((samples, "samples"), (time, "virtual time (s)")):
        axis.set_xlabel(text)
        axis.set_ylabel(f"{name} of the mean model")
    distance.set_xlabel("virtual time (s)")
    distance.set_ylabel("distance from the mean")
    stale.set_xlabel("staleness (steps)")
    stale.set_ylabel("merged chunks")
    samples.legend(frameon=False)
    for axis in (samples, time, distance, stale):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
