"""Model averaging with 16 and 32 learners, as in arXiv:1507.01239, in virtual time.

    python -m lab.studies.averaging_at_size                 1, 4, 16, 32 learners, K = 10 and 50
    python -m lab.studies.averaging_at_size --seeds 1 --n 1 16 --optimizers natural
    python -m lab.studies.averaging_at_size --table         what --out holds, once more

The network and the data of model_averaging.py (the easy speech task, five sigmoid layers, no momentum), with
more epochs. N learners take every N-th minibatch and average their models every K minibatches
(periodic_averaging:period=K); the learning rate is that of one learner times 1, 4, ... up to N, and falls
tenfold over the run. Printed, for the best of these rates: the held-out loss of the mean model at equal
samples, how much higher it is than that of one learner, and the speed: how many times as many samples per
virtual second as one learner uses, with steps of 50 ms, 10 million parameters and links of 10 Gb/s.
Written to --out: runs.json. A second call trains only what is missing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hvd_adpsgd_lab import learning
from hvd_adpsgd_lab.simulation.planner import Cluster
from torch.nn.functional import cross_entropy

from examples.acoustic_model import prepare_data, train
from examples.acoustic_model.speech import corpus
from examples.acoustic_model.speech.model import Shape, make
from examples.acoustic_model.speech.problem import Problem, drop_repeats, new_parser, run, within
from hvd_adpsgd.errors import NonFiniteModelError
from lab.studies.averaging_learner import Frames, begin, order
from lab.studies.runs import Cell, Run, perform

DATA = Path("out/speech/easy")
LAYERS, HIDDEN, BATCH, RATE = 5, 128, 128, 2.0  # as in model_averaging.py
PARAMETERS, STEP_S, BYTES_PER_S, LATENCY_S = 1e7, 0.05, 1.25e9, 50e-6
NAMES = ("n", "period", "optimizer", "scale", "epochs", "seed")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--n",
        type=int,
        nargs="+",
        default=[1, 4, 16, 32],
        help="numbers of learners; 1 is the base",
    )
    add("--periods", type=int, nargs="+", default=[10, 50], help="minibatches between means")
    add("--optimizers", nargs="+", default=["sgd", "natural"], choices=["sgd", "natural"])
    add("--epochs", type=int, default=6, help="over all frames (default: 6)")
    add("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    add("--jobs", type=int, default=prepare_data.usable_cores(), help="runs at a time")
    add("--out", type=Path, default=Path("out/averaging_at_size"))
    add("--table", action="store_true", help="print what --out holds; train nothing")
    options = parser.parse_args(argv)
    drop_repeats(options, "n", "periods", "optimizers")
    for name, high in (("n", 1024), ("periods", 10**6)):
        for value in getattr(options, name):
            within(f"--{name}", value, 1, high)
    within("--epochs", options.epochs, 1, 1000)
    within("--seeds", options.seeds, 1, 100)
    within("--jobs", options.jobs, 1, 1024)
    return options


# ---- the task -----------------------------------------------------------------------------------


@functools.cache
def frames(name: str) -> Frames:
    return Frames(DATA, name, shape())


@functools.cache
def shape() -> Shape:
    states = len(corpus.read_json(DATA / "states.json"))
    return Shape(LAYERS, HIDDEN, 0, states, inputs=40, kind="dnn", context=5, activation="sigmoid")


def loss(model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of frames, in nats."""
    scores = model(frames("train")[chosen]).squeeze(1)
    return cross_entropy(scores, frames("train").labels[chosen], ignore_index=-1)


def evaluate(model: torch.nn.Module) -> dict[str, float]:
    """The loss on held-out frames."""
    total = torch.zeros(3, dtype=torch.float64)
    for chosen in torch.arange(len(frames("dev"))).split(4096):
        total += train.tally(model(frames("dev")[chosen]).squeeze(1), frames("dev").labels[chosen])
    return {"held-out loss": float(total[0] / total[2])}


def minibatches(epochs: int) -> int:
    return epochs * (len(frames("train")) // BATCH)


def task(optimizer: str, rate: float, epochs: int, steps: int, seed: int) -> learning.Task:
    """The task of a run, for any number of learners."""

    def model() -> torch.nn.Module:
        made = make(shape())
        begin(made, seed, None)
        return made

    def batches(learner: int, n: int, seed: int) -> Iterator[torch.Tensor]:
        chosen = order(len(frames("train")), minibatches(epochs), BATCH, seed)
        return iter(chosen[learner::n])

    def of(parameters: list[torch.nn.Parameter], model: torch.nn.Module) -> torch.optim.Optimizer:
        return train.optimizer_for(optimizer, model, rate, 0.0)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: train.exponential(1.0, min(step / steps, 1.0))
        )

    return learning.Task(model, loss, batches, of, schedule, evaluate, "model averaging")


# ---- runs ---------------------------------------------------------------------------------------


def trained(cell: Cell) -> Run:
    """Train once; return what it was, its speed, and the held-out loss of the mean model."""
    n, period, optimizer, scale, epochs, seed = cell
    steps = minibatches(epochs) // n
    cluster = Cluster(n, PARAMETERS, STEP_S, BYTES_PER_S, LATENCY_S, seed=seed)
    began = time.monotonic()
    found: dict[str, Any] = {"loss": math.inf, "steps_per_s": math.nan}
    try:
        done = learning.train(
            task(optimizer, RATE * scale, epochs, steps, seed),
            cluster,
            strategy="synchronous" if n == 1 else f"periodic_averaging:period={period}",
            steps=steps,
            points=1,
        )
    except NonFiniteModelError:
        pass
    else:
        heldout = done.points[-1].evaluation["held-out loss"]
        found = {"loss": heldout, "steps_per_s": done.steps_per_s}
    seconds = time.monotonic() - began
    return {**dict(zip(NAMES, cell, strict=True)), **found, "seconds": seconds}


def scales(n: int) -> list[float]:
    """Multiples of one learner's rate: 1, 4, 16, ... up to n; for one learner 0.5, 1 and 2, too."""
    if n == 1:
        return [0.5, 1.0, 2.0]
    found = [4.0**i for i in range(12) if 4.0**i < n]
    return [*found, float(n)]


def grid(options: argparse.Namespace) -> list[Cell]:
    """Return all cells; those of the same seed together."""
    cells = []
    for seed, n, optimizer in itertools.product(
        range(options.seeds), options.n, options.optimizers
    ):
        for period in options.periods if n > 1 else [0]:
            cells += [(n, period, optimizer, scale, options.epochs, seed) for scale in scales(n)]
    return cells


def table(runs: list[Run]) -> str:
    """Return a row for each optimizer, number of learners and period, at the best rate of each."""
    losses: dict[Cell, dict[float, list[float]]] = {}
    speeds: dict[Cell, list[float]] = {}
    for one in sorted(runs, key=lambda one: one["seed"]):
        key = (one["optimizer"], one["n"], one["period"])
        losses.setdefault(key, {}).setdefault(one["scale"], []).append(one["loss"])
        if math.isfinite(one["steps_per_s"]):  # it has not diverged
            speeds.setdefault(key, []).append(one["steps_per_s"])
    lines = [
        "| optimizer | learners | K | best multiple of the rate | held-out loss | over one learner | speed |",
        "|---|---|---|---|---|---|---|",
    ]
    for optimizer, n, period in sorted(losses):
        means = {scale: statistics.mean(of) for scale, of in losses[optimizer, n, period].items()}
        scale = min(means, key=lambda scale: means[scale])
        base = losses.get((optimizer, 1, 0), {})
        best = min((statistics.mean(of) for of in base.values()), default=math.nan)
        alone = speeds.get((optimizer, 1, 0), [math.nan])
        speed = statistics.mean(speeds.get((optimizer, n, period), [math.nan])) / statistics.mean(
            alone
        )
        over = f"{100 * (means[scale] / best - 1):+.1f} %" if n > 1 else ""
        lines.append(
            f"| {optimizer} | {n} | {period or ''} | {scale:g} | {means[scale]:.3f} | {over} | {speed:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, then print."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        prepare_data.named("easy", quick=False)
    file = options.out / "runs.json"
    runs = perform(file, [] if options.table else grid(options), NAMES, trained, options.jobs)
    runs = [one for one in runs if one["epochs"] == options.epochs]
    if not runs:
        raise Problem(f"{options.out} holds no runs. Leave --table out.")
    print(table(runs))


if __name__ == "__main__":
    run(main)
