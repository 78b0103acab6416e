"""The exact mean over super learners, for evaluation and for the final checkpoint."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd import world as worlds
from hvd_adpsgd.together import allgather_object, wait
from hvd_adpsgd.torch.agreement import described, require_same
from hvd_adpsgd.torch.averaging import live

__all__ = ["average_model", "consensus_distance", "mean_model", "settled"]


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Inside, nothing is pending: the parameters hold all that exchanges owe them.

    For checkpoints of every super learner's own model, `with hvd.settled(): torch.save(...)`: their
    mean is that of the run. All learners enter together; waits for the slowest super learner.

    Schemes in step go on from there as if nothing had been, but for those whose mean or round runs
    during the next gradient (delay_by_one:reading=a, lock_step:order=awc): it is taken in here, one
    step early, and the next gradient is that of the averaged models. a2cid2 goes on from the middle
    of its two models.
    """
    averagings = list(live())
    for averaging in averagings:
        averaging.settle()
    try:
        yield
    finally:
        for averaging in averagings:
            averaging.resume()


@torch.no_grad()
def average_model(model: torch.nn.Module) -> None:
    """Make the model the exact mean over super learners, in place; all learners call it together.

    Parameters and floating-point buffers become the mean of the leaders' values. If the model is
    being averaged by an optimizer, its engine first finishes what runs, and pending corrections are
    taken in, so that nothing is lost; of a2cid2's two models the middle counts.
    Waits for the slowest super learner: use it for evaluation and for the final checkpoint.

    Args:
        model: the same module on every learner.

    Raises:
        ModelMismatchError: on every learner, if their models differ.
    """
    world = worlds.current()
    if world.super_size == 1:
        return
    tensors = _floating(world, "average_model", model)
    concerned = [a for a in live() if any(t in a.parameters for t in tensors)]
    for averaging in concerned:
        averaging.settle()
    for tensor, mean in zip(tensors, _means(world, "average_model", tensors), strict=True):
        tensor.data.copy_(mean)
    for averaging in concerned:
        averaging.resume()


@torch.no_grad()
def consensus_distance(model: torch.nn.Module) -> float:
    """Root mean square distance of the super learners' models from their mean, exactly.

    sqrt((1/n) sum over super learners of |w_l - mean|^2), over parameters and floating-point buffers
    as they are; corrections on their way stay there. All learners call it together, and it waits for
    the slowest. `metrics()` has an estimate that costs nothing.

    Args:
        model: the same module on every learner.

    Raises:
        ModelMismatchError: on every learner, if their models differ.
    """
    world, doing = worlds.current(), "consensus_distance"
    if world.super_size == 1:
        return 0.0
    tensors = _floating(world, doing, model)
    square = sum(
        float((t.detach().cpu().double() - mean.double()).square().sum())
        for t, mean in zip(tensors, _means(world, doing, tensors), strict=True)
    )
    told = world.together(doing, lambda comm: allgather_object(comm, (world.is_leader, square)))
    squares = [square for leads, square in told if leads]
    return math.sqrt(sum(squares) / len(squares))


@torch.no_grad()
def mean_model(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, then buffers, on the host: the mean over the leaders of floating-point numbers.

    Other buffers are this learner's. All learners call it together.
    """
    world, doing = worlds.current(), "mean_model"
    means = iter(_means(world, doing, _floating(world, doing, model)))
    tensors = [*model.parameters(), *model.buffers()]
    return [next(means) if t.is_floating_point() else t.detach().cpu() for t in tensors]


def _floating(world: Any, doing: str, model: torch.nn.Module) -> list[torch.Tensor]:
    """The model's floating-point tensors, the same on every learner."""
    named = [*model.named_parameters(), *model.named_buffers()]
    require_same(world, doing, described(named))
    return [tensor for _, tensor in named if tensor.is_floating_point()]


def _means(world: Any, doing: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The mean of each tensor over the leaders, in its precision or float32 if it has less."""
    hosts = [
        t.detach().to("cpu", torch.float64 if t.dtype == torch.float64 else torch.float32)
        for t in tensors
    ]

    def operation(comm: Any) -> list[NDArray[Any]]:
        leaders = sum(allgather_object(comm, world.is_leader))
        return [_mean(comm, world.is_leader, leaders, h.contiguous().numpy()) for h in hosts]

    return [torch.from_numpy(mean) for mean in world.together(doing, operation)]


def _mean(comm: Any, is_leader: bool, leaders: int, mine: NDArray[Any]) -> NDArray[Any]:
    """Mean over the leaders, as a difference to one learner's values: equal models stay as they are."""
    reference = mine.copy()
    wait(comm.Ibcast(reference, root=0))
    difference = mine - reference if is_leader else np.zeros_like(mine)
    total = np.empty_like(mine)
    wait(comm.Iallreduce(difference, total))
    return np.asarray(reference + total / leaders)
