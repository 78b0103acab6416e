"""What a cluster would do: the same engines, with the sizes, times and failures of a job that is planned.

A few numbers stand for all parameters (`Network.bytes_scale`). Trainers change nothing, so that
the distance of the models shows the exchanges alone. Each super learner sends over one link; the receiver's
link is not modelled; the work of averaging on a host is, with a calibration.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.simulation.bounds import SEED, Bound, in_bound
from hvd_adpsgd.simulation.calibration import Calibration
from hvd_adpsgd.simulation.chance import Chance
from hvd_adpsgd.simulation.job import Job
from hvd_adpsgd.simulation.network import Network
from hvd_adpsgd.simulation.scenario import rounds_of, schedules
from hvd_adpsgd.strategies import parse

__all__ = ["Cluster", "Outcome", "draw", "plan", "synchronous_goodput", "theoretical_decay"]

ELEMENTS = 8  # of a chunk
NEVER = 10**9
BOUNDS: dict[str, Bound] = {
    "super_learners": (1, 2**16),
    "parameters": (1.0, 1e15),
    "step_s": (1e-6, 1e6),
    "bytes_per_s": (1.0, 1e15),
    "latency_s": (0.0, 1e6),
    "minutes": (1e-3, 1e6),
    "rate": (1e-6, 1e6),
    "share": (1e-3, 1.0),
    "slow_factor": (1.0, 1e6),
    "failures_per_hour": (0.0, 1e6),
    "spread": (0.0, 1.0),
    "chunks": (1, 10**4),
    "deadline_s": (0.0, 1e6),
    "detect_s": (0.0, 1e6),
    "seed": SEED,
}
OPTIONS = {  # of `simulate`, by attribute
    "super_learners": "--super-learners",
    "parameters": "--model",
    "step_s": "--step",
    "bytes_per_s": "--network",
    "latency_s": "--network",
    "minutes": "--minutes",
    "rate": "--rate",
    "share": "--share",
    "slow": "--slow",
    "slow_factor": "--slow",
    "failures_per_hour": "--fail",
    "seed": "--random-seed",
}


@dataclass(frozen=True)
class Cluster:
    """A job that is planned.

    Attributes:
        super_learners: how many.
        parameters: of the model, of 4 bytes each.
        step_s: of a super learner that is not slow; each step differs by up to `spread` of it.
        bytes_per_s, latency_s: of the link of each super learner.
        strategy: a spec, as of the option `averaging`.
        minutes: of training.
        rate: exchanges per step.
        share: of the model that an exchange moves.
        slow: how many super learners are slow, `slow_factor` times.
        failures_per_hour: of one super learner; who fails is not replaced.
        chunks: that stand for the model, at least 1 / share.
        deadline_s: of silent peers.
        detect_s: within which a failure is noticed.
        seed: of all that is random.
        calibration: what averaging costs on a host; None: nothing.
    """

    super_learners: int
    parameters: float
    step_s: float
    bytes_per_s: float
    latency_s: float
    strategy: str = "random_pairs"
    minutes: float = 10.0
    rate: float = 1.0
    share: float = 1.0
    slow: int = 0
    slow_factor: float = 1.0
    failures_per_hour: float = 0.0
    spread: float = 0.05
    chunks: int = 4
    deadline_s: float = 10.0
    detect_s: float = 5.0
    seed: int = 0
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        bounds: dict[str, Bound] = {**BOUNDS, "slow": (0, self.super_learners)}
        for name, bound in bounds.items():
            in_bound(
                f"a cluster: {name} ({OPTIONS.get(name, 'no option')})", getattr(self, name), bound
            )
        object.__setattr__(self, "chunks", max(self.chunks, math.ceil(1 / self.share)))
        if 60 * self.minutes < self.step_s:
            raise ConfigError(
                f"a cluster: {self.minutes:g} minutes (--minutes) are less than a step of {self.step_s:g} s "
                "(--step). Plan for at least one step."
            )
        if parse(self.strategy).averages == "nothing":
            raise ConfigError(
                f"a cluster: strategy is {self.strategy!r}, which averages no models and is not simulated. "
                "Pass another one; the line 'synchronous' of its plan is that of synchronous training."
            )

    @property
    def model_nbytes(self) -> float:
        """Of the model on the wire."""
        return 4 * self.parameters

    @property
    def averaging_step_s(self) -> float:
        """What averaging adds to a step."""
        return self.calibration.step_s_per_byte * self.model_nbytes if self.calibration else 0.0

    @property
    def averaging_chunk_s(self) -> float:
        """Of the engine for one of the chunks that stand for the model."""
        per_byte = self.calibration.chunk_s_per_byte if self.calibration else 0.0
        return per_byte * self.model_nbytes / self.chunks


@dataclass(frozen=True)
class Outcome:
    """What came of it; a JSON object by `to_json`.

    Attributes:
        steps_kept: steps of all super learners, beside those of as many that never wait, slow down or fail.
        steps: of each super learner.
        exchanges_per_step: per super learner, asked and served.
        staleness_mean, staleness_99: steps between a snapshot and the merge of its exchange.
        decay: of the squared distance from the mean, per exchange of a super learner; None if unknown.
        decay_in_theory: for random pairs, see theoretical_decay; None where no closed form is known.
        distances: (exchanges per super learner, squared distance from the mean as a share of the first).
        bytes_per_s: that a super learner sends while it lives, mean and most.
        peers: that a super learner has exchanged with, mean and most: its connections.
        failed: super learners.
        synchronous_kept: the same share for synchronous training with restarts, see synchronous_goodput.
        seconds_of_simulation, turns, us_per_turn: what the simulation cost.
    """

    steps_kept: float
    steps: list[int]
    exchanges_per_step: float
    staleness_mean: float
    staleness_99: int
    staleness: list[int]
    decay: float | None
    decay_in_theory: tuple[float, float] | None
    distances: list[tuple[float, float]]
    bytes_per_s: tuple[float, float]
    peers: tuple[float, int]
    failed: int
    synchronous_kept: float
    seconds_of_simulation: float
    turns: int
    us_per_turn: float

    def to_json(self, cluster: Cluster) -> str:
        """With what was asked."""
        return json.dumps(
            {"cluster": dataclasses.asdict(cluster), **dataclasses.asdict(self)}, indent=1
        )


def plan(cluster: Cluster, progress: Callable[[float], None] | None = None) -> Outcome:
    """Simulate the training of a cluster, and say what averaging costs and achieves there.

    Args:
        cluster: what is planned.
        progress: told now and then the share of its minutes that is over.

    Raises:
        AdpsgdError: if the strategy cannot serve so many.
    """
    began = time.perf_counter()
    job, lived_s = _job(cluster)
    distances, passed_s = [], 0.0
    for part_s, measured in _parts(cluster):
        job.run_for(part_s)
        passed_s += part_s
        if measured:
            distances.append(_distance(job, cluster.super_learners))
        if progress is not None:
            progress(passed_s / (60 * cluster.minutes))
    return _outcome(cluster, job, _relative(distances), lived_s, time.perf_counter() - began)


# ---- the job ------------------------------------------------------------------------------------


def _job(c: Cluster) -> tuple[Job, npt.NDArray[np.float64]]:
    """The job, not begun, and how long each super learner will live."""
    nbytes = c.chunks * ELEMENTS * 8
    network = Network(
        c.super_learners,
        c.seed + 1,
        c.latency_s,
        0.2,
        c.bytes_per_s,
        bytes_scale=c.model_nbytes / nbytes,
        eager=1.0,
    )
    rounds, tables = rounds_of(c.strategy, c.super_learners)
    means = None
    if rounds is not None and rounds.peers is None:
        means = "replace" if rounds.replaces else "add"
    job = Job(
        network,
        c.seed + 2,
        slack=1.0,
        tables=tables,
        period=rounds.period if rounds else 1,
        means=means,
        after=rounds is not None and rounds.waits,
        warm_up=rounds.warm_up if rounds else 0,
        detect_s=c.detect_s,
        still=True,
        look_s=c.step_s / 50,
        checks=False,
        chunk_s=c.averaging_chunk_s,
        exchange_share=c.share,
    )
    _add(job, c, rounds is not None and rounds.peers is not None)
    return job, _strike(job, c)


def _add(job: Job, c: Cluster, in_pairs: bool) -> None:
    weight = parse(c.strategy).plan(0, c.super_learners).weight
    random = np.random.default_rng(c.seed)
    for i, schedule in enumerate(schedules(c.strategy, c.super_learners)):
        model = random.standard_normal((c.chunks, ELEMENTS))
        step_s = (c.step_s + c.averaging_step_s) * (c.slow_factor if i < c.slow else 1.0)
        job.add(
            schedule, weight, c.rate, in_pairs, model, 0, 1, -1, 8 * ELEMENTS,
            NEVER, step_s, c.spread, 0.0, c.deadline_s, 5.0,
        )  # fmt: skip


def _strike(job: Job, c: Cluster) -> npt.NDArray[np.float64]:
    """Failures at the times of a Poisson process: how long each super learner lives."""
    chance, lived_s = Chance(c.seed), np.full(c.super_learners, 60.0 * c.minutes)
    for i in range(c.super_learners):
        if c.failures_per_hour > 0:
            at_s = -math.log(1 - chance.between(0, 1)) * 3600 / c.failures_per_hour
            if at_s < 60 * c.minutes:
                job.strike(at_s, "crash", i)
                lived_s[i] = at_s
    return lived_s


# ---- what is measured ---------------------------------------------------------------------------


def _parts(c: Cluster) -> Iterator[tuple[float, bool]]:
    """Seconds of the simulation, part by part: forty steps in which the decay is measured, and the rest."""
    seconds = 60 * c.minutes
    measured_s = min(40 * c.step_s, seconds)
    yield from [(measured_s / 20, True)] * 20
    if seconds > measured_s:
        yield from [((seconds - measured_s) / 100, False)] * 100


def _distance(job: Job, n: int) -> tuple[float, float]:
    """Exchanges per super learner so far, and the squared distance from the mean."""
    models = np.array([job.model(i).ravel() for i in range(n)])
    square = float(((models - models.mean(axis=0)) ** 2).sum())
    return float(np.mean(job.exchanges_of())), square


def _relative(distances: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The distances as shares of the first."""
    first = distances[0][1]
    return [(count, square / first if first > 0 else 0.0) for count, square in distances]


def _decay(distances: Sequence[tuple[float, float]]) -> float | None:
    """The slope of the logarithm, while it is above rounding."""
    used = [(x, math.log(y)) for x, y in distances if y > 1e-20]
    if len(used) < 3 or used[-1][0] <= used[0][0]:
        return None
    x, y = np.array(used).T
    return float(-np.polyfit(x, y, 1)[0])


def theoretical_decay(n: int, share: float = 1.0) -> tuple[float, float] | None:
    """Decay of random pairs per exchange of a super learner; None for fewer than three.

    With d = n / (2 (n - 1)): d if every pair exchanges at times of its own (a Poisson process), and
    -log(1 - d) if all exchange at once in perfect matchings. One per step lies between.

    Where an exchange moves a share of the chunks, each chunk takes part in that share of the exchanges: both
    are `share` times as large. So a byte brings models together as much as one of whole exchanges.

    Source: Boyd, Ghosh, Prabhakar, Shah, Randomized gossip algorithms, IEEE Trans. Inf. Theory 52(6).
    """
    if n < 3:
        return None
    each = n / (2 * (n - 1))
    return share * each, -share * math.log(1 - each)


def _outcome(
    c: Cluster,
    job: Job,
    distances: list[tuple[float, float]],
    lived_s: npt.NDArray[np.float64],
    took: float,
) -> Outcome:
    numbers, seconds = job.summary(), 60 * c.minutes
    steps = np.array(numbers["steps"])
    staleness: npt.NDArray[Any] = np.array(job.staleness())
    total = max(int(staleness.sum()), 1)
    sent, _, peers = np.array(job.traffic(), dtype=np.float64).T
    rates = sent / np.maximum(lived_s, 1e-9)  # one may fail at once
    n = c.super_learners
    return Outcome(
        steps_kept=min(float(steps.sum() / (n * seconds / c.step_s)), 1.0),  # the first is shorter
        steps=steps.tolist(),
        exchanges_per_step=float(sum(job.exchanges_of()) / max(steps.sum(), 1)),
        staleness_mean=float(np.arange(staleness.size) @ staleness / total),
        staleness_99=int(np.searchsorted(np.cumsum(staleness), 0.99 * total)),
        staleness=staleness.tolist(),
        decay=_decay(distances),
        decay_in_theory=theoretical_decay(n, c.share)
        if parse(c.strategy).name == "random_pairs"
        else None,
        distances=distances,
        bytes_per_s=(float(rates.mean()), float(rates.max())),
        peers=(float(peers.mean()), int(peers.max())),
        failed=int((lived_s < seconds).sum()),
        synchronous_kept=synchronous_goodput(c),
        seconds_of_simulation=took,
        turns=numbers["turns"],
        us_per_turn=1e6 * took / max(numbers["turns"], 1),
    )


def synchronous_goodput(
    c: Cluster, *, checkpoint_s: float = 30.0, restart_s: float = 300.0
) -> float:
    """The share of steps that synchronous training keeps, with checkpoints and restarts.

    A step lasts as long as that of the slowest, with a ring all-reduce of 2 (n - 1) / n models behind it. A
    failure of
    any super learner, at n times its rate, costs the restart and on average half of the interval between
    checkpoints, which is Young's, sqrt(2 checkpoint_s / (n rate)). All are replaced at once.

    Args:
        c: the cluster.
        checkpoint_s: to write a checkpoint.
        restart_s: from a failure to the next step.

    Source: Young, A first order approximation to the optimum checkpoint interval, CACM 1974.
    """
    n = c.super_learners
    slowest = c.step_s * (c.slow_factor if c.slow else 1.0) * (1 + c.spread * (n - 1) / (n + 1))
    allreduce = 2 * (n - 1) / n * c.model_nbytes / c.bytes_per_s + 2 * math.log2(n) * c.latency_s
    kept = c.step_s / (slowest + allreduce)
    rate = n * c.failures_per_hour / 3600
    if rate == 0:
        return kept
    interval = math.sqrt(2 * checkpoint_s / rate)
    return kept / ((1 + checkpoint_s / interval) * (1 + rate * (restart_s + interval / 2)))


# ---- a figure -----------------------------------------------------------------------------------


def draw(outcome: Outcome, path: str | Path) -> None:
    """The decay of the models' distance beside theory, staleness, and the steps of each super learner."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (decay, stale, steps) = plt.subplots(1, 3, figsize=(11, 3.2))
    shown = [(x, y) for x, y in outcome.distances if y > 0]
    if shown:
        x, y = np.array(shown).T
        decay.semilogy(x, y, "o-", label="simulated")
        if outcome.decay_in_theory is not None:
            low, high = (y[0] * np.exp(-rate * (x - x[0])) for rate in outcome.decay_in_theory)
            decay.fill_between(x, low, high, alpha=0.3, label="theory")
        decay.legend(frameon=False)
    decay.set_xlabel("exchanges per super learner")
    decay.set_ylabel("squared distance from the mean")
    stale.bar(range(16), outcome.staleness[:16])
    stale.set_xlabel("staleness (steps)")
    steps.plot(sorted(outcome.steps), ".")
    steps.set_xlabel("super learners, by steps")
    steps.set_ylabel("steps")
    steps.set_ylim(bottom=0)
    for axis in (decay, stale, steps):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
