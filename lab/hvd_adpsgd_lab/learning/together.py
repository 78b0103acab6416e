"""Gradients of several super learners in one call, with torch.func.vmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call, grad_and_value, vmap
from torch.utils import _pytree as pytree

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd_lab.learning.super_learner import Gradient, SuperLearner
from hvd_adpsgd_lab.learning.task import Task, seed_torch

MOST = 64  # super learners in a call


class Together:
    """Computes gradients ahead, where models stay as they are until the next update of their super learners.

    Args:
        task: the task.
        model: a module like those of the super learners.
        learners: the super learners, by process.
        seed: seed of the run.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        learners: Sequence[SuperLearner],
        seed: int,
    ):
        self._task, self._learners, self._seed = task, learners, seed
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._calls = _calls(task, model)
        self._stay = {i for i, learner in enumerate(learners) if learner.here}
        self._found: dict[int, Gradient] = {}
        self._batches: dict[int, Any] = {}
        self._used: list[bool] = []  # by parameter: whether the loss depends on it

    def stays(self, process: int) -> None:
        """The model of this super learner stays as it is until its next update."""
        self._stay.add(process)

    def changes(self, process: int) -> None:
        """The model of this super learner changes before its next update."""
        self._stay.discard(process)
        found = self._found.pop(process, None)
        if found is not None:
            self._batches[process] = found.batch

    def take(self, process: int, step: int, is_running: Callable[[int], bool]) -> Gradient:
        """Return the gradient of a super learner that updates now.

        Args:
            process: the super learner.
            step: its step.
            is_running: whether a super learner has not failed.
        """
        if process not in self._found:
            others = sorted(self._stay - self._found.keys() - {process})
            later = [i for i in others if i > process] + [i for i in others if i < process]
            self._compute([process, *filter(is_running, later)][:MOST], step)
        self._stay.discard(process)
        return self._found.pop(process)

    def _compute(self, group: list[int], step: int) -> None:
        """Compute the gradients of the first one of a group, and of all whose batches are shaped alike."""
        for i in group:
            if i not in self._batches:
                self._batches[i] = self._learners[i].next_batch()
        first = _shapes(self._batches[group[0]])
        group = [i for i in group if _shapes(self._batches[i]) == first]
        batches = [self._batches.pop(i) for i in group]
        learners = [self._learners[i] for i in group]
        stacked = {
            name: torch.stack([learner.parameters[k].detach() for learner in learners])
            for k, name in enumerate(self._names)
        }
        if not self._used:
            seed_torch(self._seed, group[0], step)
            self._used = self._found_used(learners[0], batches[0])
        seed_torch(self._seed, group[0], step)
        try:
            leaves = pytree.tree_map(lambda *each: torch.stack(each), *batches)
            gradients, losses = self._calls(stacked, leaves)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(
                f"{self._task.name}: torch.func.vmap (--vmap) cannot compute loss(model, batch) of several "
                f"super learners: {why:.200}. Leave --vmap out; the gradients are then computed one after "
                "the other."
            ) from error
        for row, (i, batch) in enumerate(zip(group, batches, strict=True)):
            own = [
                gradients[name][row] if used else None
                for name, used in zip(self._names, self._used, strict=True)
            ]
            self._found[i] = Gradient(losses[row].item(), batch, own)

    def _found_used(self, learner: SuperLearner, batch: Any) -> list[bool]:
        """Return by parameter whether it gets a gradient: an optimizer leaves one without as it is."""
        loss = self._task.loss_of(learner.model, batch)
        found: list[torch.Tensor | None] = []

        def backward() -> None:
            found.extend(torch.autograd.grad(loss, learner.parameters, allow_unused=True))

        self._task.run("loss(model, batch).backward()", backward)
        self._task.require_gradient(found)
        return [gradient is not None for gradient in found]


def _calls(task: Task, model: torch.nn.Module) -> Callable[[Mapping[str, Any], Any], Any]:
    """Return a function of stacked parameters and batches: stacked gradients and losses."""
    whole = _Whole(task, model)

    def loss_of(parameters: Mapping[str, Any], batch: Any) -> torch.Tensor:
        named = {f"model.{name}": value for name, value in parameters.items()}
        loss: torch.Tensor = functional_call(whole, named, (batch,))
        return loss

    return vmap(grad_and_value(loss_of), randomness="different")


class _Whole(torch.nn.Module):
    """The loss as a module, so that functional_call replaces the parameters wherever it uses them."""

    def __init__(self, task: Task, model: torch.nn.Module):
        super().__init__()
        self.task, self.model = task, model.train()

    def forward(self, batch: Any) -> torch.Tensor:
        return self.task.loss_of(self.model, batch)


def _shapes(batch: Any) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(batch)
    return (
        str(spec),
        *((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
    )
