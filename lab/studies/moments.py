"""Adaptive optimizers under gossip: compares the mean model with synchronous training, in virtual time.

    python -m lab.studies.moments            AdamW, n = 8: synchronous, own and shared moments
    python -m lab.studies.moments --n 32 --rates 0.016 0.032
    python -m lab.studies.moments --optimizers adamw adam rmsprop sgd --schemes synchronous random_pairs
    python -m lab.studies.moments --table                   what --out holds, once more

A scheme is a strategy or a baseline, followed by @own or @shared for the option `moments`; @shared:4 adds
`moments_period`. Each trains the byte-level transformer of examples/byte_transformer.py, or with
`--model acoustic` the acoustic model of the easy speech task, at each rate, with each seed: equal starts and
batches.
Printed is, for each n, batch, optimizer and scheme, the held-out loss of the mean model at its best rate, and
its difference from synchronous training at that one's best rate, with a 95 % interval over seeds (Student's
t). A best rate at an end of the grid is marked: widen the grid. Written to --out: runs.json and moments.png,
or acoustic.json and acoustic.png.
A second call trains only what runs.json lacks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from hvd_adpsgd_lab.learning import Task, train
from hvd_adpsgd_lab.simulation.planner import PATIENT, Cluster

from examples import byte_transformer
from examples.acoustic_model import prepare_data
from examples.acoustic_model import virtual_time as acoustic
from examples.acoustic_model.prepare_data import usable_cores
from examples.acoustic_model.speech.problem import Problem, drop_repeats, new_parser, run, within
from lab.studies.intervals import QUANTILES, mean_interval
from lab.studies.lion import Lion
from lab.studies.runs import Cell, Run, perform

SCHEMES = ("synchronous", "random_pairs@own", "random_pairs@shared")
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1),
    "adamw999": functools.partial(torch.optim.AdamW, betas=(0.9, 0.999), weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, betas=(0.9, 0.95)),
    "nadam": functools.partial(torch.optim.NAdam, betas=(0.9, 0.95)),
    "rmsprop": functools.partial(torch.optim.RMSprop, alpha=0.95),
    "lion": functools.partial(Lion, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
}
STEP_S, BYTES_PER_S, LATENCY_S = 0.05, 1.25e8, 50e-6

NAMES = ("n", "sequences", "optimizer", "scheme", "rate", "seed", "steps")

Key = tuple[int, int, str, str]  # n, sequences, optimizer, scheme
Losses = dict[float, dict[int, float]]  # by rate and seed


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--n", type=int, nargs="+", default=[8], help="numbers of super learners")
    add("--batch", type=int, nargs="+", default=[4], help="sequences per super learner and step")
    add("--steps", type=int, default=300, help="of each super learner (default: 300)")
    add("--rates", type=float, nargs="+", default=[0.004, 0.008, 0.016, 0.032, 0.064])
    add("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    add("--optimizers", nargs="+", default=["adamw"], choices=OPTIMIZERS)
    add("--schemes", nargs="+", default=list(SCHEMES))
    add("--jobs", type=int, default=usable_cores(), help="runs at a time")
    add("--model", choices=("transformer", "acoustic"), default="transformer")
    add("--out", type=Path, default=Path("out/moments"))
    add("--table", action="store_true", help="print and draw what --out holds; train nothing")
    options = parser.parse_args(argv)
    drop_repeats(options, "n", "batch", "rates", "optimizers", "schemes")
    for name, low, high in (("n", 2, 4096), ("batch", 1, 4096), ("rates", 1e-9, 1e3)):
        for value in getattr(options, name):
            within(f"--{name}", value, low, high)
    within("--steps", options.steps, 1, 10**6)
    within("--seeds", options.seeds, 1, len(QUANTILES))
    within("--jobs", options.jobs, 1, 1024)
    for scheme in options.schemes:
        moments, _, period = scheme.partition("@")[2].partition(":")
        if moments not in ("", "own", "shared") or not (period or "1").isdecimal():
            raise Problem(f"--schemes {scheme}: after @ allowed are own, shared and shared:PERIOD")
    return options


def transformer_batches(i: int, n: int, seed: int, sequences: int) -> Iterable[Any]:
    return byte_transformer.batches(i, n, seed, sequences)


def acoustic_batches(i: int, n: int, seed: int, segments: int) -> Iterable[Any]:
    return acoustic.batches(i, n, seed, acoustic.Recipe(batch=segments * n))


MODELS = {
    "transformer": (byte_transformer, transformer_batches),
    "acoustic": (acoustic, acoustic_batches),
}


def trained(model: str, cell: Cell) -> Run:
    """Train once; return what it was, and what the mean model has learned."""
    n, sequences, optimizer, scheme, rate, seed, steps = cell
    module, batches = MODELS[model]
    task = Task(
        model=module.model,
        loss=module.loss,
        batches=lambda i, n, seed: batches(i, n, seed, sequences),
        optimizer=lambda parameters: OPTIMIZERS[optimizer](parameters, lr=rate),
        schedule=lambda optimizer: byte_transformer.schedule(optimizer, steps),
        evaluate=module.evaluate,
        name=model,
    )
    strategy, _, how = scheme.partition("@")
    moments, _, period = how.partition(":")
    config = PATIENT.replace(moments=moments or None)
    if period:
        config = config.replace(moments_period=int(period))
    cluster = Cluster(n, task.parameters(), STEP_S, BYTES_PER_S, LATENCY_S, config, seed=seed)
    began = time.monotonic()
    try:
        done = train(
            task,
            cluster,
            strategy=strategy,
            steps=steps,
            points=4,
        )
    except ArithmeticError as error:  # NonFiniteModelError: the rate is too high
        print(f"{scheme} at {rate:g}: {error}", file=sys.stderr)
        loss, found = math.inf, {}
    else:
        loss = done.points[-1].evaluation["held-out loss"]
        found = {
            "distance": done.points[-1].distance,
            "staleness": done.staleness_mean,
            "exchanges_per_step": done.exchanges_per_step,
            "sent_bytes": done.sent_bytes,
            "digest": done.digest,
        }
    return {
        **dict(zip(NAMES, cell, strict=True)),
        "loss": loss,
        "seconds": time.monotonic() - began,
        **found,
    }


def by_scheme(runs: Iterable[dict[str, Any]]) -> dict[Key, Losses]:
    """Return the losses by scheme, rate and seed."""
    found: dict[Key, Losses] = {}
    for one in sorted(runs, key=lambda one: (one["rate"], one["seed"])):
        key = (one["n"], one["sequences"], one["optimizer"], one["scheme"])
        found.setdefault(key, {}).setdefault(one["rate"], {})[one["seed"]] = one["loss"]
    return found


def best(losses: Losses) -> float:
    """Return the rate with the lowest mean loss."""
    return min(losses, key=lambda rate: statistics.mean(losses[rate].values()))


def difference(losses: dict[int, float], base: dict[int, float]) -> tuple[float, float]:
    """Return the mean difference of losses of equal seeds, and half of its 95 % interval."""
    apart = [losses[seed] - base[seed] for seed in losses.keys() & base.keys()]
    return mean_interval(apart)


def table(found: dict[Key, Losses]) -> str:
    """Return the table of all schemes at their best rates."""
    lines = [
        "| n | batch | optimizer | scheme | rate | held-out loss | minus synchronous |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, losses in sorted(found.items()):
        n, sequences, optimizer, scheme = key
        rate = best(losses)
        end = " (end of grid)" if rate in (min(losses), max(losses)) else ""
        base = found.get((n, sequences, optimizer, "synchronous"))
        apart = ""
        if base is not None and scheme != "synchronous":
            mean, half = difference(losses[rate], base[best(base)])
            apart = f"{mean:+.3f} ± {half:.3f}"
        shown = statistics.mean(losses[rate].values())
        lines.append(
            f"| {n} | {sequences} | {optimizer} | {scheme} | {rate:g}{end} | {shown:.3f} | {apart} |"
        )
    return "\n".join(lines)


def draw(found: dict[Key, Losses], path: Path) -> None:
    """Draw the loss over the rate, a panel for each n, batch and optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({key[:3] for key in found})
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1 + 4 * len(panels), 3.6), squeeze=False, sharey=True
    )
    for ax, panel in zip(axes[0], panels, strict=True):
        for scheme in sorted(key[3] for key in found if key[:3] == panel):
            losses = found[(*panel, scheme)]
            rates = [
                rate
                for rate in sorted(losses)
                if math.isfinite(statistics.mean(losses[rate].values()))
            ]
            middle = [statistics.mean(losses[rate].values()) for rate in rates]
            low, high = [[pick(losses[rate].values()) for rate in rates] for pick in (min, max)]
            line = ax.plot(rates, middle, marker="o", label=scheme)[0]
            ax.fill_between(rates, low, high, color=line.get_color(), alpha=0.2)
        n, sequences, optimizer = panel
        ax.set(
            xscale="log", xlabel="learning rate", title=f"{optimizer}, n = {n}, batch {sequences}"
        )
        shown = sorted({rate for key, its in found.items() if key[:3] == panel for rate in its})
        ax.set_xticks(shown, [f"{rate:g}" for rate in shown])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out loss of the mean model")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train what is missing, then print and draw."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / (
        "runs.json" if options.model == "transformer" else f"{options.model}.json"
    )
    if options.model == "acoustic" and not options.table:
        prepare_data.named("easy", quick=False)
    grid = itertools.product(
        options.n,
        options.batch,
        options.optimizers,
        options.schemes,
        options.rates,
        range(options.seeds),
        [options.steps],
    )
    cells = [] if options.table else list(grid)
    train_one = functools.partial(trained, options.model)
    runs = perform(file, cells, NAMES, train_one, options.jobs)
    if not runs:
        raise Problem(f"{file} holds no runs. Leave --table out.")
    found = by_scheme(one for one in runs if one["steps"] == options.steps)
    print(table(found))
    draw(found, file.with_name("moments.png" if file.stem == "runs" else f"{file.stem}.png"))


if __name__ == "__main__":
    run(main)
