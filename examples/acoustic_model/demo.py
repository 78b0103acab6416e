"""Trains a speech recogniser by plain Horovod and by H-ADPSGD: even learners, a slow one, a killed one.

    python -m examples.acoustic_model.demo                 the easy task, one seed, minutes on two cores
    python -m examples.acoustic_model.demo --seeds 0 1 2   three trainings of each kind
    python -m examples.acoustic_model.demo --hard          58 words in heavy noise

Four learners, each of which stands for a host: 4 super learners of one. All trainings see equally many
samples; under H-ADPSGD hvd.DynamicBatchSampler divides them. In `slow` one learner's steps take 3 times as
long, because it sleeps; `killed` is a short training in which one learner is killed after half an epoch.
Written to --out: result.json, demo.png and all runs. HOROVODRUN_ARGS adds arguments to horovodrun.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from examples.acoustic_model import prepare_data
from examples.acoustic_model.speech import comparison, figure, journal, launch
from examples.acoustic_model.speech.problem import Problem, drop_repeats, new_parser, run, within

LEARNERS, SLOWDOWN, VICTIM = 4, 3, 3
SCHEMES = {"ssgd": "plain Horovod", "hadpsgd": "H-ADPSGD"}
SITUATIONS = {
    "even": "even learners",
    "slow": f"one learner {SLOWDOWN} times slower",
    "killed": "one learner killed",
}
DISTURBANCES = {
    "even": (),
    "slow": ("--slow", f"{VICTIM}:{SLOWDOWN}"),
    "killed": ("--kill", f"{VICTIM}:0.5"),
}
SHORT_EPOCHS = 2  # of `killed`
# Seconds of an epoch, of the start with the evaluations, and of decoding, on two idle cores
EPOCH_S = {
    "ssgd": {"even": 4.8, "slow": 9.5, "killed": 1.3},
    "hadpsgd": {"even": 3.7, "slow": 3.6, "killed": 3.5},
    "single": {"even": 6.0},
}
START_S, DECODE_S = 8, 3


@dataclass(frozen=True)
class Kind:
    """What is trained in one row of the table.

    Attributes:
        scheme: a key of SCHEMES, or "single": one learner, a reference of quality.
        situation: a key of SITUATIONS.
    """

    scheme: str
    situation: str

    @property
    def name(self) -> str:
        """The name of the runs' folders, and the key in result.json."""
        return "single" if self.scheme == "single" else f"{self.scheme}-{self.situation}"

    @property
    def title(self) -> str:
        if self.scheme == "single":
            return "one learner alone"
        return f"{SCHEMES[self.scheme]}, {SITUATIONS[self.situation]}"

    @property
    def is_decoded(self) -> bool:
        """Whether the model is compared by word errors: it has seen all epochs."""
        return self.situation != "killed"

    def seconds(self, epochs: int) -> float:
        """Return how long a run takes on two idle cores, decoding included."""
        trained = epochs if self.is_decoded else SHORT_EPOCHS
        decoded = DECODE_S if self.is_decoded else 0
        return START_S + EPOCH_S[self.scheme][self.situation] * trained + decoded


def kinds(situations: list[str]) -> list[Kind]:
    """Return all kinds of runs in their order."""
    return [
        *(Kind(scheme, situation) for situation in situations for scheme in SCHEMES),
        Kind("single", "even"),
    ]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0], help="seeds of the trainings (default: 0)")
    add("--situations", choices=tuple(SITUATIONS), nargs="+", default=list(SITUATIONS))
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
    drop_repeats(options, "seeds", "situations")
    return options


def training(kind: Kind, seed: int, options: argparse.Namespace) -> launch.Training:
    """Return the training of a kind with a seed."""
    ours, killed = kind.scheme == "hadpsgd", kind.situation == "killed"
    epochs = SHORT_EPOCHS if killed else options.epochs
    return launch.Training(
        kind.name,
        "random-pairs" if ours else kind.scheme,
        seed,
        options.out / "runs" / f"{kind.name}-{seed}",
        learners=1 if kind.scheme == "single" else LEARNERS,
        options=("--epochs", str(epochs), *DISTURBANCES[kind.situation]),
        variables={"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"} if ours else {},
        may_fail=killed,
    )


class Clock:
    """The time that all runs have taken so far, and will take.

    Args:
        runs: all kinds of runs, in their order.
        epochs: epochs of those that are not short.
    """

    def __init__(self, runs: list[Kind], epochs: int) -> None:
        self._expected = [kind.seconds(epochs) for kind in runs]
        self._began, self._done = time.perf_counter(), 0

    def next(self, title: str, seed: int) -> str:
        """Return the line that announces the next run."""
        before = sum(self._expected[: self._done])
        passed = time.perf_counter() - self._began
        left = (sum(self._expected) - before) * (passed / before if before else 1.0)
        self._done += 1
        minutes = f"{left / 60:.1f} min" if left > 90 else f"{left:.0f} s"
        place = f"[{self._done} of {len(self._expected)}]"
        return f"\n{place} {title}, seed {seed} (about {minutes} left)"


def train(one: launch.Training, data: Path, resume: bool) -> None:
    """Train one model; with `resume`, skip a finished training and continue an interrupted one.

    Raises:
        Problem: if the training fails, but for one in which a learner is killed.
    """
    if resume and one.is_finished(data):
        print("   finished before", flush=True)
        return
    launch.train(one, data, resume)


def row(kind: Kind, runs: list[launch.Training], result: dict) -> dict:
    """Return what a row of the table tells: seconds, part of the samples, and word error rate if decoded."""
    if kind.is_decoded:
        wer, interval = result["wer"][kind.name], result["wer_interval"][kind.name]
        return {
            "seconds": result["seconds"][kind.name],
            "part": 1.0,
            "wer": wer,
            "interval": interval,
        }
    ends = [_end(kind, one) for one in runs]
    seconds, part = (sum(end[k] for end in ends) / len(ends) for k in range(2))
    return {"seconds": seconds, "part": part}


def _end(kind: Kind, one: launch.Training) -> tuple[float, float]:
    """Return after how many seconds, and with which part of the samples, a short training has ended.

    Raises:
        Problem: if its learner was not killed, or the others did not finish under H-ADPSGD.
    """
    killed, finished = one.folder / "killed.json", (one.folder / "model.pt").exists()
    if not killed.exists():
        raise Problem(f"{one.scheme}: its learner was not killed; {one.folder}/log.txt says why")
    if finished:
        return journal.read(one.folder / "heldout.jsonl")[-1]["seconds"], 1.0
    if kind.scheme == "hadpsgd":
        raise Problem(
            f"{one.scheme} did not outlive the learner that was killed; {one.folder}/log.txt says why"
        )
    died = json.loads(killed.read_text())
    return died["seconds"], died["epochs"] / SHORT_EPOCHS


def table(rows: dict[str, dict], differences: dict) -> str:
    """Return the table of all kinds of runs but `single`, which is a footnote."""
    lines = [f"{'':42}{'training s':>11}  {'WER %':>6}  {'95 % interval':>14}"]
    situation = None
    for kind in kinds(list(SITUATIONS)):
        if kind.name not in rows or kind.scheme == "single":
            continue
        found = rows[kind.name]
        first = SITUATIONS[kind.situation] if kind.situation != situation else ""
        situation = kind.situation
        lines.append(f"{first:28}{SCHEMES[kind.scheme]:14}{found['seconds']:11.1f}  {_told(found)}")
    for name, found in differences.items():
        difference, low, high = (100 * found[key] for key in ("difference", "low", "high"))
        lines.append(f"{name}: WER {difference:+.1f} points ({low:+.1f} to {high:+.1f})")
    if "single" in rows:
        alone = rows["single"]
        low, high = (100 * end for end in alone["interval"])
        lines.append(
            f"For reference, one learner alone, with its own batch and rate: WER {100 * alone['wer']:.1f} % "
            f"({low:.1f} to {high:.1f}), {alone['seconds']:.0f} s on one core."
        )
    return "\n".join(lines)


def _told(found: dict) -> str:
    if "wer" in found:
        low, high = (100 * end for end in found["interval"])
        return f"{100 * found['wer']:6.1f}  {f'{low:.1f} to {high:.1f}':>14}"
    if found["part"] < 1:
        return f"the job ended, after {100 * found['part']:.0f} % of the samples"
    return "finished by the other learners"


def differences(runs: list[launch.Training], decoded: list[dict], situations: list[str]) -> dict:
    """Return the paired comparisons of both schemes on the same utterances, by situation."""
    return {
        f"H-ADPSGD minus plain Horovod, {SITUATIONS[situation]}": comparison.difference(
            runs, decoded, f"hadpsgd-{situation}", f"ssgd-{situation}"
        )
        for situation in situations
        if situation != "killed"
    }


def main() -> None:
    """Prepare the data, train and decode every run, write and print the comparison."""
    options = arguments()
    # before minutes of training
    launch.check([*launch.MODULES, "horovod", "hvd_adpsgd"], launcher=True)
    began = time.perf_counter()
    data, what = prepare_data.named("hard" if options.hard else "easy", options.quick, options.data)
    chosen = [kind for _ in options.seeds for kind in kinds(options.situations)]
    seeds = [seed for seed in options.seeds for _ in kinds(options.situations)]
    runs = [training(kind, seed, options) for kind, seed in zip(chosen, seeds, strict=True)]
    clock = Clock(chosen, options.epochs)
    for kind, one in zip(chosen, runs, strict=True):
        print(clock.next(kind.title, one.seed), flush=True)
        train(one, data, options.resume)
    print("\nDecoding", flush=True)
    compared = [one for kind, one in zip(chosen, runs, strict=True) if kind.is_decoded]
    with ThreadPoolExecutor(2) as decoders:
        decoded = list(decoders.map(lambda one: launch.decode(one, data), compared))
    curves = [journal.read(one.folder / "heldout.jsonl") for one in compared]
    result = comparison.summary(compared, decoded, curves)
    rows = {
        kind.name: row(kind, [one for one in runs if one.scheme == kind.name], result)
        for kind in dict.fromkeys(chosen)
    }
    result["differences"] = differences(compared, decoded, options.situations)
    result |= {"rows": rows, "seeds": options.seeds, "task": what, "epochs": options.epochs}
    result["versions"] = launch.versions()
    result["total_seconds"] = time.perf_counter() - began
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    figure.draw_times(rows, options.out / "demo.png")
    print("\n" + table(rows, result["differences"]))
    took = f"{result['total_seconds']:.0f} s in all"
    print(
        f"\n{took}. {options.out}/demo.png shows this; {options.out}/result.json has all numbers.\n{NEXT}"
    )


NEXT = """\
Watch a run:   HVD_ADPSGD_RECORD=out/record horovodrun -np 4 python -m examples.acoustic_model.train
               python -m hvd_adpsgd top out/record      in another terminal
Your script:   docs/migration.md (Horovod), docs/from_ddp.md (DistributedDataParallel)"""


if __name__ == "__main__":
    run(main)
