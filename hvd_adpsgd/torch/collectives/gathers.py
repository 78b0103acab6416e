"""Collective `allgather` over all learners, with its grouped and object forms."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import torch

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.inner.horovod import Average
from hvd_adpsgd.inner.tensor_bytes import bytes_of, lent
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.torch.basics import global_process_set, inner_process_set
from hvd_adpsgd.torch.collectives.calls import or_inside, require_dense, run_call
from hvd_adpsgd.torch.collectives.reductions import Reduction, reduce


@or_inside
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """Concatenate the learners' tensors along the first dimension, by rank; differentiable.

    Args:
        tensor: a tensor of at least one dimension; dtype and all further dimensions equal on all learners.
        name: if given, the same on all learners.
        process_set: all learners, or hvd.super_learner.

    Raises:
        CollectiveMismatchError: on all learners, if their calls or tensors differ.
        ConfigError: for a tensor without dimensions.
    """
    return _Allgather.apply("allgather", name, tensor)[0]


@or_inside
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = global_process_set
) -> list[torch.Tensor]:
    """Concatenate learners' tensors by rank, several in one operation; differentiable. See allgather."""
    return list(_Allgather.apply("grouped_allgather", name, *tensors))


class _Allgather(torch.autograd.Function):
    """Differentiable allgather: its gradient is this learner's part of the mean gradient, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, name: str | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        gathered = gather(kind, name, tensors)
        ctx.parts = [(one.start, one.rows) for one in gathered]
        return tuple(one.tensor for one in gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        means = reduce(grads, Reduction("allreduce", Average, 1.0, 1.0, None))
        parts = zip(means, ctx.parts, strict=True)
        return None, None, *(mean.narrow(0, start, rows) for mean, (start, rows) in parts)


class Gathered(NamedTuple):
    """A gathered tensor, the index of this learner's first row in the tensor, and its number of rows."""

    tensor: torch.Tensor
    start: int
    rows: int


def gather(kind: str, name: str | None, tensors: Sequence[torch.Tensor]) -> list[Gathered]:
    """Concatenate the learners' tensors by rank, all of `tensors` in one operation."""
    require_dense(kind, [(None, tensor) for tensor in tensors])
    world = worlds.current()
    rows = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
    described = tuple((None, str(t.dtype), tuple(t.shape[1:])) for t in tensors)
    call = Call(kind, name, described, private=rows)

    def operation(attempt: Attempt) -> list[Gathered]:
        told = [other.private for other in attempt.calls]
        for rank, theirs in zip(attempt.ranks, told, strict=True):
            if None in theirs:
                raise ConfigError(
                    f"{kind} of a tensor without dimensions on learner {rank}: at least one is needed. Pass "
                    "`tensor.unsqueeze(0)`."
                )
        return [
            _gathered(attempt, t, rows)
            for t, rows in zip(tensors, zip(*told, strict=True), strict=True)
        ]

    return run_call(world, call, operation)


def _gathered(attempt: Attempt, tensor: torch.Tensor, rows: Sequence[int]) -> Gathered:
    gathered = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
    everything = lent(bytes_of(gathered))
    row = everything.size // max(sum(rows), 1)
    attempt.allgatherv(lent(bytes_of(tensor.detach().cpu())), everything, [row * n for n in rows])
    mine = attempt.rank
    return Gathered(gathered.to(tensor.device), sum(rows[:mine]), rows[mine])


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all learners, by rank; sent by cloudpickle."""
    if inner_process_set(None, "allgather_object") is not None:
        return horovod.allgather_object(obj, name)
    world = worlds.current()
    call = Call("allgather_object", name, private=cloudpickle.dumps(obj))
    calls = run_call(world, call, lambda attempt: attempt.calls)
    return [cloudpickle.loads(other.private) for other in calls]
