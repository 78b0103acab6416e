"""Compares asynchronous training, synchronous training and one learner on synthesised speech.

    python -m examples.acoustic_model.demo                 the easy task, one seed, minutes on two cores
    python -m examples.acoustic_model.demo --seeds 0 1 2   three trainings per scheme
    python -m examples.acoustic_model.demo --hard          58 words in heavy noise

Three schemes see the same samples: H-ADPSGD (4 learners in 2 super learners) and SSGD under
`horovodrun -np 4`, and one learner alone. Written to --out: result.json, heldout.png and all runs.
HOROVODRUN_ARGS adds arguments to horovodrun.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from examples.acoustic_model import prepare_data
from examples.acoustic_model.speech import comparison, figure, journal, launch
from examples.acoustic_model.speech.problem import drop_repeats, new_parser, run, within

LEARNERS, SUPER_LEARNER = 4, 2
STRATEGY = {"single": "single", "ssgd": "ssgd", "hadpsgd": "random-pairs"}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the script.

    Raises:
        Problem: if an option is out of range.
    """
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0], help="seeds of the trainings (default: 0)")
    add("--schemes", choices=tuple(STRATEGY), nargs="+", default=list(STRATEGY))
    add("--hard", action="store_true", help="58 words, SNR 0 to 20 dB, instead of the easy task")
    add("--quick", action="store_true", help="tiny corpus and one epoch, as a test")
    add("--epochs", type=int, default=6)
    add("--out", type=Path, default=Path("out/demo"))
    add("--data", type=Path, help="folder of the speech (default: out/speech/TASK)")
    add("--resume", action="store_true", help="keep finished runs, continue interrupted ones")
    options = parser.parse_args(argv)
    for seed in options.seeds:
        within("--seeds", seed, 0, 2**31 - 1)
    within("--epochs", options.epochs, 1, 10_000)
    options.epochs = 1 if options.quick else options.epochs
    drop_repeats(options, "seeds", "schemes")
    return options


def check(schemes: list[str]) -> None:
    """Check that all packages and the launcher are installed, before minutes of training.

    Raises:
        Problem: if a package or the launcher is missing.
    """
    launched = set(schemes) != {"single"}
    ours = ["horovod"] * launched + ["hvd_adpsgd"] * ("hadpsgd" in schemes)
    launch.check([*launch.MODULES, *ours], launched)


def training(scheme: str, seed: int, options: argparse.Namespace) -> launch.Training:
    """Return the training of a scheme with a seed."""
    ours = scheme == "hadpsgd"
    return launch.Training(
        scheme,
        STRATEGY[scheme],
        seed,
        options.out / "runs" / f"{scheme}-{seed}",
        learners=1 if scheme == "single" else LEARNERS,
        options=("--epochs", str(options.epochs)),
        variables={"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(SUPER_LEARNER)} if ours else {},
    )


def train(one: launch.Training, data: Path, resume: bool) -> None:
    """Train one model; with `resume`, skip a finished training and continue an interrupted one.

    Raises:
        Problem: if the training fails.
    """
    if resume and one.is_finished():
        print(f"-- {one.scheme}, seed {one.seed}: finished before", flush=True)
        return
    print(f"-- {one.scheme}, seed {one.seed}", flush=True)
    launch.train(one, data, resume)


def differences(runs: list[launch.Training], decoded: list[dict]) -> dict:
    """Return the paired comparisons of H-ADPSGD with each other scheme on the same utterances."""
    schemes = dict.fromkeys(one.scheme for one in runs)
    if "hadpsgd" not in schemes:
        return {}
    return {
        f"hadpsgd-{scheme}": comparison.difference(runs, decoded, "hadpsgd", scheme)
        for scheme in schemes
        if scheme != "hadpsgd"
    }


def table(result: dict) -> str:
    """Return a table of word error rate, held-out loss and training time by scheme, and the differences."""
    lines = [f"{'':10}{'WER %':>7}  {'95 % interval':>14}  {'held-out':>8}  {'training s':>10}"]
    for scheme, wer in result["wer"].items():
        low, high = result["wer_interval"][scheme]
        lines.append(
            f"{scheme:10}{100 * wer:7.1f}  {100 * low:6.1f} to {100 * high:4.1f}  "
            f"{result['heldout'][scheme]:8.3f}  {result['seconds'][scheme]:10.1f}"
        )
    for pair, found in result["differences"].items():
        difference, low, high = (100 * found[key] for key in ("difference", "low", "high"))
        lines.append(
            f"{pair.replace('-', ' minus ')}: {difference:+.1f} ({low:+.1f} to {high:+.1f})"
        )
    return "\n".join(lines)


def main() -> None:
    """Prepare the data, train and decode every run, write and print the comparison."""
    options = arguments()
    check(options.schemes)
    began = time.perf_counter()
    task = "hard" if options.hard else "easy"
    data, what = prepare_data.named(task, options.quick, options.data)
    prepared = time.perf_counter()
    runs = [training(scheme, seed, options) for seed in options.seeds for scheme in options.schemes]
    for one in runs:
        train(one, data, options.resume)
    trained = time.perf_counter()
    decoded = [launch.decode(one, data) for one in runs]
    curves = [journal.read(one.folder / "heldout.jsonl") for one in runs]
    result = comparison.summary(runs, decoded, curves)
    result["differences"] = differences(runs, decoded)
    result |= {"seeds": options.seeds, "task": what, "epochs": options.epochs}
    result["versions"] = launch.versions()
    result["seconds"] |= {
        "prepare": prepared - began,
        "train": trained - prepared,
        "decode": time.perf_counter() - trained,
        "total": time.perf_counter() - began,
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    by_scheme = {
        scheme: [curves[i] for i in chosen] for scheme, chosen in comparison.by_scheme(runs)
    }
    figure.draw(by_scheme, f"Held-out loss: {what}", options.out / "heldout.png")
    print(table(result))
    print(
        f"{options.out}/result.json, {options.out}/heldout.png; {result['seconds']['total']:.0f} s"
    )


if __name__ == "__main__":
    run(main)
