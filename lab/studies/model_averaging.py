"""Study of model averaging on speech, where N learners average their models every K minibatches.

    python -m lab.studies.model_averaging             train the sweep, seeds 1 2 3
    python -m lab.studies.model_averaging --recall    print the tables of finished runs
    python -m lab.studies.model_averaging --quick     train a tiny corpus and net, as a test

The sweep combines N = 1, 2, 4 learners, K = 1, 5, 10, 20, 50, 100, 500, SGD and natural-gradient SGD, and
initial weights from Glorot's rule or from a stack of RBMs; for one learner also ReLUs in place of
sigmoids. Each learner is a super learner of one process; models are averaged by
periodic_averaging:period=K and once more at the end. All runs use the same total number of
minibatches, without momentum; the rate is N times that of one learner and falls tenfold over the run. Four
learners at K = 10 are also trained with the rate of one learner. One launch per seed and N trains all its
runs one after another; finished runs are kept. The word error rate is measured for one learner, and for
four learners at K = 10 and 100.
Written to --out: result.json, table.md, model_averaging.png and all runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from examples.acoustic_model import prepare_data
from examples.acoustic_model.speech import corpus, launch
from examples.acoustic_model.speech.problem import Problem, drop_repeats, new_parser, run, within
from lab.studies import figure
from lab.studies.keeper import recall

SETTINGS = {
    "task": "easy",
    "layers": 5,  # hidden layers; the input is 11 frames of 40 features
    "hidden": 128,
    "batch": 128,  # frames per minibatch
    "minibatches": 1720,  # total of all learners, one epoch; 1720 = 4 x 430
}
QUICK = {"task": "easy", "layers": 2, "hidden": 16, "batch": 64, "minibatches": 40}
LEARNERS, PERIODS = (1, 2, 4), (1, 5, 10, 20, 50, 100, 500)
OPTIMIZERS = {"sgd": "SGD", "natural": "NG-SGD"}
INITS = {"random": "random", "rbm": "RBM"}
CONFIRMING = [1, 2, 3]
# Rates of one learner, by activation, optimizer and initial weights. They were chosen on
# seed 0 of one learner, before any confirming seed was run: the smallest rate of a grid whose loss is
# within 5 % of the best, because the best rate leaves no room for scaling it by N. Results of several
# learners had no part in the choice. Held-out losses:
#
#     RATE                         1       2       4       8
#     sigmoid, SGD, random         2.709   2.510   2.659   3.934
#     sigmoid, SGD, RBM            2.166   1.957   1.869   3.848
#     sigmoid, NG-SGD, random      1.994   1.792   1.724   1.731
#     sigmoid, NG-SGD, RBM         2.011   1.802   1.715   1.701
#
#     RATE                  1/128   1/32    1/8     1/4     1/2     1
#     ReLU, SGD, random     3.583   2.416   1.974   1.845   1.885   diverged
#
# ReLUs that start from weights of RBMs, which were trained for sigmoids, diverged at each rate of the grid.
RATES = {
    ("sigmoid", "sgd", "random"): 2.0,
    ("sigmoid", "sgd", "rbm"): 2.0,
    ("sigmoid", "natural", "random"): 2.0,
    ("sigmoid", "natural", "rbm"): 4.0,
    ("relu", "sgd", "random"): 0.25,
}
TOLERANCE = 0.05
UNSCALED = (4, 10)  # N and K of runs with the rate of one learner
DECODED_PERIODS = (0, 10, 100)
# An hour as the deadline of a silent peer: on a busy or suspended machine a silent learner has not failed.
ENVIRONMENT = {
    "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
    "HVD_ADPSGD_NONFINITE": "skip",
    "HVD_ADPSGD_DEADLINE_S": "3600",
}
DIVERGED = "diverged"


@dataclass(frozen=True)
class Run:
    """One training of the sweep.

    Attributes:
        learners: N, the number of learners.
        period: K, minibatches between means; 0 for one learner, which does not average.
        optimizer, init, activation: as in RATES.
        seed: seed of the weights, and of the order of the frames.
        rate: learning rate divided by N.
        decoded: whether the model is kept and decoded.
        folder: folder of the results.
    """

    learners: int
    period: int
    optimizer: str
    init: str
    activation: str
    seed: int
    rate: float
    decoded: bool = False
    folder: Path = Path()

    @property
    def name(self) -> str:
        """Name of the run in messages and folders."""
        return (
            f"N{self.learners}-K{self.period}-{self.optimizer}-{self.init}-{self.activation}"
            f"-lr{self.rate:g}-seed{self.seed}"
        )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--learners", type=int, nargs="+", default=list(LEARNERS), help="learners (default: 1 2 4)")
    add(
        "--periods",
        type=int,
        nargs="+",
        default=list(PERIODS),
        help="periods (default: 1 5 ... 500)",
    )
    add("--seeds", type=int, nargs="+", default=CONFIRMING, help="seeds (default: 1 2 3)")
    add("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=list(OPTIMIZERS))
    add("--weights", nargs="+", choices=tuple(INITS), default=list(INITS))
    add("--recall", action="store_true", help="train nothing, print tables of finished runs")
    add("--quick", action="store_true", help="tiny corpus and net, as a test")
    add("--out", type=Path, help="folder (default: out/model_averaging, with -quick)")
    options = parser.parse_args(argv)
    if options.quick:
        options.learners, options.periods, options.seeds = [1, 2], [1, 10], [1]
    for name, low, high in (("learners", 1, 64), ("periods", 1, 10**6), ("seeds", 0, 2**31 - 1)):
        for value in getattr(options, name):
            within(f"--{name}", value, low, high)
    drop_repeats(options, "learners", "periods", "seeds")
    options.settings = QUICK if options.quick else SETTINGS
    if options.settings["minibatches"] % math.lcm(*options.learners):
        raise Problem(
            f"--learners {options.learners}: {options.settings['minibatches']} minibatches are not "
            "shared evenly by all of them; take 1, 2, 4"
        )
    options.out = options.out or Path("out") / ("model_averaging" + "-quick" * options.quick)
    return options


def sweep(
    learners: Iterable[int],
    periods: Iterable[int],
    seeds: list[int],
    optimizers: Iterable[str] = tuple(OPTIMIZERS),
    weights: Iterable[str] = tuple(INITS),
) -> list[Run]:
    """Return all runs, ordered by seed, so that an interrupted sweep has whole tables of its first seeds."""
    scaled = [
        Run(
            n, period, optimizer, init, activation, seed, rate,
            decoded=activation == "sigmoid" and seed == seeds[0] and n != 2
            and period in DECODED_PERIODS,
        )
        for seed in seeds
        for n in learners
        for (activation, optimizer, init), rate in RATES.items()
        for period in ((0,) if n == 1 else periods)
        if (n == 1 or activation == "sigmoid") and optimizer in optimizers and init in weights
    ]  # fmt: skip
    return [
        one
        for run in scaled
        for one in (
            (run, replace(run, rate=run.rate / run.learners, decoded=False))
            if (run.learners, run.period) == UNSCALED
            else (run,)
        )
    ]


# ---- trainings and their records


class Sweep:
    """Trains the runs of a sweep that are not finished, and reads the records of those that are.

    Args:
        out: folder of all results.
        data: folder of the speech corpus.
        settings: SETTINGS or QUICK.
    """

    def __init__(self, out: Path, data: Path, settings: dict[str, Any]) -> None:
        self.out, self.data, self.settings = out, data, settings
        speech = corpus.read_json(data / "settings.json")["digest"]
        told = settings | {"speech": speech, "versions": launch.versions()}
        self._digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]

    def placed(self, one: Run) -> Run:
        """Return the run with its folder set."""
        return replace(one, folder=self.out / "runs" / f"{one.name}-{self._digest}")

    def stack(self, seed: int) -> Path:
        """Return the folder of the pre-trained RBM stack of a seed."""
        return self.out / "stacks" / f"{seed}-{self._digest}"

    def recall(self, one: Run) -> dict[str, Any] | None:
        """Return the record of a run; None if the run is not finished."""
        return recall(self.placed(one).folder)

    def perform(self, runs: list[Run]) -> None:
        """Train all runs that are not finished, in one launch for each seed and number of learners."""
        todo = [self.placed(one) for one in runs if self.recall(one) is None]
        print(f"{len(runs)} runs, {len(runs) - len(todo)} finished before", flush=True)
        for seed, learners in dict.fromkeys((one.seed, one.learners) for one in todo):
            group = [one for one in todo if (one.seed, one.learners) == (seed, learners)]
            if any(one.init == "rbm" for one in group):
                self._pretrain(seed)
            self._launch(learners, group)

    def _pretrain(self, seed: int) -> None:
        folder = self.stack(seed)
        if (folder / "stack.pt").exists():
            return
        print(f"-- RBMs, seed {seed}", flush=True)
        shape = (f"--{name}={self.settings[name]}" for name in ("layers", "hidden"))
        words = ["--strategy=single", f"--data={self.data}", f"--out={folder}", f"--seed={seed}"]
        name = "examples.acoustic_model.pretrain_rbm"
        launch.module(name, [*words, *shape], f"RBMs, seed {seed}")

    def _launch(self, learners: int, runs: list[Run]) -> None:
        print(f"-- N = {learners}, seed {runs[0].seed}: {len(runs)} runs", flush=True)
        for one in runs:
            one.folder.mkdir(parents=True, exist_ok=True)
        plan = self.settings | {"learners": learners, "data": str(self.data)}
        plan["runs"] = [self._told(one) for one in runs]
        path = self.out / f"plan-{learners}-{runs[0].seed}.json"
        path.write_text(json.dumps(plan, indent=1) + "\n")
        name = "lab.studies.averaging_learner"
        launch.module(name, [str(path)], f"{learners} learners", learners, **ENVIRONMENT)

    def _told(self, one: Run) -> dict[str, Any]:
        """Return the entry of a run in the plan that averaging_learner.py reads."""
        stack = str(self.stack(one.seed) / "stack.pt") if one.init == "rbm" else None
        return asdict(one) | {"folder": str(one.folder), "name": one.name, "stack": stack}

    def wer(self, one: Run, recall_only: bool) -> float | None:
        """Return the test word error rate of a run's model, decoding if needed; None if it is not known."""
        folder = self.placed(one).folder
        path = folder / "wer.json"
        if not path.exists() and (recall_only or not (folder / "model.pt").exists()):
            return None
        if not path.exists():
            launch.decode(launch.Training(one.name, "", one.seed, folder), self.data)
        return json.loads(path.read_text())["wer"]


# ---- tables and figure

# By (activation, optimizer, initial weights, N, K): one loss per seed, inf if diverged.
Losses = dict[tuple[str, str, str, int, int], list[float]]


def losses_of(records: list[dict[str, Any]], scaled: bool = True) -> Losses:
    """Return held-out losses by cell, in the order of the seeds, of runs with the rate times N.

    With `scaled` False, of those runs whose rate is that of one learner.
    """
    found: Losses = {}
    for record in records:
        kind = record["activation"], record["optimizer"], record["init"]
        if (record["rate"] == RATES[kind]) != scaled:
            continue
        cell = (*kind, record["learners"], record["period"])
        loss = record["heldout_loss"]
        found.setdefault(cell, []).append(math.inf if loss is None else loss)
    return found


def table(losses: Losses, periods: list[int]) -> str:
    """Return a Markdown table with one row per optimizer, initial weights and number of learners.

    A mean within 5 % of that of one learner is bold.
    """
    head = "| optimizer | weights | N | 1 learner | " + " | ".join(f"K = {k}" for k in periods)
    lines = [head + " |", "|---" * (4 + len(periods)) + "|"]
    for optimizer, init in ((o, i) for o in OPTIMIZERS for i in INITS):
        alone = losses.get(("sigmoid", optimizer, init, 1, 0), [])
        limit = (1 + TOLERANCE) * _mean(alone)
        counts = sorted({n for (_, o, i, n, _) in losses if (o, i) == (optimizer, init) and n > 1})
        for n in counts:
            cells = (losses.get(("sigmoid", optimizer, init, n, k), []) for k in periods)
            row = [OPTIMIZERS[optimizer], INITS[init], str(n), _text(alone, 0)]
            row += [_text(cell, limit) for cell in cells]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses) if losses else math.nan


def _text(losses: list[float], limit: float) -> str:
    if not losses:
        return ""
    if math.inf in losses:
        return f"{DIVERGED} {losses.count(math.inf)} of {len(losses)}"
    mean = f"{_mean(losses):.3f}"
    spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
    return (f"**{mean}**" if _mean(losses) <= limit else mean) + spread


def unscaled_table(losses: Losses, unscaled: Losses) -> str:
    """Return a Markdown table that compares the rate times N with the rate of one learner, for UNSCALED."""
    n, period = UNSCALED
    lines = [
        f"| optimizer | weights | 1 learner | N = {n}, K = {period}, rate x {n} | rate x 1 |",
        "|---|---|---|---|---|",
    ]
    for optimizer, init in ((o, i) for o in OPTIMIZERS for i in INITS):
        kind = "sigmoid", optimizer, init
        alone, at_n = losses.get((*kind, 1, 0), []), losses.get((*kind, n, period), [])
        limit = (1 + TOLERANCE) * _mean(alone)
        row = [OPTIMIZERS[optimizer], INITS[init], _text(alone, 0), _text(at_n, limit)]
        row += [_text(unscaled.get((*kind, n, period), []), limit)]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def pretraining_table(losses: Losses) -> str:
    """Return a Markdown table of one learner's losses by initial weights, activation and optimizer."""
    lines = ["| units | optimizer | random | RBM | RBM / random |", "|---|---|---|---|---|"]
    for activation, optimizer in dict.fromkeys((a, o) for a, o, _ in RATES):
        random, rbm = (losses.get((activation, optimizer, init, 1, 0), []) for init in INITS)
        if random:
            ratio = f"{_mean(rbm) / _mean(random):.3f}" if rbm else ""
            row = (activation, OPTIMIZERS[optimizer], _text(random, 0), _text(rbm, 0), ratio)
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def wer_table(wer: dict[tuple[str, str, int, int], float]) -> str:
    """Return a Markdown table of the word error rates of the decoded runs."""
    places = sorted({(n, k) for _, _, n, k in wer})
    heads = ["1 learner" if n == 1 else f"N = {n}, K = {k}" for n, k in places]
    lines = [f"| optimizer | weights | {' | '.join(heads)} |", "|---" * (2 + len(places)) + "|"]
    for optimizer, init in dict.fromkeys((o, i) for o, i, _, _ in wer):
        found = (wer.get((optimizer, init, n, k)) for n, k in places)
        cells = ["" if value is None else f"{100 * value:.1f} %" for value in found]
        lines.append(f"| {OPTIMIZERS[optimizer]} | {INITS[init]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(losses: Losses, title: str, path: Path) -> None:
    """Draw held-out loss over K, in one panel for each optimizer and initial weights."""
    panels = {}
    for optimizer, init in ((o, i) for o in OPTIMIZERS for i in INITS):
        several: dict[str, dict[int, list[float]]] = {}
        for (activation, o, i, n, k), row in sorted(losses.items()):
            if (activation, o, i) == ("sigmoid", optimizer, init) and n > 1:
                several.setdefault(f"{n} learners", {})[k] = row
        alone = losses.get(("sigmoid", optimizer, init, 1, 0), [])
        panels[f"{OPTIMIZERS[optimizer]}, {INITS[init]}"] = (alone, several)
    figure.draw_periods(panels, title, path)


# ---- the script


def report(options: argparse.Namespace, trained: Sweep, runs: list[Run], what: str) -> str:
    """Collect the finished runs, decode, write result.json, table.md and the figure; return the tables."""
    records = [record for record in map(trained.recall, runs) if record]
    if not records:
        raise Problem(f"no run is finished in {options.out}; start again without --recall")
    losses = losses_of(records)
    wer = {
        (one.optimizer, one.init, one.learners, one.period): found
        for one in runs
        if one.decoded and (found := trained.wer(one, options.recall)) is not None
    }
    heads = {
        "Held-out cross-entropy in nats per frame": table(losses, options.periods),
        "The rate": unscaled_table(losses, losses_of(records, scaled=False)),
        "One learner": pretraining_table(losses),
        f"Word error rate, seed {options.seeds[0]}": wer_table(wer),
    }
    text = "\n\n".join(f"## {head}\n\n{body}" for head, body in heads.items())
    text += f"\n\n{what}; {len(records)} of {len(runs)} runs.\n"
    result = {"task": what, "settings": trained.settings, "runs": records}
    result["wer"] = [{"run": list(cell), "wer": value} for cell, value in wer.items()]
    result["versions"] = launch.versions()
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "table.md").write_text(text)
    draw(losses, f"Held-out loss: {what}", options.out / "model_averaging.png")
    return text


def main() -> None:
    """Prepare the data, train all runs, write the comparison."""
    options = arguments()
    several = max(options.learners) > 1
    launch.check([*launch.MODULES, "horovod", "hvd_adpsgd"], launcher=several)
    data, what = prepare_data.named(options.settings["task"], options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    trained = Sweep(options.out, data, options.settings)
    cells = options.learners, options.periods, options.seeds
    runs = sweep(*cells, options.optimizers, options.weights)
    if not options.recall:
        trained.perform(runs)
    print(report(options, trained, runs, what))
    print(f"{options.out}: result.json, table.md, model_averaging.png")


if __name__ == "__main__":
    run(main)
