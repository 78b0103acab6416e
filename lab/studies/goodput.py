"""Goodput: what failures leave of training, by strategy and failure rate, in virtual time.

    python -m lab.studies.goodput                       128 super learners, 20 minutes; two hours
    python -m lab.studies.goodput --n 32 --seeds 3
    python -m lab.studies.goodput --table               what --out holds, once more

Super learners fail by a Poisson process, each --rates times per hour, and a replacement is there --replace
seconds after each failure. random_pairs and delay_by_one run the library's protocol: engines that notice
failures, and replacements that are admitted one after the other. diloco averages with those that are there (a
quorum of half) every 50 steps, and a replacement waits for the next mean. synchronous writes checkpoints at
Young's interval (30 s each), and restarts after each failure within 300 s, replacement included.

Printed for each rate and scheme: the samples that are in the model at the end, as a share of those of n super
learners without failures, waits and averaging; the same of the time in which a super learner is there at all,
T / (T + --replace) with T the mean time between its failures; and the held-out loss.
Written to --out: goodput.png, and all runs. A second call trains only what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvd_adpsgd_lab.learning import Task, train
from hvd_adpsgd_lab.simulation.planner import Cluster

from examples.acoustic_model.speech.problem import Problem, drop_repeats, new_parser, run, within
from lab.studies.keeper import Job, perform_jobs

Run = dict[str, Any]

SCHEMES = ("random_pairs", "delay_by_one", "diloco:period=50,quorum=0.5", "synchronous")
PARAMETERS, BYTES_PER_S, LATENCY_S = 1e7, 1.25e9, 50e-6
POINTS = 40


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--n", type=int, default=128, help="super learners (default: 128)")
    add(
        "--rates", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="failures of each per hour"
    )
    add("--schemes", nargs="+", default=list(SCHEMES))
    add("--minutes", type=float, default=20.0, help="virtual minutes (default: 20)")
    add("--step", type=float, default=1.0, help="seconds of a step (default: 1)")
    add("--replace", type=float, default=60.0, help="seconds to a replacement (default: 60)")
    add("--task", default="examples/virtual_time.py", metavar="FILE.py")
    add("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    add("--out", type=Path, default=Path("out/goodput"))
    add("--table", action="store_true", help="print and draw what --out holds; train nothing")
    options = parser.parse_args(argv)
    drop_repeats(options, "rates", "schemes")
    within("--n", options.n, 2, 4096)
    for rate in options.rates:
        within("--rates", rate, 0, 1e4)
    for name, low, high in (("minutes", 1e-2, 1e5), ("step", 1e-3, 1e4), ("replace", 0, 1e6)):
        within(f"--{name}", getattr(options, name), low, high)
    within("--seeds", options.seeds, 1, 100)
    return options


def trained(told: Run) -> Run:
    """Train once; return the samples that are in the model, and the curve of the loss.

    Args:
        told: n, scheme, rate, seed, minutes, step, replace and task.
    """
    cluster = Cluster(
        told["n"],
        PARAMETERS,
        told["step"],
        BYTES_PER_S,
        LATENCY_S,
        minutes=told["minutes"],
        failures_per_hour=told["rate"],
        seed=told["seed"],
    )
    done = train(
        Task.from_file(told["task"]), cluster, strategy=told["scheme"], points=POINTS,
        replace_s=told["replace"],
    )  # fmt: skip
    last = done.points[-1]
    batch = max(p.samples / max(p.steps, 1) for p in done.points)  # where none is lost yet
    most = told["n"] * 60 * told["minutes"] / told["step"] * batch
    return {
        "kept": last.samples / most if most else 0.0,
        "loss": last.loss,
        "curve": [(p.time_s, p.samples, p.loss, p.training) for p in done.points],
        "failed": done.failed,
        "joined": done.joined,
    }


def job(told: Run) -> Job:
    """Return the run of a scheme at a rate with a seed."""
    name = f"{told['scheme']}, {told['rate']:g} per hour, seed {told['seed']}"
    return Job(name, told, lambda _: trained(told))


def there(one: Run) -> float:
    """Return the share of time in which a super learner is there, between failures and replacements."""
    between_s = 3600 / one["rate"] if one["rate"] else float("inf")
    return 1.0 if one["rate"] == 0 else between_s / (between_s + one["replace"])


def by_scheme(runs: Iterable[Run]) -> dict[tuple[float, str], list[Run]]:
    """Return the runs by rate and scheme, in the order of their seeds."""
    found: dict[tuple[float, str], list[Run]] = {}
    for one in sorted(runs, key=lambda one: (one["rate"], one["seed"])):
        found.setdefault((one["rate"], one["scheme"]), []).append(one)
    return found


def table(runs: list[Run]) -> str:
    """Return a row for each rate and scheme; mean over seeds."""
    lines = [
        "| failures per hour | scheme | failed, replaced | samples of all | of those there | loss |",
        "|---|---|---|---|---|---|",
    ]
    for (rate, scheme), its in by_scheme(runs).items():
        failed, joined, kept, loss = (
            statistics.mean(one[name] for one in its)
            for name in ("failed", "joined", "kept", "loss")
        )
        of_there = statistics.mean(one["kept"] / there(one) for one in its)
        lines.append(
            f"| {rate:g} | {scheme} | {failed:.0f}, {joined:.0f} | {100 * kept:.1f} % "
            f"| {100 * of_there:.1f} % | {loss:.3f} |"
        )
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    """Draw samples and loss over virtual time: a column for each rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = by_scheme(runs)
    rates = sorted({rate for rate, _ in found})
    schemes = list(dict.fromkeys([*SCHEMES, *sorted({scheme for _, scheme in found})]))
    figure, axes = plt.subplots(
        2, len(rates), figsize=(1.5 + 3.6 * len(rates), 6), squeeze=False, sharey="row", sharex=True,
        layout="constrained",
    )  # fmt: skip
    for column, rate in enumerate(rates):
        above, below = axes[:, column]
        for (its_rate, scheme), its in found.items():
            if its_rate != rate:
                continue
            colour, first = f"C{schemes.index(scheme)}", its[0]
            minutes, samples, losses, _ = zip(*first["curve"], strict=True)
            minutes = [second / 60 for second in minutes]
            whole = samples[-1] / first["kept"] if first["kept"] else 1
            label = scheme.partition(":")[0]
            above.plot(minutes, [100 * s / whole for s in samples], color=colour, label=label)
            below.plot(minutes, losses, color=colour)
        above.set_title(f"{rate:g} failures per hour of each")
        below.set_xlabel("virtual minutes")
        below.set_yscale("log")
        for axis in (above, below):
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("samples in the model, % of all")
    axes[1][0].set_ylabel("loss of the mean model")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train what is missing, then print and draw."""
    options = arguments()
    same = {name: getattr(options, name) for name in ("n", "minutes", "step", "replace", "task")}
    wanted = [
        {**same, "seed": seed, "rate": rate, "scheme": scheme}
        for seed, rate, scheme in itertools.product(
            range(options.seeds), options.rates, options.schemes
        )
    ]
    records, failed = perform_jobs([job(told) for told in wanted], options.out, options.table)
    runs = [told | record for told, record in zip(wanted, records, strict=True) if record]
    if not runs:
        raise Problem(f"{options.out} holds no such runs. Leave --table out.")
    print(table(runs))
    draw(runs, options.out / "goodput.png")
    if failed:
        raise Problem(f"{len(failed)} runs failed; start again to repeat them")


if __name__ == "__main__":
    run(main)
