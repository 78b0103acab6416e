"""Baselines that are no strategies of the library: synchronous training, and DiLoCo. They have no engines."""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies import Plan
from hvd_adpsgd_lab.learning.curve import Curve, Vector
from hvd_adpsgd_lab.learning.lock_step import LockStepClock, QuorumClock
from hvd_adpsgd_lab.learning.outcome import Outcome, digest_of
from hvd_adpsgd_lab.learning.run import Training
from hvd_adpsgd_lab.learning.super_learner import SuperLearner, batch_size
from hvd_adpsgd_lab.learning.task import require_finite, seed_torch
from hvd_adpsgd_lab.simulation.bounds import Bound, in_bound

_BOUNDS: dict[str, Bound] = {
    "period": (1, 10**9),
    "rate": (1e-9, 1e3),
    "momentum": (0.0, 0.999999),
    "quorum": (1e-6, 1.0),
}


@dataclass(frozen=True)
class Synchronous:
    """Synchronous data parallelism: a step with the mean gradient of all, after a ring all-reduce."""

    name: ClassVar[str] = "synchronous"
    period: ClassVar[int] = 1


@dataclass(frozen=True)
class DiLoCo:
    """Local steps, then an outer step of Nesterov SGD with the mean difference of the models.

    After every `period` steps, with x the model that all began with and w_i the models: one step of
    SGD(rate, momentum, nesterov=True) with the gradient x - mean(w_i) makes x' of x, and all begin with x'.
    The optimizers of the local steps keep their states.

    Args:
        period: local steps between two outer steps.
        rate: learning rate of the outer steps.
        momentum: momentum of the outer steps.
        quorum: share of the super learners with which an outer step takes place while others have failed; 1:
            a failure stops all, which restart from a checkpoint.

    Source: Douillard et al., DiLoCo, arXiv:2311.08105; the rate and the momentum are theirs.
    """

    period: int = 50
    rate: float = 0.7
    momentum: float = 0.9
    quorum: float = 1.0
    name: ClassVar[str] = "diloco"

    def __post_init__(self) -> None:
        for name, bound in _BOUNDS.items():
            in_bound(f"diloco: {name}", getattr(self, name), bound)


Baseline = Synchronous | DiLoCo
BASELINES: dict[str, type[Baseline]] = {"synchronous": Synchronous, "diloco": DiLoCo}


def parse_baseline(spec: str) -> Baseline | None:
    """Return the baseline that a spec describes, as "diloco:period=20"; None if it names none.

    Raises:
        ConfigError: for an unknown key or a bad value.
    """
    name, _, tail = spec.partition(":")
    kind = BASELINES.get(name.strip())
    if kind is None:
        return None
    known = {f.name: int if f.type == "int" else float for f in dataclasses.fields(kind)}
    arguments: dict[str, Any] = {}
    for item in filter(None, (piece.strip() for piece in tail.split(","))):
        key, _, text = item.partition("=")
        try:
            if key in arguments:
                raise KeyError(key)
            arguments[key] = known[key](text)
        except (KeyError, ValueError):
            keys = ", ".join(known) or "nothing after its name"
            raise ConfigError(
                f"bad argument {item!r} in {spec!r}: {kind.name} takes {keys}, each once. Correct or "
                "remove it."
            ) from None
    return kind(**arguments)


def run_baseline(baseline: Baseline, training: Training) -> Outcome:
    """Train with a baseline."""
    kind = _SynchronousRun if isinstance(baseline, Synchronous) else _DiLoCoRun
    return kind(baseline, training).run()


class _LockStepRun(ABC):
    """A run in which all that train make their steps at the same time."""

    def __init__(self, baseline: Baseline, training: Training):
        cluster, budget = training.cluster, training.budget
        self.baseline, self.task, self.seed = baseline, training.task, cluster.seed
        self.n = cluster.super_learners
        self.curve = Curve(self.task, training.model, self.n, cluster.seed)
        self._budget, self._progress, self._cluster = budget, training.progress, cluster
        steps = budget.seconds / cluster.step_s if budget.steps is None else budget.steps / self.n
        self.clock: LockStepClock | QuorumClock = LockStepClock(
            cluster, training.faults, steps * cluster.step_s
        )
        self.samples, self.made = 0, [0] * self.n

    @abstractmethod
    def step(self, number: int) -> None:
        """Make a step on all super learners."""

    @abstractmethod
    def meet(self, trained: set[int]) -> None:
        """Average what these have trained, after every `period` steps."""

    @abstractmethod
    def vectors(self) -> Iterator[Vector]:
        """Yield the parameters of each model."""

    @abstractmethod
    def models(self) -> list[torch.nn.Module]:
        """Return the modules."""

    def run(self) -> Outcome:
        """Train until the budget is used."""
        budget, clock, number, point = self._budget, self.clock, 0, 1
        self._measure()
        ended = "steps"
        while budget.steps is None or sum(self.made) < budget.steps:
            clock.step()
            if clock.now_s > budget.seconds:
                ended = "time"
                break
            self.step(number)
            for i in clock.training:
                self.made[i] += 1
            number += 1
            if number % self.baseline.period == 0:
                trained = set(clock.training)
                clock.meet(budget.seconds)
                self.meet(trained)
            used = sum(self.made) / budget.steps if budget.steps else clock.now_s / budget.seconds
            self._progress(min(used, 1.0))
            if used * budget.points >= point:
                self._measure()
                point = math.floor(used * budget.points) + 1
        if self.curve.points[-1].steps != sum(self.made):
            self._measure()
        return self._outcome(number, ended)

    def _measure(self) -> None:
        clock = self.clock
        self.curve.add(
            min(clock.now_s, self._budget.seconds),
            sum(self.made),
            self.samples,
            self.vectors,
            self.models(),
            len(clock.training),
        )

    def _outcome(self, number: int, ended: str) -> Outcome:
        points = self.curve.points
        ring = 2 * (self.n - 1) / self.n * self._cluster.model_nbytes
        fields = dataclasses.fields(self.baseline)
        values = ",".join(f"{f.name}={getattr(self.baseline, f.name)}" for f in fields)
        return Outcome(
            strategy=f"{self.baseline.name}:{values}" if values else self.baseline.name,
            points=points,
            steps=self.made,
            steps_per_s=sum(self.made) / points[-1].time_s if points[-1].time_s else 0.0,
            exchanges_per_step=0.0,
            staleness_mean=0.0,
            staleness_99=0,
            staleness=[],
            sent_bytes=ring * (number // self.baseline.period),
            failed=self.clock.failed,
            joined=self.clock.joined,
            ended=ended,
            digest=digest_of(self.curve.model),
            model=self.curve.model,
        )


class _SynchronousRun(_LockStepRun):
    """One model, and the batches of all super learners."""

    def __init__(self, baseline: Baseline, training: Training):
        super().__init__(baseline, training)
        self._model = copy.deepcopy(self.curve.model).train()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = self.task.new_optimizer(self._parameters, self._model)
        self._schedule = self.task.new_schedule(self._optimizer)
        self._streams = [self.task.stream(i, self.n, self.seed) for i in range(self.n)]

    def step(self, number: int) -> None:
        """A step with the mean gradient."""
        for i, stream in enumerate(self._streams):
            batch = next(stream)
            seed_torch(self.seed, i, number)
            loss = self.task.loss_of(self._model, batch)
            require_finite(self.task, loss.item(), number, i, self.clock.now_s)
            self.task.run("loss(model, batch).backward()", (loss / self.n).backward)
            self.curve.add_loss(loss.item())
            self.samples += batch_size(batch)
        if number == 0:
            self.task.require_gradient([p.grad for p in self._parameters])
        self.task.run("optimizer(parameters).step()", self._optimizer.step)
        if self._schedule is not None:
            self.task.run("schedule(optimizer).step()", self._schedule.step)
        self._optimizer.zero_grad()

    def meet(self, trained: set[int]) -> None:
        """The gradients are averaged already."""

    def vectors(self) -> Iterator[Vector]:
        """Yield the parameters of the one model."""
        yield self.curve.layout.read(self._parameters)

    def models(self) -> list[torch.nn.Module]:
        """Return the one model."""
        return [self._model]


class _DiLoCoRun(_LockStepRun):
    """n models, and the outer optimizer."""

    def __init__(self, baseline: Baseline, training: Training):
        super().__init__(baseline, training)
        assert isinstance(self.baseline, DiLoCo)
        if self.baseline.quorum < 1:
            self.clock = QuorumClock(
                training.cluster, training.faults, self.baseline.quorum, training.replace_s
            )
        self._learners = [
            SuperLearner(
                self.task,
                copy.deepcopy(self.curve.model),
                i,
                self.task.stream(i, self.n, self.seed),
                Plan.nobody(),
                0.0,
                self.seed,
                1,
            )
            for i in range(self.n)
        ]
        # samples in the model, and those of each at the last mean
        self._kept, self._before = (
            0,
            [0] * self.n,
        )
        self._start = [p.detach().clone() for p in self._learners[0].parameters]
        self._outer = torch.optim.SGD(
            self._start,
            lr=self.baseline.rate,
            momentum=self.baseline.momentum,
            nesterov=self.baseline.momentum > 0,
        )

    def step(self, number: int) -> None:
        """A local step of each."""
        for i in sorted(self.clock.training):
            self.curve.add_loss(self._learners[i].update(number, self.clock.now_s))
        self.samples = self._kept + self._samples_of(self.clock.training)

    def _samples_of(self, trained: set[int]) -> int:
        """Return the samples that these have used since the last mean; those of failed ones are lost."""
        return sum(self._learners[i].samples - self._before[i] for i in trained)

    @torch.no_grad()
    def meet(self, trained: set[int]) -> None:
        """An outer step with these models. All begin with its model; replacements have new optimizers."""
        self._kept += self._samples_of(trained)
        self._before = [learner.samples for learner in self._learners]
        for i, start in enumerate(self._start if trained else ()):
            mean = torch.zeros_like(start, dtype=torch.float64)
            for number in sorted(trained):
                mean += self._learners[number].parameters[i]
            mean /= len(trained)
            start.grad = start - mean.to(start.dtype)
        self._outer.step()  # nothing where all have failed: there are no gradients
        self._outer.zero_grad()
        for learner in self._learners:
            for own, start in zip(learner.parameters, self._start, strict=True):
                own.copy_(start)
        for i in self.clock.training - trained:
            self._learners[i].optimizer.state.clear()

    def vectors(self) -> Iterator[Vector]:
        """Yield the parameters of each model that trains."""
        return (self.curve.layout.read(self._learners[i].parameters) for i in self._measured())

    def models(self) -> list[torch.nn.Module]:
        """Return the models that train."""
        return [self._learners[i].model for i in self._measured()]

    def _measured(self) -> list[int]:
        return sorted(self.clock.training) or list(range(self.n))
