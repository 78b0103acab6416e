"""Compares all averaging strategies on the easy speech task, with the data and settings of `make demo`.

    python -m lab.studies.compare           every strategy, seeds 0 1 2
    python -m lab.studies.compare --schemes random_pairs synchronous --seeds 0
    python -m lab.studies.compare --quick   a tiny corpus, one epoch, as a test

It trains 4 super learners of 1 learner, unlike the demo's 2 of 2, so that averaging matters more. Learning
rate, batch and epochs are the demo's for every strategy; none was tuned. One training runs at a time;
finished runs are kept, and strategies that this version of the library does not know are skipped.
Written to --out: result.json, table.md, heldout.png and all runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.acoustic_model import prepare_data
from examples.acoustic_model.speech import comparison, journal, launch
from examples.acoustic_model.speech.problem import Problem, drop_repeats, new_parser, run, within
from lab.studies import figure, sweep

LEARNERS = 4
ENVIRONMENT = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
BASELINE = "synchronous"
FAMILIES = {
    "Free running": (
        "random_pairs",
        "fixed_ring",
        "random_ring",
        "a2cid2+fixed_ring",
        "gossip_pga:period=50+random_pairs",
    ),
    "In step": (
        "delay_by_one",
        "delayed_gradients",
        "synchronous_gossip:order=awc+fixed_ring",
        "synchronous_gossip:order=atc+random_pairs",
    ),
    "Periodic": (
        "periodic_averaging:period=10",
        "periodic_averaging:period=10,block_momentum=0.75",
        "periodic_averaging:period=10,block_momentum=0.75,nesterov=1",
        "noloco:period=10",
    ),
}
SCHEMES = (BASELINE, *(spec for family in FAMILIES.values() for spec in family))
OTHERS = "Others"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--schemes",
        nargs="+",
        default=list(SCHEMES),
        metavar="SPEC",
        help="averaging strategies (default: all)",
    )
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="training seeds (default: 0 1 2)")
    add("--epochs", type=int, default=6)
    add("--quick", action="store_true", help="tiny corpus and one epoch, as a test")
    add("--out", type=Path, help="folder (default: out/compare, or out/compare-quick)")
    options = parser.parse_args(argv)
    for seed in options.seeds:
        within("--seeds", seed, 0, 2**31 - 1)
    within("--epochs", options.epochs, 1, 10_000)
    options.epochs = 1 if options.quick else options.epochs
    options.out = options.out or Path("out") / ("compare" + "-quick" * options.quick)
    drop_repeats(options, "seeds", "schemes")
    return options


def training(scheme: str, seed: int, epochs: int) -> launch.Training:
    """Return the training of a scheme with a seed; sweep.placed() chooses its folder."""
    return launch.Training(
        scheme,
        scheme,
        seed,
        Path(),
        learners=1 if scheme == "single" else LEARNERS,
        options=("--epochs", str(epochs)),
        variables=ENVIRONMENT,
    )


def train_and_decode(one: launch.Training, data: Path) -> dict:
    """Train and decode one run; return its held-out losses and its word errors."""
    launch.train(one, data)
    return {
        "curve": journal.read(one.folder / "heldout.jsonl"),
        "decoded": launch.decode(one, data),
    }


def complete(outcomes: list[sweep.Outcome]) -> list[sweep.Outcome]:
    """Return the runs of schemes without a failed run, so that every mean is over the same seeds."""
    failed = {one.run.scheme for one in outcomes if one.record is None}
    return [one for one in outcomes if one.run.scheme not in failed]


def results(outcomes: list[sweep.Outcome]) -> dict:
    """Return word error rates, held-out losses, and differences from the baseline, by scheme."""
    runs = [one.run for one in outcomes]
    decoded = [one.record["decoded"] for one in outcomes]
    found = comparison.summary(runs, decoded, [one.record["curve"] for one in outcomes])
    schemes = list(found["wer"])
    found["heldout_by_seed"] = {
        scheme: [outcomes[i].record["curve"][-1]["heldout_loss"] for i in chosen]
        for scheme, chosen in comparison.by_scheme(runs)
    }
    found["minus_baseline"] = {
        scheme: comparison.difference(runs, decoded, scheme, BASELINE)
        for scheme in schemes
        if BASELINE in schemes and scheme != BASELINE
    }
    return found


def table(result: dict) -> str:
    """Return the results as a Markdown table with one row per scheme."""
    lines = [
        f"| scheme | WER % | 95 % interval | by seed | minus {BASELINE} | held-out loss | min to max |"
        " training s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(result, scheme) for scheme in result["wer"]]
    return "\n".join(lines)


def _row(result: dict, scheme: str) -> str:
    low, high = (100 * end for end in result["wer_interval"][scheme])
    seeds = ", ".join(f"{100 * wer:.1f}" for wer in result["wer_by_seed"][scheme])
    losses = result["heldout_by_seed"][scheme]
    cells = (
        f"`{scheme}`",
        f"{100 * result['wer'][scheme]:.1f}",
        f"{low:.1f} to {high:.1f}",
        seeds,
        _difference(result["minus_baseline"].get(scheme)),
        f"{result['heldout'][scheme]:.3f}",
        f"{min(losses):.3f} to {max(losses):.3f}",
        f"{result['seconds'][scheme]:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _difference(found: dict | None) -> str:
    if found is None:
        return ""
    points, low, high = (100 * found[key] for key in ("difference", "low", "high"))
    return f"{points:+.1f} ({low:+.1f} to {high:+.1f})"


def notes(result: dict, failed: list[str], skipped: dict[str, str]) -> list[str]:
    """Return the notes below the table: task, seeds, intervals, failed and skipped schemes."""
    lines = [
        f"{result['task']}; {LEARNERS} learners as {LEARNERS} super learners of 1; "
        f"{result['epochs']} epochs; seeds {' '.join(map(str, result['seeds']))}. The interval and "
        "the difference (paired) are over utterances, with the mean of the seeds' errors. Training "
        "times are of learners that share cores, and of whatever else ran there.",
    ]
    lines += [f"Failed, not in the table: {line}" for line in failed]
    lines += [f"Skipped, not known to this version: `{spec}`" for spec in skipped]
    return lines


def panels(schemes: list[str]) -> dict[str, list[str]]:
    """Return the schemes of each panel of the figure, by title; every panel also shows the baseline."""
    found = {
        title: [scheme for scheme in schemes if scheme in family]
        for title, family in FAMILIES.items()
    }
    listed = {BASELINE, *(scheme for family in FAMILIES.values() for scheme in family)}
    found[OTHERS] = [scheme for scheme in schemes if scheme not in listed]
    return {title: chosen for title, chosen in found.items() if chosen} or {"": []}


def draw(outcomes: list[sweep.Outcome], title: str, path: Path) -> None:
    """Draw held-out loss over samples, in one panel per family of schemes."""
    runs = [one.run for one in outcomes]
    curves = {
        scheme: [outcomes[i].record["curve"] for i in chosen]
        for scheme, chosen in comparison.by_scheme(runs)
    }
    figure.draw_families(curves, panels(list(curves)), BASELINE, title, path)


def main() -> None:
    """Prepare the data, train and decode every run, write the comparison."""
    options = arguments()
    launch.check([*launch.MODULES, "horovod", "hvd_adpsgd"], launcher=True)
    schemes, skipped = sweep.known(options.schemes)
    for spec, why in skipped.items():
        print(f"skipped: {spec}: {why}", flush=True)
    data, what = prepare_data.named("easy", options.quick)
    runs = [
        sweep.placed(training(scheme, seed, options.epochs), options.out / "runs", data)
        for seed in options.seeds
        for scheme in schemes
    ]
    outcomes, failed = sweep.perform(
        runs, options.out / "runs", data, lambda one: train_and_decode(one, data)
    )
    finished = complete(outcomes)
    if not finished:
        raise Problem("no scheme was trained with all seeds; the lines above say why")
    result = results(finished)
    result |= {"seeds": options.seeds, "task": what, "epochs": options.epochs}
    result |= {"learners": LEARNERS, "super_learners": LEARNERS, "versions": launch.versions()}
    result |= {"failed": failed, "skipped": skipped}
    text = "\n\n".join([table(result), *notes(result, failed, skipped)])
    draw(finished, f"Held-out loss: {what}", options.out / "heldout.png")
    sweep.publish(options.out, result, text, "heldout.png", failed)


if __name__ == "__main__":
    run(main)
