"""Predicts how a planned job would run on a cluster, by a simulation of its engines in virtual time.

A few numbers stand for all parameters (`Network.bytes_scale`). Simulated trainers do not change the models,
so that the distance of the models shows the effect of exchanges alone. Each super learner sends over one
link; the receiver's link is not modelled; the work of averaging on a host is modelled with a calibration.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.turns import Moves, leaves_out, steps_between_copies
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies import Strategy, parse
from hvd_adpsgd.strategies.share_control import FLOOR
from hvd_adpsgd_lab.simulation import slow_links
from hvd_adpsgd_lab.simulation.bounds import SEED, Bound, in_bound
from hvd_adpsgd_lab.simulation.calibration import Calibration
from hvd_adpsgd_lab.simulation.chance import Chance
from hvd_adpsgd_lab.simulation.job import Job
from hvd_adpsgd_lab.simulation.network import Network
from hvd_adpsgd_lab.simulation.scenario import (
    DEFAULTS,
    member_plans,
    options_of,
    rounds_in,
    rounds_of,
    schedules,
)
from hvd_adpsgd_lab.simulation.steering import Steering

if TYPE_CHECKING:
    from hvd_adpsgd_lab.simulation.job import LocalUpdates  # a protocol of the stub only

# the few chunks of a simulated model are larger than real ones
PATIENT = DEFAULTS.replace(deadline_s=10.0)
ELEMENTS = 8  # elements of a simulated chunk
_MOST_WITH_SLOW_LINKS = 4096  # a number for each pair
NEVER = 10**9
BOUNDS: dict[str, Bound] = {
    "super_learners": (1, 2**16),
    "parameters": (1.0, 1e15),
    "step_s": (1e-6, 1e6),
    "bytes_per_s": (1.0, 1e15),
    "latency_s": (0.0, 1e6),
    "minutes": (1e-3, 1e6),
    "slow_factor": (1.0, 1e6),
    "slow_links": (0.0, 1.0),
    "slow_links_factor": (1.0, 1e6),
    "racks_factor": (1.0, 1e6),
    "failures_per_hour": (0.0, 1e6),
    "spread": (0.0, 1.0),
    "chunks": (1, 10**4),
    "detect_s": (0.0, 1e6),
    "seed": SEED,
}
OPTIONS = {  # command-line option of `simulate` for each attribute of Cluster
    "super_learners": "--super-learners",
    "parameters": "--model",
    "step_s": "--step",
    "bytes_per_s": "--network",
    "latency_s": "--network",
    "minutes": "--minutes",
    "slow": "--slow",
    "slow_factor": "--slow",
    "slow_links": "--slow-links",
    "slow_links_factor": "--slow-links",
    "racks": "--racks",
    "racks_factor": "--racks",
    "failures_per_hour": "--fail",
    "seed": "--random-seed",
}


@dataclass(frozen=True)
class Cluster:
    """A planned job, and the cluster on which it would run.

    Attributes:
        super_learners: number of super learners.
        parameters: number of parameters of the model, of 4 bytes each.
        step_s: mean seconds per step of a super learner that is not slow.
        bytes_per_s, latency_s: bandwidth and latency of each super learner's link.
        config: the options of training.
        minutes: duration of the training.
        slow: number of super learners whose steps take `slow_factor` times as long.
        slow_links, slow_links_factor: share of the pairs of super learners between which chunks take so many
            times as long.
        racks, racks_factor: number of racks, and how many times as long chunks take between them.
        failures_per_hour: failure rate of one super learner. In a plan failed ones are not replaced.
        spread: largest relative difference of a step from `step_s`.
        chunks: number of chunks that stand for the model; raised to 1 / the smallest share if smaller.
        detect_s: time in seconds within which each peer detects a failure.
        seed: seed of all random numbers.
        calibration: the cost of averaging on a host; None: averaging costs a host no time.
    """

    super_learners: int
    parameters: float
    step_s: float
    bytes_per_s: float
    latency_s: float
    config: Config = PATIENT
    minutes: float = 10.0
    slow: int = 0
    slow_factor: float = 1.0
    slow_links: float = 0.0
    slow_links_factor: float = 1.0
    racks: int = 1
    racks_factor: float = 1.0
    failures_per_hour: float = 0.0
    spread: float = 0.05
    chunks: int = 4
    detect_s: float = 5.0
    seed: int = 0
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        bounds: dict[str, Bound] = {
            **BOUNDS,
            "slow": (0, self.super_learners),
            "racks": (1, self.super_learners),
        }
        for name, bound in bounds.items():
            in_bound(
                f"a cluster: {name} ({OPTIONS.get(name, 'no option')})", getattr(self, name), bound
            )
        config = self.config
        if config.chooses_bits and not config.chooses_share:
            raise ConfigError(
                f"a cluster: wire_dtype=auto with exchange_share={config.exchange_share}: bits are chosen "
                "together with the share. Set exchange_share=auto too, or wire_dtype=int8."
            )
        smallest = FLOOR if config.chooses_share else config.first_share
        object.__setattr__(self, "chunks", max(self.chunks, math.ceil(1 / smallest)))
        if 60 * self.minutes < self.step_s:
            raise ConfigError(
                f"a cluster: {self.minutes:g} minutes (--minutes) are less than a step of {self.step_s:g} s "
                "(--step). Plan for at least one step."
            )
        self._check_links()
        if self.strategy.averages == "nothing":
            raise ConfigError(
                f"a cluster: averaging is {config.averaging!r}, which averages no models and is not "
                "simulated. Pass another one; the line 'synchronous' of its plan is of synchronous training."
            )

    def _check_links(self) -> None:
        """Raise ConfigError for links that the simulation would ignore."""
        n = self.super_learners
        if self.has_slow_links and n > _MOST_WITH_SLOW_LINKS:
            raise ConfigError(
                f"a cluster: {n} super learners with slow links (--slow-links, --racks), allowed are up to "
                f"{_MOST_WITH_SLOW_LINKS}. Plan for fewer."
            )
        if self.has_slow_links and self.slowness.max() == 1:
            raise ConfigError(
                f"a cluster: slow_links (--slow-links) is {self.slow_links:g}, which is no pair of {n} super "
                "learners. Raise it, or leave it out."
            )

    @property
    def strategy(self) -> Strategy:
        return parse(self.config.averaging)

    @property
    def model_nbytes(self) -> float:
        """Bytes of the model in messages."""
        return 4 * self.parameters

    @property
    def has_slow_links(self) -> bool:
        """Whether some links are slower than others."""
        return bool(
            (self.slow_links and self.slow_links_factor > 1)
            or (self.racks > 1 and self.racks_factor > 1)
        )

    @property
    def slowest_exchange_s(self) -> float:
        """Seconds of an exchange of the whole model over the slowest link; 0 if all are alike.

        The few chunks that stand for a model are larger than real ones, whose arrival shows that a peer
        lives.
        """
        slowest = float(self.slowness.max()) if self.has_slow_links else 0.0
        return slowest * self.model_nbytes / self.bytes_per_s

    @functools.cached_property
    def slowness(self) -> npt.NDArray[np.float64]:
        """How many times as long chunks take between super learners as on their links, shape (n, n)."""
        n = self.super_learners
        pairs = slow_links.of_pairs(n, self.slow_links, self.slow_links_factor, self.seed)
        return np.maximum(pairs, slow_links.of_racks(n, self.racks, self.racks_factor))

    @property
    def averaging_step_s(self) -> float:
        """Seconds that averaging adds to each step of the trainer; 0 without a calibration."""
        return self.calibration.step_s_per_byte * self.model_nbytes if self.calibration else 0.0

    @property
    def averaging_chunk_s(self) -> float:
        """Seconds of the engine's thread for one simulated chunk of the model; 0 without a calibration."""
        per_byte = self.calibration.chunk_s_per_byte if self.calibration else 0.0
        return per_byte * self.model_nbytes / self.chunks


@dataclass(frozen=True)
class Outcome:
    """Result of the simulation of a planned job.

    Attributes:
        steps_kept: steps of all super learners, as a share of those without waits, slowdowns and failures.
        steps: number of steps of each super learner.
        exchanges_per_step: exchanges per super learner and step, active and passive.
        staleness_mean, staleness_99: steps between a snapshot and the merge of its exchange: mean, and 99th
            percentile.
        staleness: number of merged chunks by their staleness in steps.
        decay: decay rate of the squared distance from the mean, per exchange of a super learner; None if
            unknown.
        decay_per_s: the same per second.
        decay_in_theory: for uniform random pairs with a given share, see theoretical_decay; None if no closed
            form is known.
        distances: (exchanges per super learner, squared distance of the models from their mean as a share of
            the distance at the start).
        bytes_per_s: bytes per second that a super learner sends until it fails: mean and largest.
        peers: number of peers with which a super learner has exchanged (its connections): mean and largest.
        failed: number of super learners that have failed.
        synchronous_kept: steps_kept of synchronous training with restarts, see synchronous_goodput.
        seconds_of_simulation, turns, us_per_turn: time that the simulation took, and its engine turns.
    """

    steps_kept: float
    steps: list[int]
    exchanges_per_step: float
    staleness_mean: float
    staleness_99: int
    staleness: list[int]
    decay: float | None
    decay_per_s: float | None
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
        """Return the outcome, together with the planned job, as a JSON object."""
        return json.dumps({"cluster": fields_of(cluster), **dataclasses.asdict(self)}, indent=1)


def fields_of(cluster: Cluster) -> dict[str, Any]:
    """Return the attributes of a cluster for JSON, of its options those that differ from the defaults."""
    return {**dataclasses.asdict(cluster), "config": cluster.config.changes(PATIENT)}


def plan(cluster: Cluster, progress: Callable[[float], None] | None = None) -> Outcome:
    """Simulate a planned job; return its speed, its staleness, and how fast the models approach their mean.

    Args:
        cluster: the planned job.
        progress: called now and then with the share of the job's duration that is over.

    Raises:
        AdpsgdError: if the strategy does not work with so many super learners.
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
    """Build the simulated job, not started, and return with it the seconds until each super learner fails."""
    random = np.random.default_rng(c.seed)
    models = [random.standard_normal((c.chunks, ELEMENTS)) for _ in range(c.super_learners)]
    # float32 as the planned model: 16 bits are half, and sums have all bits
    if c.config.wire_dtype:
        models = [model.astype(np.float32) for model in models]
    job = job_of(c, models, bytes_scale=c.model_nbytes / models[0].nbytes)
    return job, _strike(job, c)


def job_of(
    c: Cluster,
    models: Sequence[npt.NDArray[Any]],
    *,
    bytes_scale: float,
    local: LocalUpdates | None = None,
    joining: Callable[[int, int], npt.NDArray[Any]] | None = None,
    most: int = 1,
    largest: int | None = None,
    streams: bool = False,
    rare: tuple[Sequence[int], int] = ((), 1),
) -> Job:
    """Build the simulated job of a cluster, not started and without faults.

    Args:
        c: the cluster.
        models: per super learner an array (chunks, elements), which its engine averages in place.
        bytes_scale: bytes in messages per byte of the arrays.
        local: what a trainer does in a step, see Job; None: the models change by exchanges only.
        joining: function of (process, rank) that returns the array of a super learner that joins; None: none
            does.
        most: number of super learners that join at most.
        largest: number of super learners at any time, at most; None: one more than now.
        streams: whether messages travel over connections, which may end.
        rare: numbers of chunks that are not in every exchange, and their period: they are in one of so many.
    """
    network = Network(
        c.super_learners,
        c.seed + 1,
        c.latency_s,
        0.2,
        c.bytes_per_s,
        bytes_scale=bytes_scale,
        eager=1.0,
        room=0 if joining is None else most * (largest or c.super_learners + 1),
        streams=streams,
    )
    if c.has_slow_links:
        network.slow_paths(c.slowness.tolist())
    job = Job(
        network,
        c.seed + 2,
        slack=1.0,
        detect_s=c.detect_s,
        still=True,
        look_s=c.step_s / 50,
        checks=False,
        chunk_s=c.averaging_chunk_s * c.chunks / len(models[0]),
        config=c.config,
        local=local,
        rare=rare[0],
        rare_period=rare[1],
        every=_steps_between_copies(c, len(models[0])),
        **rounds_in(c.config.averaging, c.super_learners),
    )
    if c.config.chooses_share:
        chunks = len(models[0])
        chunk_s = c.averaging_chunk_s * c.chunks / chunks
        job.steer = Steering(c.config, chunks, chunk_s)
    _add(job, c, models)
    if joining is not None:
        plans = functools.partial(member_plans, c.config.averaging)
        rounds, _ = rounds_of(c.config.averaging, c.super_learners)
        job.expect(plans, joining, most, own_steps=rounds is None)
    return job


def _steps_between_copies(c: Cluster, chunks: int) -> int:
    """Return the steps between two copies of a chunk to the engine, for the first share of exchanges."""
    if not leaves_out(c.strategy.plan(0, c.super_learners), c.config):
        return 1
    return steps_between_copies(Moves(c.config.first_share, c.config.exchanges_per_step), chunks)


def _add(job: Job, c: Cluster, models: Sequence[npt.NDArray[Any]]) -> None:
    options = dataclasses.replace(
        options_of(c.config, c.super_learners, models[0].strides[0]),
        deadline_s=max(c.config.deadline_s, 2 * c.slowest_exchange_s),
    )
    for i, schedule in enumerate(schedules(c.config.averaging, c.super_learners)):
        step_s = (c.step_s + c.averaging_step_s) * (c.slow_factor if i < c.slow else 1.0)
        job.add(schedule, options, models[i], NEVER, step_s, c.spread)


def _strike(job: Job, c: Cluster) -> npt.NDArray[np.float64]:
    """Add failures at the times of a Poisson process; return the seconds until each super learner fails."""
    lived_s = np.full(c.super_learners, 60.0 * c.minutes)
    for i, at_s in failure_times(c):
        if at_s < lived_s[i]:
            job.strike(at_s, "crash", i)
            lived_s[i] = at_s
    return lived_s


def failure_times(c: Cluster) -> list[tuple[int, float]]:
    """Return (super learner, seconds until it fails), exponentially distributed; none without failures."""
    if c.failures_per_hour == 0:
        return []
    chance = Chance(c.seed)
    return [(i, chance.exponential(3600 / c.failures_per_hour)) for i in range(c.super_learners)]


# ---- what is measured ---------------------------------------------------------------------------


def _measured_s(c: Cluster) -> float:
    """Return the seconds in which distances are measured: 40 steps, with slow links at least 40 exchanges."""
    exchange_s = (
        float(c.slowness.mean()) * c.model_nbytes / c.bytes_per_s if c.has_slow_links else 0.0
    )
    return min(40 * max(c.step_s, exchange_s), 60 * c.minutes)


def _parts(c: Cluster) -> Iterator[tuple[float, bool]]:
    """Cut the simulated time into parts; yield (seconds, whether the distance is measured) for each part."""
    seconds, measured_s = 60 * c.minutes, _measured_s(c)
    yield from [(measured_s / 20, True)] * 20
    if seconds > measured_s:
        yield from [((seconds - measured_s) / 100, False)] * 100


def _distance(job: Job, n: int) -> tuple[float, float]:
    """Return the exchanges per super learner so far, and the models' squared distance from their mean."""
    models = np.array([job.model(i).ravel() for i in range(n)])
    square = float(((models - models.mean(axis=0)) ** 2).sum())
    return float(np.mean(job.exchanges_of())), square


def _relative(distances: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the squared distances as shares of the first one."""
    first = distances[0][1]
    return [(count, square / first if first > 0 else 0.0) for count, square in distances]


def _over_time(c: Cluster, distances: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the squared distances over seconds."""
    part_s = _measured_s(c) / len(distances)
    return [((i + 1) * part_s, square) for i, (_, square) in enumerate(distances)]


def _decay(distances: Sequence[tuple[float, float]]) -> float | None:
    """Fit the decay rate of the distance: minus the slope of its logarithm; None with too few points."""
    used = [(x, math.log(y)) for x, y in distances if y > 1e-20]
    if len(used) < 3 or used[-1][0] <= used[0][0]:
        return None
    x, y = np.array(used).T
    return float(-np.polyfit(x, y, 1)[0])


def theoretical_decay(n: int, share: float = 1.0) -> tuple[float, float] | None:
    """Decay rate of random pairs per exchange of a super learner; None for fewer than three super learners.

    Returns two bounds, with d = n / (2 (n - 1)): d if every pair exchanges at its own times (a Poisson
    process), and -log(1 - d) if all exchange at once in perfect matchings. One exchange per step is between.

    If an exchange moves a share of the chunks, each in turn, each chunk takes part in that share of the
    exchanges, so both bounds are `share` times as large: a byte sent reduces the distance as much as with
    whole exchanges. With aimed windows (windows.pxi) simulations stay between the bounds, too.

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
    rates = sent / np.maximum(lived_s, 1e-9)  # a super learner may fail at time 0
    n = c.super_learners
    # with 16 bits models come no closer than rounding lets them
    decay = None if c.config.wire_dtype else _decay(distances)
    return Outcome(
        # the first step is shorter, so made steps / expected steps may exceed 1
        steps_kept=min(float(steps.sum() / (n * seconds / c.step_s)), 1.0),
        steps=steps.tolist(),
        exchanges_per_step=float(sum(job.exchanges_of()) / max(steps.sum(), 1)),
        staleness_mean=float(np.arange(staleness.size) @ staleness / total),
        staleness_99=int(np.searchsorted(np.cumsum(staleness), 0.99 * total)),
        staleness=staleness.tolist(),
        decay=decay,
        decay_per_s=None if decay is None else _decay(_over_time(c, distances)),
        decay_in_theory=theoretical_decay(n, c.config.first_share)
        if c.strategy.name == "random_pairs"
        and not (c.strategy.plan(0, n).prefer_fast or c.has_slow_links or c.config.chooses_share)
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
    """The share of steps that synchronous training would keep, with checkpoints, and restarts after failures.

    A step lasts as long as that of the slowest super learner, plus a ring all-reduce of 2 (n - 1) / n models.
    A failure of any super learner, at n times the rate of one, costs the restart and on average half of the
    interval between checkpoints, which is Young's, sqrt(2 checkpoint_s / (n rate)). Failed super learners are
    replaced at once.

    Args:
        c: the planned job.
        checkpoint_s: seconds to write a checkpoint.
        restart_s: seconds from a failure to the next step.

    Source: Young, A first order approximation to the optimum checkpoint interval, CACM 1974.
    """
    n = c.super_learners
    slowest = c.step_s * (c.slow_factor if c.slow else 1.0) * (1 + c.spread * (n - 1) / (n + 1))
    kept = c.step_s / (slowest + allreduce_s(c))
    rate = n * c.failures_per_hour / 3600
    if rate == 0:
        return kept
    interval = checkpoint_interval_s(c, checkpoint_s)
    return kept / ((1 + checkpoint_s / interval) * (1 + rate * (restart_s + interval / 2)))


def allreduce_s(c: Cluster) -> float:
    """Seconds of a ring all-reduce of the model, in the order of ranks."""
    n = c.super_learners
    slowest = slow_links.of_ring(c.slowness) if c.has_slow_links else 1.0
    return (
        slowest * 2 * (n - 1) / n * c.model_nbytes / c.bytes_per_s + 2 * math.log2(n) * c.latency_s
    )


def checkpoint_interval_s(c: Cluster, checkpoint_s: float) -> float:
    """Seconds between checkpoints of `checkpoint_s` each, by Young's formula; infinite without failures."""
    rate = c.super_learners * c.failures_per_hour / 3600
    return math.sqrt(2 * checkpoint_s / rate) if rate > 0 else math.inf


# ---- a figure -----------------------------------------------------------------------------------


def draw(outcome: Outcome, path: str | Path) -> None:
    """Write a figure: decay of the models' distance, also in theory; staleness; steps per super learner."""
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
    steps.set_ylim(0, 1.05 * max(1, *outcome.steps))
    for axis in (decay, stale, steps):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
