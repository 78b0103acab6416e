"""Real engines and the super learners that train under them: the local updates of a simulated job."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.training.shared_moments import SHARED, shareable
from hvd_adpsgd.training.update_rules import UpdateRule
from hvd_adpsgd_lab.learning.curve import Curve, Vector
from hvd_adpsgd_lab.learning.outcome import Outcome, digest_of
from hvd_adpsgd_lab.learning.super_learner import SuperLearner
from hvd_adpsgd_lab.learning.task import Task
from hvd_adpsgd_lab.simulation.chance import Chance
from hvd_adpsgd_lab.simulation.planner import Cluster, failure_times, job_of
from hvd_adpsgd_lab.simulation.scenario import Fault

log = logging.getLogger("hvd_adpsgd")
_NEVER_ENDS = 1e12  # times the time of a step
_STREAMS = 1_000_003  # between the seeds of the batches of super learners that join
_MOST_ENGINES, _MOST_STREAMS = 1_000_000, 16_000_000  # a few hundred bytes of memory each


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long a run is, and how often it is measured.

    Attributes:
        steps: steps of all super learners together after which it ends; None: time alone ends it.
        seconds: virtual seconds after which it ends.
        points: number of points after the first one.
    """

    steps: int | None
    seconds: float
    points: int


@dataclasses.dataclass(frozen=True)
class Training:
    """What a run trains, on which cluster, and for how long.

    Attributes:
        task: what is trained.
        model: model(), of which each super learner has a copy.
        cluster: the job.
        faults: checked faults, beside those of the cluster.
        budget: how long it is.
        progress: called with the share of the budget that is used.
        replace_s: seconds from the failure of a super learner until a replacement asks to join; None: none
            does.
        own_steps: steps after which a super learner waits for the others; None: its share of the data is what
            it is fast enough for.
    """

    task: Task
    model: torch.nn.Module
    cluster: Cluster
    faults: Sequence[Fault]
    budget: Budget
    progress: Callable[[float], None]
    replace_s: float | None = None
    own_steps: int | None = None


class EngineRun:
    """A run of a strategy of the library: n engines, and the hooks that their simulated trainers call.

    Args:
        training: what is trained, and where.
    """

    def __init__(self, training: Training):
        task, model, cluster = training.task, training.model, training.cluster
        faults = training.faults
        self._task, self._cluster, self._faults = task, cluster, faults
        self._budget, self._progress = training.budget, training.progress
        strategy = cluster.strategy
        self._shares = cluster.config.moments != "own" and strategy.is_gossip
        self._moments_period = cluster.config.period_of_moments
        n = cluster.super_learners
        self._curve = Curve(task, model, n, cluster.seed)
        self._learners = [self._learner(model, i, i, n) for i in range(n)]
        if cluster.config.moments != "own":
            _check_moments(training, strategy, self._learners[0].optimizer)
        self._model, self._ranks = model, [*range(n)]
        self._replace_s, self._own_steps = training.replace_s, training.own_steps
        self._lives = Chance(cluster.seed + 3)
        self._gift: dict[str, Any] = {}
        self._joined = 0
        self._steps, self._next_point = 0, 0
        self._job = self._make_job()

    def _learner(self, model: torch.nn.Module, process: int, number: int, n: int) -> SuperLearner:
        c = self._cluster
        return SuperLearner(
            self._task,
            copy.deepcopy(model),
            process,
            self._task.stream(number, n, c.seed + _STREAMS * max(0, process - c.super_learners)),
            c.strategy.plan(number, n),
            c.config.exchanges_per_step * c.config.first_share,
            c.seed,
            c.chunks,
            self._training_number if self._shares else None,
            self._moments_period,
        )

    def _newcomer(self, process: int, number: int) -> Any:
        """Make a super learner that is being admitted; return the array that its engine averages."""
        assert len(self._learners) == process
        self._ranks.append(number)
        newcomer = self._learner(self._model, process, number, max(self._ranks) + 1)
        newcomer.here = False
        self._learners.append(newcomer)
        return newcomer.memory

    def _make_job(self) -> Any:
        c, learners = self._cluster, self._learners
        first = learners[0]
        averaged = sum(tensor.numel() for _, tensor in first.rule.averaged())
        trained = sum(p.numel() for p in first.parameters)
        nbytes = c.model_nbytes * averaged / trained * first.layout.itemsize / 4
        n, most = c.super_learners, self._most_newcomers()
        growth = sum(fault.kind == "join" and fault.who >= n for fault in self._faults)
        streams = any(fault.kind == "break" for fault in self._faults)
        _require_room(n, most, n + growth, streams)
        job = job_of(
            c,
            [learner.memory for learner in learners[:n]],
            bytes_scale=nbytes / first.memory.nbytes,
            local=self,
            joining=self._newcomer if most else None,
            most=most,
            largest=n + growth,
            streams=streams,
            rare=(first.rare_chunks(), self._moments_period),
        )
        for i, at_s in failure_times(c):
            self._fails(job, i, i, at_s)
        for fault in self._faults:
            if fault.kind == "crash":
                self._fails(job, fault.who, fault.who, fault.at_s)
            else:
                job.strike(fault.at_s, fault.kind, fault.who, *fault.arguments())
        return job

    def _most_newcomers(self) -> int:
        """Return how many super learners may join: about twice as many as are expected to fail."""
        c, budget = self._cluster, self._budget
        asked = sum(fault.kind == "join" for fault in self._faults)
        if self._replace_s is None:
            return asked
        seconds = budget.seconds
        if budget.steps is not None:
            slowest = c.slow_factor if c.slow else 1.0
            seconds = min(seconds, 2 * budget.steps / c.super_learners * c.step_s * slowest)
        failures = c.super_learners * c.failures_per_hour * seconds / 3600
        crashes = sum(fault.kind == "crash" for fault in self._faults)
        return asked + 2 * crashes + math.ceil(2 * failures + 6 * math.sqrt(failures))

    def _fails(self, job: Any, process: int, number: int, at_s: float) -> None:
        """Let a process crash in `at_s` seconds, and a replacement ask to join later."""
        job.strike(at_s, "crash", process)
        if self._replace_s is not None:
            job.strike(at_s + self._replace_s, "join", number)

    # ---- what the simulated trainers call -----------------------------------------------------

    def update(self, process: int, step: int) -> None:
        """Make the local part of a step."""
        self._curve.add_loss(self._learners[process].update(step, self._job.now_s))
        self._steps += 1
        if self._own_steps is not None and self._learners[process].steps >= self._own_steps - 1:
            self._job.strike(0.0, "slow", process, _NEVER_ENDS)  # the step after the next one
        if self._budget.steps is not None:
            self._progress(self._steps / self._budget.steps)
            self._job.halted = self._steps >= self._next_point

    def after_corrections(self, process: int) -> None:
        """See SuperLearner."""
        arrivals = self._job.arrivals(self._job.seat_of(process))
        self._learners[process].after_corrections(*arrivals)

    def before_round(self, process: int) -> None:
        """See SuperLearner."""
        self._learners[process].before_round()

    def after_round(self, process: int) -> None:
        """See SuperLearner."""
        self._learners[process].after_round()

    def before_pause(self, process: int) -> None:
        """See SuperLearner."""
        self._learners[process].before_pause()

    def after_pause(self, process: int) -> None:
        """See SuperLearner."""
        self._learners[process].after_pause()

    def gives(self, process: int) -> None:
        """Keep what the joining super learner receives from this one."""
        self._gift = self._learners[process].state()

    def joins(self, process: int) -> None:
        """The joining super learner has the mean model, and receives the rest."""
        self._learners[process].join(self._gift)
        self._gift = {}
        self._joined += 1
        rule = self._cluster.strategy.plan(0, max(self._ranks) + 1).rule
        for learner in self._learners:
            learner.rule.adapt(rule)
        hourly = self._cluster.failures_per_hour
        if self._replace_s is not None and hourly > 0:
            lives_s = self._lives.exponential(3600 / hourly)
            self._fails(self._job, process, self._ranks[process], lives_s)

    def stays_out(self, number: int) -> None:
        """A super learner has not been admitted: another one asks in its place, if that is still free."""
        taken = any(
            rank == number and self._job.is_running(i) for i, rank in enumerate(self._ranks)
        )
        if self._replace_s is not None and not taken:
            self._job.strike(max(self._replace_s, self._cluster.step_s), "join", number)

    # ---- the run ------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train until the budget is used, or no super learner trains any more."""
        budget = self._budget
        self._measure()
        if budget.steps is None:
            for i in range(budget.points):
                self._job.run_for(budget.seconds / budget.points)
                self._progress((i + 1) / budget.points)
                self._measure(budget.seconds * (i + 1) / budget.points)
            return self._outcome("time" if self._training() else "nobody trains")
        self._next_point = self._due(1)
        self._job.run_for(budget.seconds)
        number = 1
        while self._job.halted:
            self._measure()
            if self._steps >= budget.steps:
                return self._outcome("steps")
            number += 1
            self._next_point = self._due(number)
            self._job.halted = False
            self._job.run_for(0)
        self._measure()
        return self._outcome("time" if self._training() else "nobody trains")

    def close(self) -> None:
        """Drop job and super learners, which hold this run, so that no garbage collector is needed."""
        for learner in self._learners:
            learner.close()
        self._learners, self._job = [], None

    def _due(self, number: int) -> int:
        assert self._budget.steps is not None
        return max(self._steps + 1, self._budget.steps * number // self._budget.points)

    def _training(self) -> list[int]:
        """The super learners that train now."""
        return [i for i, each in enumerate(self._learners) if each.here and self._job.is_running(i)]

    def _training_number(self) -> int:
        return max(len(self._training()), 1)

    def _measure(self, time_s: float | None = None) -> None:
        training = self._training() or [i for i, each in enumerate(self._learners) if each.here]
        samples = sum(each.samples for each in self._learners)
        self._curve.add(
            self._job.now_s if time_s is None else time_s,
            self._steps,
            samples,
            lambda: map(self._vector, training),
            [self._learners[i].model for i in training],
            len(self._training()),
        )

    def _vector(self, process: int) -> Vector:
        """A super learner's parameters with the corrections that they lack, as its rule settles them."""
        learner, layout = self._learners[process], self._curve.layout
        if learner.averages_gradients:
            return layout.read(learner.parameters)
        values = self._job.model(self._job.seat_of(process)).reshape(-1)
        if type(learner.rule).settle is UpdateRule.settle:
            return values[: layout.extent]
        return _settled(learner, values, layout)

    def _outcome(self, ended: str) -> Outcome:
        job, points = self._job, self._curve.points
        steps = [learner.steps for learner in self._learners]
        staleness = np.array(job.staleness())
        total = max(int(staleness.sum()), 1)
        sent = [nbytes for nbytes, _, _ in job.traffic()]
        return Outcome(
            strategy=self._cluster.strategy.spec(),
            points=points,
            steps=steps,
            steps_per_s=sum(steps) / points[-1].time_s if points[-1].time_s else 0.0,
            exchanges_per_step=float(sum(job.exchanges_of()) / max(sum(steps), 1)),
            staleness_mean=float(np.arange(staleness.size) @ staleness / total),
            staleness_99=int(np.searchsorted(np.cumsum(staleness), 0.99 * total)),
            staleness=staleness.tolist(),
            sent_bytes=sum(sent) / len(self._learners),
            failed=sum(job.summary()["dead"]),
            joined=self._joined,
            ended=ended,
            digest=digest_of(self._curve.model),
            model=self._curve.model,
        )


def _check_moments(
    training: Training, strategy: Strategy, optimizer: torch.optim.Optimizer
) -> None:
    """Raise ConfigError if moments are to be shared and cannot be; warn where Adam's kin keep their own."""
    found: object = shareable(optimizer)
    if not strategy.is_gossip:
        found = f"{strategy.spec()} is more than gossip"
    if not isinstance(found, str):
        return
    if training.cluster.config.moments == "shared":
        raise ConfigError(
            f"{training.task.name}: moments is 'shared', and {found}. Leave it out, or use one of torch's "
            f"{SHARED} with random_pairs or a ring."
        )
    if strategy.is_gossip and any("betas" in group for group in optimizer.param_groups):
        log.warning(
            "moments are not shared by super learners: %s. Use torch's Adam or AdamW; moments=own "
            "silences this line.",
            found,
        )


def _require_room(n: int, most: int, largest: int, streams: bool) -> None:
    """Raise ConfigError if the engines of all admissions, or the connections between them, are too many."""
    engines = n + most * largest
    bound = math.isqrt(_MOST_STREAMS) if streams else _MOST_ENGINES
    if engines > bound:
        raise ConfigError(
            f"train: {n} super learners and up to {most} that join need {engines} engines, at most {bound} "
            f"are possible{' with the fault break' if streams else ''}. Pass fewer minutes or steps, or a "
            "lower --fail."
        )


@torch.no_grad()
def _settled(learner: SuperLearner, values: Vector, layout: Any) -> Vector:
    """Return what the rule's `settle` makes of a model with all its corrections; change nothing."""
    rule = learner.rule
    tensors = [*learner.parameters, *(t for group in rule.tensors().values() for t in group)]
    saved = [tensor.clone() for tensor in tensors]
    rule.before_corrections()
    layout.write(learner.parameters, values)
    rule.after_corrections()
    rule.settle()
    settled: Vector = layout.read(learner.parameters)
    for tensor, value in zip(tensors, saved, strict=True):
        tensor.copy_(value)
    return settled
