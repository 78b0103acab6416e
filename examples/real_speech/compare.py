"""Compares plain Horovod and H-ADPSGD on speech of people: word and letter errors at equal samples.

    python -m examples.real_speech.compare                       Czech, three seeds: 40 minutes on two cores
    python -m examples.real_speech.compare --seeds 0 --epochs 20
    python -m examples.real_speech.compare --by-speaker          learners' data are sorted by speaker

Four learners; with H-ADPSGD 4 super learners of one. Trainings take turns. Written to --out: result.json, all
runs. --schemes takes any averaging spec of the library, too. HOROVODRUN_ARGS adds arguments to horovodrun.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from examples.acoustic_model.speech import launch, scoring, strategy
from examples.acoustic_model.speech.problem import drop_repeats, new_parser, run, within
from examples.real_speech import prepare

LEARNERS = 4
SCHEMES = ("ssgd", "random-pairs")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--language", choices=prepare.LANGUAGES, default=prepare.LANGUAGES[0])
    add("--game", type=Path, help="folder with `sound` and `script` (default: fetched)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--schemes", nargs="+", default=list(SCHEMES), metavar="NAME", help="ssgd first")
    add("--epochs", type=int, default=30)
    add("--by-speaker", action="store_true", help="learners' data are sorted by speaker")
    add("--out", type=Path, default=Path("out/real_speech/compare"))
    add("--resume", action="store_true", help="keep finished runs")
    options = parser.parse_args(argv)
    within("--epochs", options.epochs, 1, 10_000)
    for seed in options.seeds:
        within("--seeds", seed, 0, 2**31 - 1)
    for scheme in options.schemes:
        strategy.check(scheme)
    drop_repeats(options, "seeds", "schemes")
    return options


def training(scheme: str, seed: int, options: argparse.Namespace) -> launch.Training:
    """Return the training of a scheme with a seed."""
    more = ("--by-speaker",) if options.by_speaker else ()
    return launch.Training(
        scheme,
        scheme,
        seed,
        options.out / "runs" / f"{strategy.folder_name(scheme)}-{seed}",
        learners=1 if scheme == "single" else LEARNERS,
        options=("--epochs", str(options.epochs), *more),
        variables={} if scheme in ("ssgd", "single") else {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"},
        module="examples.real_speech.train",
    )


def decoded(one: launch.Training, data: Path) -> dict:
    """Decode the test split with the model of a training."""
    words = [str(one.folder / "model.pt"), "--data", str(data)]
    launch.module("examples.real_speech.decode", words, f"decoding {one.scheme}")
    return json.loads((one.folder / "decoded.json").read_text("utf-8"))


def summary(found: dict[str, list[dict]]) -> dict:
    """Return the rates by scheme, and their differences from the first scheme, over seeds and utterances.

    Args:
        found: by scheme, the results of decode.py of each seed.
    """
    first, result = next(iter(found)), {}
    for scheme, seeds in found.items():
        row: dict = {}
        for how in ("greedy", "ngram"):
            for rate in ("wer", "cer"):
                units = np.array(seeds[0][how][f"{rate}_units"])
                errors, base = (
                    np.mean([one[how][f"{rate}_errors"] for one in found[which]], axis=0)
                    for which in (scheme, first)
                )
                row[f"{how} {rate}"] = {
                    "rate": scoring.rate(errors, units),
                    "interval": scoring.bootstrap(errors, units),
                    "by_seed": [one[how][rate] for one in seeds],
                    "minus_first": scoring.paired_bootstrap(errors, base, units),
                }
        result[scheme] = row
    return result


def table(result: dict) -> str:
    """Return rates with n-grams, and the paired differences of word errors from the first scheme."""
    lines = [
        f"{'scheme':24}{'WER %':>7}  {'95 % interval':>14}  {'CER %':>6}  {'greedy WER %':>12}  "
        f"{'WER minus the first':>22}"
    ]
    for scheme, row in result.items():
        words, letters = row["ngram wer"], row["ngram cer"]
        low, high = (100 * end for end in words["interval"])
        apart = words["minus_first"]
        told = f"{100 * apart['difference']:+.1f} ({100 * apart['low']:+.1f} to {100 * apart['high']:+.1f})"
        lines.append(
            f"{scheme:24}{100 * words['rate']:7.1f}  {f'{low:.1f} to {high:.1f}':>14}  "
            f"{100 * letters['rate']:6.1f}  {100 * row['greedy wer']['rate']:12.1f}  "
            f"{told if scheme != next(iter(result)) else '':>22}"
        )
    return "\n".join(lines)


def main() -> None:
    """Prepare, train and decode every run, write and print the comparison."""
    options = arguments()
    launch.check(
        [
            *launch.MODULES[:2],
            "tensorboard",
            "kaldi_native_fbank",
            "horovod",
            "hvd_adpsgd",
            "soundfile",
            "kaldifst",
            "kaldi_decoder",
        ],
        launcher=True,
    )
    data = Path("out/real_speech") / options.language
    if not prepare.is_prepared(data):
        packages = Path("out/real_speech/packages")
        prepare.prepare(prepare.game_of(options.language, options.game, packages), data)
    runs = [training(scheme, seed, options) for seed in options.seeds for scheme in options.schemes]
    began, took = time.perf_counter(), 0
    found: dict[str, list[dict]] = {scheme: [] for scheme in options.schemes}
    for place, one in enumerate(runs):
        passed = time.perf_counter() - began
        left = f", about {passed / took * (len(runs) - place) / 60:.0f} min left" if took else ""
        print(f"\n[{place + 1} of {len(runs)}] {one.scheme}, seed {one.seed}{left}", flush=True)
        if not (options.resume and one.is_finished(data)):
            launch.train(one, data)
            took += 1
        found[one.scheme].append(decoded(one, data))
    result = {
        "language": options.language,
        "seeds": options.seeds,
        "epochs": options.epochs,
        "by_speaker": options.by_speaker,
        "schemes": summary(found),
        "versions": launch.versions(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + table(result["schemes"]) + f"\n{options.out}/result.json has all numbers.")


if __name__ == "__main__":
    run(main)
