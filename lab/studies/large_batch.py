"""Finds the largest batch that each strategy tolerates, with a proportional learning rate, at equal epochs.

    python -m lab.studies.large_batch             with the confirming seeds 1 2 3
    python -m lab.studies.large_batch --seeds 0   with the exploring seed
    python -m lab.studies.large_batch --schemes synchronous random_ring --warmups none

Batches are B0 times 1, 2, 4, 8, 16, and rates are R0 times the same factor, without and with the papers'
warm-up (linear from R0 over 5/8 of the epochs). After 5/8 of the epochs the rate falls by 1/sqrt(2) per
epoch in both cases. The result of a strategy is the largest batch up to which the held-out loss stays within
5 % of the baseline, `synchronous` at B0. A training that diverges has an infinite loss. The optimizer is
plain SGD, as in the papers. Finished runs are kept.

To save time, the model is small, training is short, and only the loss per frame is measured, without
decoding. For the same reason `synchronous` is one learner with the whole batch: its mean gradient is over the
same samples, summed in another order. On seed 0 at B0 the weights differ by less than 1e-6 of their norm for
80 steps; later the rounding differences grow, as between any two orders of summation.
Written to --out: result.json, table.md, large_batch.png and all runs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from examples.acoustic_model import prepare_data
from examples.acoustic_model.speech import journal, launch
from examples.acoustic_model.speech.problem import Problem, drop_repeats, new_parser, run, within
from lab.studies import figure, sweep

# Chosen before any confirming seed was run. R0 comes from trainings of one learner on seed 0 with batch 64:
#
#     python -m examples.acoustic_model.train --strategy single --layers 1 --batch 64 --lr RATE \
#         --warmup 0 --momentum 0 --epochs 6 --seed 0
#
#     RATE             0.25    0.5     1       2       4       8
#     held-out loss    2.297   1.696   1.348   1.202   1.149   1.192
#
# R0 is the smallest rate whose loss is within 5 % of the best, because the best rate leaves no room for
# scaling it. Results at larger batches had no part in the choice. With this size and number of epochs a
# training takes half a minute on two cores.
SETTINGS = {
    "task": "easy",
    "layers": 1,
    "hidden": 64,
    "epochs": 6,
    "base_batch": 64,  # B0: segments of 21 frames, of all learners together
    "base_rate": 2.0,  # R0
    "factors": (1, 2, 4, 8, 16),
    "tolerance": 0.05,
    "learners": 4,  # as 4 super learners of 1
}
EXPLORING, CONFIRMING = [0], [1, 2, 3]
BASELINE = "synchronous"
SCHEMES = (BASELINE, "fixed_ring", "random_ring", "delay_by_one")
WARMUPS = {"none": ("--warmup", "0"), "papers": ("--schedule", "papers")}
TITLES = {"none": "without warm-up", "papers": "with the papers' warm-up"}
ENVIRONMENT = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_NONFINITE": "skip"}
DIVERGED = "diverged"

Losses = dict[int, list[float]]  # losses by batch, one per seed; inf: diverged, nan: the run failed
Found = dict[str, dict[str, Losses]]  # losses by scheme (with the baseline) and warm-up


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--schemes", nargs="+", default=list(SCHEMES), metavar="SPEC", help="(default: all four)")
    add("--warmups", nargs="+", choices=tuple(WARMUPS), default=list(WARMUPS))
    add("--factors", type=int, nargs="+", help="batches as multiples of B0 (default: 1 2 4 8 16)")
    add("--seeds", type=int, nargs="+", default=CONFIRMING, help="seeds (default: 1 2 3)")
    add("--out", type=Path, default=Path("out/large_batch"))
    options = parser.parse_args(argv)
    for seed in options.seeds:
        within("--seeds", seed, 0, 2**31 - 1)
    for factor in options.factors or []:
        within("--factors", factor, 1, 4096)
    options.factors = sorted({1, *(options.factors or SETTINGS["factors"])})
    drop_repeats(options, "seeds", "schemes", "warmups")
    options.schemes = list(dict.fromkeys([BASELINE, *options.schemes]))
    return options


def training(scheme: str, warmup: str, factor: int, seed: int) -> launch.Training:
    """Return the training of one cell of the sweep with a seed; sweep.placed() chooses its folder.

    With factor 1 the rate has no target to warm up to, so that both warm-ups give the same run.
    """
    alone = scheme == BASELINE
    learners = 1 if alone else SETTINGS["learners"]
    given = {
        "--layers": SETTINGS["layers"],
        "--hidden": SETTINGS["hidden"],
        "--epochs": SETTINGS["epochs"],
        "--batch": SETTINGS["base_batch"] * factor // learners,
        "--lr": SETTINGS["base_rate"],
        "--scale": factor,
        "--momentum": 0,
    }
    words = [str(word) for pair in given.items() for word in pair]
    words += WARMUPS[warmup if factor > 1 else "none"]
    strategy = "single" if alone else scheme
    return launch.Training(scheme, strategy, seed, Path(), learners, tuple(words), ENVIRONMENT)


def measure(one: launch.Training, data: Path) -> dict:
    """Train one run; return its held-out loss after the last epoch ("diverged" if it diverged) and its curve.

    Raises:
        Problem: if the training failed for another reason.
    """
    try:
        launch.train(one, data)
    except Problem as problem:
        curve = journal.read(one.folder / "heldout.jsonl")
        if "NonFiniteModelError" not in str(problem) and not _is_lost(curve):
            raise
        print("   diverged", flush=True)
        return {"heldout_loss": DIVERGED, "curve": curve}
    for weights in one.folder.glob("*.pt"):  # not needed: nothing is decoded
        weights.unlink()
    curve = journal.read(one.folder / "heldout.jsonl")
    return {"heldout_loss": curve[-1]["heldout_loss"], "curve": curve}


def _is_lost(curve: list[dict]) -> bool:
    return bool(curve) and curve[-1]["heldout_loss"] is None


def loss_of(record: dict | None) -> float:
    """Return a run's loss: infinite if the training diverged, NaN if it failed."""
    if record is None:
        return math.nan
    return math.inf if record["heldout_loss"] == DIVERGED else record["heldout_loss"]


def mean(losses: list[float]) -> float:
    """Return the mean loss over seeds: infinite if a run diverged, NaN if a run failed."""
    return sum(losses) / len(losses)


def largest(losses: dict[int, float], limit: float) -> int | None:
    """Return the largest batch up to which every loss is within `limit`; None if the first loss is not."""
    held = None
    for batch in sorted(losses):
        if not losses[batch] <= limit < math.inf:  # written so that a NaN ends the loop too
            break
        held = batch
    return held


def baseline(found: Found) -> list[float]:
    """Return the losses of the baseline at B0, one per seed; they are the same for every warm-up."""
    return next(iter(found[BASELINE].values()))[SETTINGS["base_batch"]]


def bound(losses: list[float]) -> float:
    """Return the largest loss that counts as equal to the baseline's."""
    return mean(losses) * (1 + SETTINGS["tolerance"])


def answers(by_batch: Losses, base: list[float]) -> dict:
    """Return the largest tolerated batch of a scheme and warm-up, by the means over seeds and seed by seed.

    Args:
        by_batch: losses of the scheme, by batch.
        base: losses of the baseline at B0, one per seed.
    """
    means = {batch: mean(losses) for batch, losses in by_batch.items()}
    by_seed = [{batch: losses[i] for batch, losses in by_batch.items()} for i in range(len(base))]
    return {
        "largest": largest(means, bound(base)),
        "by_seed": [largest(own, bound([b])) for own, b in zip(by_seed, base, strict=True)],
    }


def results(found: Found) -> dict:
    """Return the losses and the largest tolerated batches, by scheme and warm-up."""
    base = baseline(found)
    return {
        "baseline": _plain(mean(base)),
        "bound": _plain(bound(base)),
        "losses": {
            scheme: {
                warmup: {str(batch): [_plain(x) for x in losses] for batch, losses in row.items()}
                for warmup, row in rows.items()
            }
            for scheme, rows in found.items()
        },
        "largest": {
            scheme: {warmup: answers(row, base) for warmup, row in rows.items()}
            for scheme, rows in found.items()
        },
    }


def _plain(loss: float) -> float | str | None:
    """Return a loss for JSON: "diverged" if it is infinite, None for a run that failed."""
    if math.isnan(loss):
        return None
    return DIVERGED if math.isinf(loss) else loss


def table(found: Found, result: dict) -> str:
    """Return a Markdown table with a row per scheme and warm-up; losses within the bound are bold."""
    batches = sorted(next(iter(found[BASELINE].values())))
    titles = ["scheme", "warm-up", *map(str, batches), "largest within 5 %", "by seed"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    limit = bound(baseline(found))
    for scheme, rows in found.items():
        for warmup, row in rows.items():
            answer = result["largest"][scheme][warmup]
            cells = [f"`{scheme}`", warmup, *(_cell(row[batch], limit) for batch in batches)]
            cells += [str(answer["largest"] or "none")]
            cells += [", ".join(str(batch or "none") for batch in answer["by_seed"])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(losses: list[float], limit: float) -> str:
    diverged, failed = sum(map(math.isinf, losses)), sum(map(math.isnan, losses))
    if failed:
        return f"failed {failed} of {len(losses)}"
    if diverged:
        return f"diverged {diverged} of {len(losses)}"
    text = f"{mean(losses):.3f}"
    return f"**{text}**" if mean(losses) <= limit else text


def notes(
    options: argparse.Namespace, what: str, failed: list[str], skipped: list[str]
) -> list[str]:
    """Return the notes below the table: task, settings, seeds, failed and skipped schemes."""
    seeds = f"seed {' '.join(map(str, options.seeds))}"
    role = " (exploring: it chose the settings)" if set(options.seeds) & set(EXPLORING) else ""
    lines = [
        f"Held-out cross-entropy in nats per frame, mean over seeds; {what}; BLSTM of "
        f"{SETTINGS['layers']} x {SETTINGS['hidden']}, {SETTINGS['epochs']} epochs, plain SGD, "
        f"rate {SETTINGS['base_rate']:g} x batch / {SETTINGS['base_batch']}; "
        f"{SETTINGS['learners']} learners as {SETTINGS['learners']} super learners of 1 (`{BASELINE}`: "
        f"one with the whole batch); {seeds}{role}. "
        f"Bold: within 5 % of `{BASELINE}` at batch {SETTINGS['base_batch']}. Largest: the largest batch "
        "up to which all are.",
    ]
    lines += [f"Failed: {line}" for line in failed]
    lines += [f"Skipped, not known to this version: `{spec}`" for spec in skipped]
    return lines


def cells(options: argparse.Namespace, schemes: list[str]) -> list[tuple[str, str, int, int]]:
    """Return (scheme, warm-up, factor, seed) of every cell of the sweep; the baseline comes first."""
    return [
        (scheme, warmup, factor, seed)
        for seed in options.seeds
        for factor in options.factors
        for scheme in schemes
        for warmup in options.warmups
    ]


def sweep_all(
    options: argparse.Namespace, schemes: list[str], data: Path
) -> tuple[Found, list[str]]:
    """Train all runs of the sweep that are not finished.

    Returns:
        losses by scheme and warm-up, and a line on each failure.
    """
    root = options.out / "runs"
    wanted = {cell: sweep.placed(training(*cell), root, data) for cell in cells(options, schemes)}
    runs = list({one.folder: one for one in wanted.values()}.values())
    outcomes, failed = sweep.perform(runs, root, data, lambda one: measure(one, data))
    records = {one.run.folder: one.record for one in outcomes}
    found: Found = {scheme: {warmup: {} for warmup in options.warmups} for scheme in schemes}
    for (scheme, warmup, factor, _), one in wanted.items():
        losses = found[scheme][warmup].setdefault(SETTINGS["base_batch"] * factor, [])
        losses.append(loss_of(records[one.folder]))
    return found, failed


def main() -> None:
    """Prepare the data, train the sweep, write the results."""
    options = arguments()
    launch.check([*launch.MODULES, "horovod", "hvd_adpsgd"], launcher=True)
    schemes, skipped = sweep.known(options.schemes)
    for spec, why in skipped.items():
        print(f"skipped: {spec}: {why}", flush=True)
    data, what = prepare_data.named(SETTINGS["task"], quick=False)
    found, failed = sweep_all(options, schemes, data)
    result = results(found)
    text = "\n\n".join([table(found, result), *notes(options, what, failed, list(skipped))])
    result |= {"settings": SETTINGS, "seeds": options.seeds}
    result |= {"failed": failed, "skipped": skipped, "versions": launch.versions()}
    titled = {TITLES[warmup]: {s: found[s][warmup] for s in schemes} for warmup in options.warmups}
    title = f"Learning rate proportional to the batch: {what}"
    figure.draw_batches(titled, bound(baseline(found)), title, options.out / "large_batch.png")
    sweep.publish(options.out, result, text, "large_batch.png", failed)


if __name__ == "__main__":
    run(main)
