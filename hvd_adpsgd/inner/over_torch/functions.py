"""Operations of horovod.torch on parameters, optimizers and objects, inside a super learner."""

import io
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from hvd_adpsgd.inner.over_torch import world
from hvd_adpsgd.inner.over_torch.names import global_process_set
from hvd_adpsgd.inner.over_torch.operations import (
    allgather,
    broadcast_,
    broadcast_async_,
    synchronize,
)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters (a dict, or a list of tensors or pairs) with those of learner `root_rank`."""
    named = sorted(params.items()) if isinstance(params, dict) else params
    pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in named]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return the object of learner `root_rank`; sent by cloudpickle."""
    is_root = world.rank() == root_rank
    data = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([data.numel()], device="cpu")
    broadcast_(length, root_rank, None if name is None else f"{name}.length")
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, None if name is None else f"{name}.data")
    return obj if is_root else _unpickled(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all learners of the super learner, by rank; sent by cloudpickle."""
    data = _pickled(obj)
    length = torch.tensor([data.numel()], device="cpu")
    lengths = allgather(length, None if name is None else f"{name}.length").tolist()
    pieces = allgather(data, None if name is None else f"{name}.data").split(lengths)
    return [_unpickled(piece) for piece in pieces]


def _pickled(obj: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(cloudpickle.dumps(obj), dtype=np.uint8).copy())


def _unpickled(data: torch.Tensor) -> Any:
    return cloudpickle.loads(data.numpy().tobytes())


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Load the state and options of the optimizer of learner `root_rank`, on all learners."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = world.rank() == root_rank
    data = broadcast_object(_saved(optimizer.state_dict()) if is_root else None, root_rank)
    if not is_root:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        optimizer.load_state_dict(state)


def _saved(state: dict[str, Any]) -> bytes:
    """Serialize a state for torch.load into CPU memory; cloudpickle would load it onto the root's GPU."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
