"""One super learner that trains: its model, optimizer, batches and update rule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hvd_adpsgd.engine.shard_memory import NONE, Arrivals, Pace
from hvd_adpsgd.errors import UnsupportedOptimizerError
from hvd_adpsgd.strategies import DelayedGradients, Plan
from hvd_adpsgd.training.shared_moments import share, shareable
from hvd_adpsgd.training.update_rules import make_rule
from hvd_adpsgd_lab.learning.memory import Layout
from hvd_adpsgd_lab.learning.task import Task, require_finite, seed_torch


class SuperLearner:
    """A super learner's part of a step, without the exchanges.

    Args:
        task: what it trains.
        model: its own module.
        number: its number.
        stream: its batches.
        plan: the strategy's plan for it.
        rate: exchanges of each chunk per step.
        seed: the run's seed.
        chunks: least number of chunks.
        training: returns how many super learners train, which share their moments; None: they do not.
        moments_period: shared moments are in one of so many exchanges.

    Attributes:
        number, model, optimizer, schedule, rule: its parts.
        parameters: the tensors that it trains.
        layout, memory: the array of chunks that its engine averages, and where its tensors lie in it.
        averages_gradients: whether it averages gradients in place of models.
        arrivals: exchanges whose corrections were added last.
        here: whether it trains: a joining super learner does not from the start.
        steps, samples: what it has made and used.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        number: int,
        stream: Iterator[Any],
        plan: Plan,
        rate: float,
        seed: int,
        chunks: int,
        training: Callable[[], int] | None = None,
        moments_period: int = 1,
    ):
        self.number, self.model, self._task, self._seed = number, model.train(), task, seed
        named = trained(model)
        self.parameters = [p for _, p in named]
        self.optimizer = task.new_optimizer(self.parameters, model)
        self.schedule = task.new_schedule(self.optimizer)
        self._stream = stream
        self.averages_gradients = isinstance(plan.rule, DelayedGradients)
        self.here, self.steps, self.samples = True, 0, 0
        self.arrivals, self._pace = NONE, Pace()
        with torch.no_grad():
            self.rule = make_rule(plan.rule, named, rate)
            kind = shareable(self.optimizer)
            if training is not None and not isinstance(kind, str):
                # so that parts of moments are whole chunks
                chunks = max(chunks, 4 * moments_period)
                asked = lambda: plan.weight, training, lambda: self.arrivals
                self.rule = share(kind, named, lambda: self.optimizer, *asked)
            averaged = [tensor for _, tensor in self.rule.averaged()]
            self.layout = Layout(averaged, chunks)
            self.memory = self.layout.empty()
            self.layout.bind(averaged, self.memory)
            self.rule.start()

    def rare_chunks(self) -> range:
        """Return the numbers of the chunks of shared moments alone, which are not in every exchange."""
        count, chunks = len(self.rule.moments()), self.layout.chunks
        if not count:
            return range(chunks, chunks)
        return range(math.ceil(self.layout.offsets[-count] / self.layout.elements), chunks)

    def update(self, step: int, time_s: float) -> float:
        """Make the local part of a step: gradient, optimizer, and what the rule does before corrections.

        Args:
            step: number of the step.
            time_s: virtual time, for messages.

        Returns:
            The loss of the batch.

        Raises:
            NonFiniteModelError: if the loss is not finite.
        """
        batch = next(self._stream)
        loss = self._gradient(batch, step)
        require_finite(self._task, loss, step, self.number, time_s)
        if self.averages_gradients and any(_is_sparse(p) for p in self.parameters):
            raise UnsupportedOptimizerError(
                f"{self._task.name}: the model has sparse gradients, which delayed_gradients cannot average. "
                "Make them dense, as nn.Embedding(sparse=False), or use another strategy."
            )
        self.steps += 1
        self.samples += batch_size(batch)
        with torch.no_grad():
            self.rule.before_optimizer()
        if step > 0 or not self.averages_gradients:
            self._task.run("optimizer(parameters).step()", self._optimizer_step)
        if self.schedule is not None:
            self._task.run("schedule(optimizer).step()", self.schedule.step)
        self.rule.after_update()
        self.optimizer.zero_grad()  # frees the gradients: only one super learner has some at a time
        with torch.no_grad():
            self.rule.pass_time(step)
            self.rule.before_corrections()
        return loss

    def _optimizer_step(self) -> None:
        if self.rule.in_update:
            self.optimizer.step(self._before_update)  # after the file's step hooks, which may clip
        else:
            self.optimizer.step()

    @torch.no_grad()
    def _before_update(self) -> Any:
        self.rule.before_update()

    def _gradient(self, batch: Any, step: int) -> float:
        seed_torch(self._seed, self.number, step)
        loss = self._task.loss_of(self.model, batch)
        self._task.run("loss(model, batch).backward()", loss.backward)
        if step == 0:
            self._task.require_gradient([p.grad for p in self.parameters])
        return loss.item()

    @torch.no_grad()
    def after_corrections(self, exchanges: float, covered: float) -> None:
        """Corrections have been added to the model, in a step.

        Args:
            exchanges: see Store.arrivals.
            covered: see Store.covered.
        """
        self.arrivals = Arrivals(exchanges, self._pace.mean_with(covered))
        self.rule.after_corrections()

    @torch.no_grad()
    def before_round(self) -> None:
        """A round for which the step waits begins."""
        self.rule.before_round()

    @torch.no_grad()
    def after_round(self) -> None:
        """The correction of that round has been added to the model."""
        self.rule.after_round()

    @torch.no_grad()
    def before_pause(self) -> None:
        """All corrections are going to be applied, so that a super learner may join."""
        self.arrivals = NONE
        self.rule.before_corrections()

    @torch.no_grad()
    def after_pause(self) -> None:
        """They have been applied."""
        self.rule.after_corrections()
        self.rule.settle()

    def close(self) -> None:
        """Drop the rule, which holds this super learner."""
        del self.rule

    def state(self) -> dict[str, Any]:
        """Return a copy of what a joining super learner receives besides the model."""
        return copy.deepcopy(
            {
                "optimizer": self.optimizer.state_dict(),
                "schedule": None if self.schedule is None else self.schedule.state_dict(),
                "buffers": dict(self.model.named_buffers()),
                # where gradients are averaged, the mean that the memory holds is no model
                "model": self._own() if self.averages_gradients else [],
                "rule": {} if self.rule.own else self.rule.tensors(),
            }
        )

    def _own(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.parameters]

    @torch.no_grad()
    def join(self, state: dict[str, Any]) -> None:
        """Begin with the mean model, which the memory holds, and another super learner's `state`."""
        self.here = self.rule.received = True
        self.optimizer.load_state_dict(state["optimizer"])
        self.rule.reload()
        self.rule.received = False
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.averages_gradients:
            for parameter, value in zip(self.parameters, state["model"], strict=True):
                parameter.copy_(value)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.rule.start()
        for name, tensors in self.rule.tensors().items():
            for own, given in zip(tensors, state["rule"].get(name, tensors), strict=True):
                own.copy_(given)


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return (name, parameter) of all that are trained."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _is_sparse(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.layout != torch.strided


def batch_size(batch: Any) -> int:
    """Return the length of the first tensor or array with a dimension in a batch; 1 if there is none."""
    return _length(batch) or 1


def _length(batch: Any) -> int | None:
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((found for item in batch if (found := _length(item)) is not None), None)
    return None
