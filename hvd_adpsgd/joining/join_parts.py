"""What a joining super learner receives of a model of which each learner holds a part: from counterparts.

Each learner of the joining super learner receives the mean of its counterparts' parts of the parameters
and of averaged moments, and one counterpart's part of the optimizer's state. No learner sends or holds other
parts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.means import Entry, means_of_models
from hvd_adpsgd.training.sharded import is_sharded, local


class Outline(NamedTuple):
    """A DTensor without its values, in a message to a learner that holds another mesh.

    Attributes:
        shape, dtype, placements: those of the DTensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Any, ...]


def outlined(value: Any) -> Any:
    """Return a nested value of dicts and lists with an Outline in the place of each DTensor."""
    if isinstance(value, dict):
        return {key: outlined(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Outline):
        return type(value)(outlined(each) for each in value)
    if isinstance(value, torch.Tensor) and is_sharded(value):
        its: Any = value
        return Outline(tuple(its.shape), its.dtype, tuple(its.placements))
    return value


def filled(value: Any, mesh: Any) -> Any:
    """Return a nested value with zeros on `mesh` in the place of each Outline."""
    if isinstance(value, Outline):
        # takes long; where there are DTensors it is imported
        from torch.distributed.tensor import zeros

        shape, dtype, placements = value
        return zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    if isinstance(value, dict):
        return {key: filled(each, mesh) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(filled(each, mesh) for each in value)
    return value


def mesh_of(*optimizers: torch.optim.Optimizer) -> Any:
    """Return the mesh over which the optimizers' parameters are sharded; None if they are not."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    cut: list[Any] = [p for group in groups for p in group["params"] if is_sharded(p)]
    return cut[0].device_mesh if cut else None


def has_parts(model: torch.nn.Module) -> bool:
    """Whether a model has DTensors."""
    return any(is_sharded(tensor) for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def exchange_parts(
    world: World, model: torch.nn.Module, averagings: Sequence[Averaging], source: int, joins: int
) -> None:
    """Give the joining super learner's learners their parts; all learners call it while averaging pauses.

    Does nothing for a model that is not sharded. `source` and `joins` are super_ranks; `world` includes the
    joining super learner. The order of `averagings` is the same on all learners.
    """
    named = [tensor for tensor in (*model.parameters(), *model.buffers()) if is_sharded(tensor)]
    moments = [m for averaging in averagings for m in averaging.rule.moments() if is_sharded(m)]
    averaged = {id(m) for m in moments}
    states = [t for a in averagings for t in _state(a) if id(t) not in averaged]
    here, doing = world.super_rank, "admit"
    _receive(world, doing, [*named, *moments], float(here != joins), joins)
    _receive(world, doing, states, float(here == source), joins)


def _receive(
    world: World, doing: str, tensors: list[torch.Tensor], weight: float, joins: int
) -> None:
    if not tensors:
        return
    is_new = world.super_rank == joins
    wanted = [is_new] * len(tensors)
    entries = [Entry("a part of the optimizer's state", tensor) for tensor in tensors]
    means, _ = means_of_models(world, doing, entries, weight, wanted=wanted)
    for tensor, mean in zip(tensors, means, strict=False):
        assert mean is not None
        local(tensor).copy_(mean)


def _state(averaging: Averaging) -> list[torch.Tensor]:
    """Return the DTensors of an optimizer's state and of the update rule, in one order on all learners."""
    optimizer = averaging.optimizer()
    assert optimizer is not None, "`held` keeps the optimizers"
    found = state_of(optimizer)
    for _, tensors in sorted(averaging.rule.tensors().items()):
        found += tensors
    return [each for each in found if is_sharded(each)]


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state, in one order on all learners."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            its = optimizer.state.get(parameter, {})
            found += [its[key] for key in sorted(its)]
    return [each for each in found if isinstance(each, torch.Tensor)]
