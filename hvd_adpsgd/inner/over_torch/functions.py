"""Operations of horovod.torch on parameters, optimizers and objects, inside a super learner."""

from __future__ import annotations

from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from hvd_adpsgd.inner.over_torch import world
from hvd_adpsgd.inner.over_torch.names import global_process_set
from hvd_adpsgd.inner.over_torch.operations import (
    allgather,
    broadcast_,
    broadcast_async_,
    synchronize,
)

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters (a dict, or a list of tensors or pairs) with those of learner `root_rank`."""
    named = sorted(params.items()) if isinstance(params, dict) else params
    pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in named]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Return the object of learner `root_rank`; sent by cloudpickle."""
    is_root = world.rank() == root_rank
    data = (
        torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8) if is_root else None
    )
    length = torch.tensor([0 if data is None else data.numel()])
    broadcast_(length, root_rank, None if name is None else f"{name}.length")
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, None if name is None else f"{name}.data")
    return obj if is_root else cloudpickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all learners of the super learner, by rank; sent by cloudpickle."""
    data = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    name_of = (lambda part: None) if name is None else (lambda part: f"{name}.{part}")
    lengths = allgather(torch.tensor([data.numel()]), name_of("length")).tolist()
    pieces = allgather(data, name_of("data")).split(lengths)
    return [cloudpickle.loads(piece.numpy().tobytes()) for piece in pieces]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Load the state and options of the optimizer of learner `root_rank`, on all learners."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = broadcast_object(optimizer.state_dict(), root_rank)
    if world.rank() != root_rank:
        optimizer.load_state_dict(state)
