"""Compares natural-gradient SGD with SGD: its gain on a toy problem, and the cost of a step.

    python -m lab.studies.natural toy   one learner, and eight averaged every 10 and 40 minibatches
    python -m lab.studies.natural toy --quick   few samples, one seed, as a test
    python -m lab.studies.natural overhead   a step on a DNN with 6 x 1024 sigmoids
    python -m lab.studies.natural overhead --layers 5 --hidden 256   with the speech example's DNN

The toy problem has 40 Gaussian classes in 40 dimensions, multiplied by a matrix of condition 100 (covariances
of condition 10^4). The network has ReLU layers 40-128-128-40; minibatch 128, no momentum, and a rate that
falls tenfold over the run. The eight learners are simulated in one process: each takes every eighth
minibatch, and after every K of its minibatches all parameters are averaged; the estimates of Fisher
matrices stay with each learner. Every method uses for all seeds the rate of the grid that is best on seed 0;
the results are those of the other seeds. Methods: sgd (torch.optim.SGD), sgd-max-change (the same limits as
natural, no preconditioning), natural (NaturalGradientSGD with its defaults).

overhead measures the wall seconds and CPU seconds of a whole step (forward, backward, update) of both
optimizers in turn, on the same minibatch of 256 x 440. It reports medians over rounds of the times and of
their ratios.

Written to --out: toy.json, overhead.json, and the tables as Markdown.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.acoustic_model.speech.problem import new_parser
from hvd_adpsgd.optim.natural_gradient import NaturalGradientSGD

CLASSES, DIM, HIDDEN, BATCH = 40, 40, 128, 128
CONDITION = 100.0
NOISE = 1.0  # standard deviation within a class; that of the class means is 1 too
RATES = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)
NO_PRECONDITIONING = 1e12  # alpha so large that the identity outweighs every estimate
SETTINGS = {  # name: learners, minibatches between means, epochs
    "1 learner": (1, 0, 3),
    "8, every 10": (8, 10, 6),
    "8, every 40": (8, 40, 6),
}
METHODS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "sgd": lambda model, lr: torch.optim.SGD(model.parameters(), lr),
    "sgd-max-change": lambda model, lr: NaturalGradientSGD(model, lr, alpha=NO_PRECONDITIONING),
    "natural": lambda model, lr: NaturalGradientSGD(model, lr),
}


# ---- the toy problem


class Task:
    """Training and held-out samples of the toy problem, drawn from a seed.

    Attributes:
        train, heldout: (inputs, classes), shapes (n, 40) and (n,).
    """

    def __init__(self, seed: int, samples: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._means = self._normal(CLASSES, DIM)
        left, _ = torch.linalg.qr(self._normal(DIM, DIM))
        right, _ = torch.linalg.qr(self._normal(DIM, DIM))
        values = torch.logspace(0, -math.log10(CONDITION), DIM)
        matrix = left * values @ right
        self._matrix = matrix / values.square().mean().sqrt()
        self.train = self._draw(samples)
        self.heldout = self._draw(8192)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (count,), generator=self._generator)
        x = self._means[labels] + NOISE * self._normal(count, DIM)
        return x @ self._matrix.T, labels

    def minibatches(self, epochs: int) -> list[Tensor]:
        """Return the sample indices of every minibatch of a run, in order."""
        count = len(self.train[1])
        found: list[Tensor] = []
        for _ in range(epochs):
            order = torch.randperm(count, generator=self._generator)
            found.extend(order[: count - count % BATCH].split(BATCH))
        return found


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )  # fmt: skip


def heldout_loss(model: nn.Module, task: Task) -> float:
    with torch.no_grad():
        return nn.functional.cross_entropy(model(task.heldout[0]), task.heldout[1]).item()


def take_mean(models: list[nn.Module]) -> None:
    with torch.no_grad():
        for same in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack(list(same)).mean(0)
            for parameter in same:
                parameter.copy_(mean)


def train(seed: int, samples: int, setting: str, method: str, lr: float) -> float:
    """Train; return the held-out cross-entropy of the mean of all models, infinite if training diverged."""
    learners, every, epochs = SETTINGS[setting]
    task, first = Task(seed, samples), network(seed)
    models = [copy.deepcopy(first) for _ in range(learners)]
    optimizers = [METHODS[method](model, lr) for model in models]
    batches = task.minibatches(epochs)
    steps = len(batches) // learners
    for step in range(steps):
        for learner, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = lr * 0.1 ** (step / steps)
            chosen = batches[step * learners + learner]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(task.train[0][chosen]), task.train[1][chosen])
            loss.backward()
            optimizer.step()
        if not math.isfinite(loss.item()):
            return math.inf
        if every and (step + 1) % every == 0:
            take_mean(models)
    take_mean(models)
    found = heldout_loss(models[0], task)
    return found if math.isfinite(found) else math.inf


def toy(options: argparse.Namespace) -> str:
    """Train the grid on seed 0, and the best rates on the other seeds; return a Markdown table."""
    path = options.out / "toy.json"
    kept: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def run(seed: int, setting: str, method: str, lr: float) -> float:
        key = f"{options.samples} {seed} {setting} {method} {lr}"
        if key not in kept:
            kept[key] = train(seed, options.samples, setting, method, lr)
            path.write_text(json.dumps(kept, indent=1))
            print(f"{key}: {kept[key]:.4f}", flush=True)
        return kept[key]

    heads = "learners | method | rate | grid on seed 0 | other seeds | median"
    lines = [f"| {heads} | sgd / it, mean over seeds |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for setting in options.settings:
        base: list[float] = []
        for method in options.methods:
            grid = {lr: run(0, setting, method, lr) for lr in options.rates}
            best = min(grid, key=lambda lr: grid[lr])
            found = [run(seed, setting, method, best) for seed in options.seeds]
            base = found if method == "sgd" else base
            row = (setting, method, f"{best:g}", texts(grid.values()), texts(found))
            lines.append(
                f"| {' | '.join(row)} | {statistics.median(found):.4f} | {gain(base, found)} |"
            )
    return (
        "\n".join(lines) + f"\n\nRates of the grid: {', '.join(f'{r:g}' for r in options.rates)}.\n"
    )


def gain(base: list[float], found: list[float]) -> str:
    """Return mean(base) / mean(found) as text, over the seeds on which neither diverged."""
    pairs = [pair for pair in zip(base, found, strict=False) if all(math.isfinite(v) for v in pair)]
    return f"{sum(b for b, _ in pairs) / sum(f for _, f in pairs):.2f}" if pairs else ""


def texts(values: Any) -> str:
    return ", ".join(f"{value:.3f}" if math.isfinite(value) else "diverged" for value in values)


# ---- the cost of a step


def dnn(layers: int, hidden: int) -> nn.Module:
    torch.manual_seed(0)
    widths = [440] + [hidden] * layers
    parts = [
        part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Sigmoid())
    ]
    return nn.Sequential(*parts, nn.Linear(hidden, 1024))


def stepper(
    options: argparse.Namespace, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> Callable[[], None]:
    model = dnn(options.layers, options.hidden)
    optimizer = make(model)
    x = torch.randn(256, 440, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(256)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], count: int) -> tuple[float, float]:
    """Call step() `count` times; return wall seconds and CPU seconds of this process per call."""
    began, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count, (time.process_time() - used) / count


def overhead(options: argparse.Namespace) -> str:
    """Measure a step of both optimizers in turn; return a Markdown table."""
    torch.set_num_threads(options.threads)
    steps = {
        "sgd": stepper(options, lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)),
        "natural": stepper(options, lambda m: NaturalGradientSGD(m, 0.1, 0.9)),
    }
    for step in steps.values():
        timed(step, 14)  # warm-up; the first ten steps update the estimates more often
    period = 4  # steps of a round: a multiple of the update period, so that rounds cost the same
    rounds = [
        {name: timed(step, period) for name, step in steps.items()} for _ in range(options.rounds)
    ]
    lines = ["| clock | sgd, ms | natural, ms | ratio, median of rounds | quartiles |",
             "|---|---|---|---|---|"]  # fmt: skip
    for clock, name in enumerate(("wall", "CPU")):
        sgd, natural = ([r[key][clock] for r in rounds] for key in ("sgd", "natural"))
        ratios = [b / a for a, b in zip(sgd, natural, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"| {name} | {1e3 * statistics.median(sgd):.1f} | {1e3 * statistics.median(natural):.1f} "
            f"| {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |"
        )
    (options.out / "overhead.json").write_text(json.dumps(rounds))
    load = os.getloadavg()[0]
    return "\n".join(lines) + (
        f"\n\n{options.rounds} rounds of {period} steps, {options.threads} thread(s), load {load:.1f}.\n"
    )


# ---- the script


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("what", choices=("toy", "overhead"))
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4], help="more seeds (default: 1 2 3 4)")
    add("--samples", type=int, default=51200, help="training samples (default: 51200)")
    add("--rates", type=float, nargs="+", default=list(RATES), help="grid (default: 0.2 ... 51.2)")
    add("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    add("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    add("--rounds", type=int, default=30, help="rounds of overhead (default: 30)")
    add("--layers", type=int, default=6, help="layers of the net of overhead (default: 6)")
    add("--hidden", type=int, default=1024, help="width of these layers (default: 1024)")
    add("--threads", type=int, default=1, help="torch's threads for overhead (default: 1)")
    add("--quick", action="store_true", help="use few samples, two rates, one seed, few rounds")
    add("--out", type=Path, default=Path("out") / "natural", help="folder (default: out/natural)")
    options = parser.parse_args(argv)
    least = {"samples": 2 * BATCH, "rounds": 2, "layers": 1, "hidden": 1, "threads": 1}
    for name, low in least.items():
        if getattr(options, name) < low:
            parser.error(f"--{name} is {getattr(options, name)}, allowed is >= {low}")
    if options.quick:
        options.seeds, options.samples, options.rates = [1], 8 * 40 * BATCH // 6, [0.4, 1.6]
        options.rounds = 3
    return options


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    table = toy(options) if options.what == "toy" else overhead(options)
    (options.out / f"{options.what}.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
