"""The papers' claims at their numbers of learners, in virtual time, on the acoustic model with plain SGD.

    python -m lab.studies.claims batch             n = 16: which batches does a strategy tolerate?
    python -m lab.studies.claims batch --n 32 --rates 2 --warm-ups papers
    python -m lab.studies.claims straggler         one of 16 learners is 2 to 100 times slower
    python -m lab.studies.claims batch --table     what --out holds, once more

batch: the held-out loss of the mean model after six epochs, for each strategy, total batch, base rate (of a
batch of 64; the rate is in proportion to the batch) and warm-up. `synchronous` is one learner with the whole
batch: its mean gradient is over the same samples. Bold: within 5 % of the best loss of `synchronous` at the
smallest batch. straggler: the time that equal samples take, as a multiple of
that of `synchronous` without a slow learner, and the loss then. A loss that is no number is
`diverged`.

Written to --out: KIND.json (all runs) and KIND.png. A second call trains only what is missing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hvd_adpsgd_lab.learning import train
from hvd_adpsgd_lab.simulation.planner import Cluster

from examples.acoustic_model import prepare_data, virtual_time
from examples.acoustic_model.speech import figure
from examples.acoustic_model.speech.problem import Problem, drop_repeats, new_parser, run, within
from hvd_adpsgd.errors import NonFiniteModelError
from lab.studies.runs import Cell, Run, perform

BASELINE = "synchronous"
SCHEMES = (BASELINE, "fixed_ring", "random_ring", "random_pairs", "delay_by_one")
WARM_UPS = {"none": False, "papers": True}
TOLERANCE = 0.05
STEP_S, BYTES_PER_S, LATENCY_S = 0.1, 1.25e8, 50e-6
SEEDS_APART = 1000  # an epoch has the seed of the run plus its number

NAMES = ("n", "scheme", "batch", "rate", "warm_up", "slow", "seed")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("kind", choices=("batch", "straggler"))
    add("--n", type=int, nargs="+", default=[16], help="numbers of super learners")
    add("--schemes", nargs="+", default=list(SCHEMES))
    add("--batches", type=int, nargs="+", default=[256, 512, 1024, 2048], help="of all together")
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[1.0, 2.0, 4.0],
        help="base rates, at a batch of 64",
    )
    add("--warm-ups", nargs="+", choices=tuple(WARM_UPS), default=list(WARM_UPS))
    add(
        "--slow", type=float, nargs="+", default=[1, 2, 10, 100], help="factors of the slow learner"
    )
    add("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    add("--jobs", type=int, default=prepare_data.usable_cores(), help="runs at a time")
    add("--out", type=Path, default=Path("out/claims"))
    add("--table", action="store_true", help="print and draw what --out holds; train nothing")
    options = parser.parse_args(argv)
    drop_repeats(options, "n", "schemes", "batches", "rates", "warm_ups", "slow")
    bounds = {"n": (2, 4096), "batches": (2, 2**20), "rates": (1e-9, 1e3), "slow": (1, 1e6)}
    for name, (low, high) in bounds.items():
        for value in getattr(options, name):
            within(f"--{name}", value, low, high)
    if options.kind == "batch" and max(options.n) > min(options.batches):
        raise Problem(
            f"--n {max(options.n)} with --batches {min(options.batches)}: each learner needs a segment; give "
            "larger batches"
        )
    within("--seeds", options.seeds, 1, 100)
    within("--jobs", options.jobs, 1, 1024)
    return options


# ---- runs ---------------------------------------------------------------------------------------


def trained(kind: str, cell: Cell) -> Run:
    """Train once; return what it was, its virtual time, and what the mean model has learned."""
    n, scheme, batch, rate, warm_up, slow, seed = cell
    recipe = virtual_time.Recipe(batch, rate, WARM_UPS[warm_up])
    alone = kind == "batch" and scheme == BASELINE
    cluster = Cluster(
        1 if alone else n,
        1e6,
        STEP_S,
        BYTES_PER_S,
        LATENCY_S,
        seed=SEEDS_APART * seed,
        slow=int(slow > 1),
        slow_factor=slow,
    )
    began = time.monotonic()
    found = {"time_s": math.nan, "loss": math.inf, "curve": [], "distance": math.nan}
    try:
        done = train(
            virtual_time.task(recipe),
            cluster,
            strategy=scheme,
            steps=recipe.steps(),
            points=2 if kind == "batch" else 20,
        )
    except NonFiniteModelError:
        pass
    else:
        last = done.points[-1]
        found = {
            "time_s": last.time_s,
            "loss": last.evaluation["held-out loss"],
            "curve": [(p.time_s, p.samples, p.evaluation["held-out loss"]) for p in done.points],
            "distance": last.distance,
        }
    return {
        **dict(zip(NAMES, cell, strict=True)),
        **found,
        "seconds": time.monotonic() - began,
    }


def grid(options: argparse.Namespace) -> list[Cell]:
    """Return all cells; those of the same seed together, so that a table is whole early."""
    slow = [1.0] if options.kind == "batch" else options.slow
    cells = itertools.product(
        range(options.seeds), options.n, options.schemes, options.batches, options.rates, options.warm_ups,
        slow,
    )  # fmt: skip
    return [(*cell, seed) for seed, *cell in cells]


# ---- tables -------------------------------------------------------------------------------------


def means(runs: Iterable[Run], value: str, *names: str) -> dict[Cell, list[float]]:
    """Return the values of all seeds, by the values of `names`."""
    found: dict[Cell, list[float]] = {}
    for one in sorted(runs, key=lambda one: one["seed"]):
        found.setdefault(tuple(one[name] for name in names), []).append(one[value])
    return found


def shown(losses: list[float], bound: float = -math.inf) -> str:
    """Return the mean of losses for a table, bold if it is within the bound."""
    if not all(map(math.isfinite, losses)):
        return "diverged"
    text = f"{statistics.mean(losses):.3f}"
    return f"**{text}**" if statistics.mean(losses) <= bound else text


def tolerated(runs: list[Run]) -> float:
    """Return the largest loss within 5 % of the baseline's best at the smallest batch; nan if it has none."""
    least = min(one["batch"] for one in runs)
    its = [one for one in runs if one["scheme"] == BASELINE and one["batch"] == least]
    losses = [
        statistics.mean(values) for values in means(its, "loss", "n", "rate", "warm_up").values()
    ]
    return min(filter(math.isfinite, losses), default=math.nan) * (1 + TOLERANCE)


def batch_table(runs: list[Run]) -> str:
    """Return the surface: loss by strategy, rate and warm-up, and by batch."""
    found = means(runs, "loss", "n", "scheme", "rate", "warm_up", "batch")
    batches = sorted({key[4] for key in found})
    bound = tolerated(runs)
    lines = [
        "| n | scheme | base rate | warm-up | " + " | ".join(map(str, batches)) + " |",
        "|---|---|---|---|" + "---|" * len(batches),
    ]
    for row in sorted({key[:4] for key in found}, key=lambda row: (row[0], row[3], row[2], row[1])):
        cells = [shown(found[(*row, b)], bound) if (*row, b) in found else "" for b in batches]
        n, scheme, rate, warm_up = row
        lines.append(f"| {n} | {scheme} | {rate:g} | {warm_up} | {' | '.join(cells)} |")
    return "\n".join(lines)


def straggler_table(runs: list[Run]) -> str:
    """Return time, as a multiple of `synchronous` without a slow learner, and loss, by strategy."""
    losses = means(runs, "loss", "n", "scheme", "batch", "rate", "warm_up", "slow")
    times = means(runs, "time_s", "n", "scheme", "batch", "rate", "warm_up", "slow")
    factors = sorted({key[5] for key in losses})
    lines = [
        "| n | scheme | batch | base rate | warm-up | "
        + " | ".join(f"{f:g} times slower" for f in factors)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(factors),
    ]
    for row in sorted({key[:5] for key in losses}):
        n, scheme, batch, rate, warm_up = row
        base = times.get((n, BASELINE, *row[2:], 1.0))
        cells = []
        for factor in factors:
            its = losses.get((*row, factor))
            if its is None:
                cells.append("")
                continue
            took = statistics.mean(times[(*row, factor)])
            ratio = f"{took / statistics.mean(base):.2f}" if base else f"{took:.0f} s"
            cells.append(f"{ratio}, {shown(its)}")
        lines.append(f"| {n} | {scheme} | {batch} | {rate:g} | {warm_up} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_batches(runs: list[Run], path: Path) -> None:
    """Draw the loss over the batch: a panel for each rate and warm-up."""
    found = means(runs, "loss", "n", "warm_up", "rate", "scheme", "batch")
    panels: dict[str, dict[str, dict[int, list[float]]]] = {}
    for n, warm_up, rate, scheme, batch in sorted(found):
        title = f"n = {n}, base rate {rate:g}, warm-up: {warm_up}"
        row = panels.setdefault(title, {}).setdefault(scheme, {})
        row[batch] = found[(n, warm_up, rate, scheme, batch)]
    order = {scheme: place for place, scheme in enumerate(SCHEMES)}
    panels = {
        title: dict(sorted(rows.items(), key=lambda item: order.get(item[0], len(order))))
        for title, rows in panels.items()
    }
    figure.draw_batches(panels, tolerated(runs), "Acoustic model, plain SGD", path)


def draw_straggler(runs: list[Run], path: Path) -> None:
    """Draw the loss over virtual time: a panel for each factor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    factors = sorted({one["slow"] for one in runs})
    figure_, axes = plt.subplots(
        1, len(factors), figsize=(1 + 3.4 * len(factors), 3.8), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    colours = {scheme: f"C{place}" for place, scheme in enumerate(SCHEMES)}
    for axis, factor in zip(axes[0], factors, strict=True):
        for one in (one for one in runs if one["slow"] == factor):
            first = one["seed"] == 0
            label = one["scheme"] if first else None
            times, _, losses = zip(*one["curve"], strict=True) if one["curve"] else ((), (), ())
            colour = colours.get(one["scheme"], "C9")
            axis.plot(times, losses, color=colour, alpha=1 if first else 0.3, label=label)
        axis.set(
            title=f"one learner {factor:g} times slower", xlabel="virtual time in s", xscale="log"
        )
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out loss of the mean model")
    axes[0][0].legend()
    figure_.savefig(path, dpi=120)
    plt.close(figure_)


KINDS: dict[str, tuple[Callable[..., str], Callable[..., None]]] = {
    "batch": (batch_table, draw_batches),
    "straggler": (straggler_table, draw_straggler),
}


def main() -> None:
    """Prepare the data, train what is missing, then print and draw."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        prepare_data.named("easy", quick=False)
    file, train_one = options.out / f"{options.kind}.json", functools.partial(trained, options.kind)
    runs = perform(file, [] if options.table else grid(options), NAMES, train_one, options.jobs)
    if not runs:
        raise Problem(f"{options.out} holds no runs. Leave --table out.")
    table, draw = KINDS[options.kind]
    print(table(runs))
    draw(runs, options.out / f"{options.kind}.png")


if __name__ == "__main__":
    run(main)
