"""Horovod's operations on tensors, inside a super learner. Arguments and results are Horovod's."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_adpsgd.inner.over_torch import world
from hvd_adpsgd.inner.over_torch.compression import Compression
from hvd_adpsgd.inner.over_torch.names import (
    Adasum,
    Average,
    HorovodInternalError,
    Sum,
    global_process_set,
    handle_average_backwards_compatibility,
)
from hvd_adpsgd.inner.over_torch.pending import Pending
from hvd_adpsgd.inner.over_torch.refused import refuse
from hvd_adpsgd.inner.over_torch.requests import JOIN, Request

Tensors = Sequence[torch.Tensor]

_REDUCED = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def _require_reducible(tensors: Tensors) -> None:
    """Raise ValueError, as Horovod does, for a dtype that cannot be reduced."""
    for tensor in tensors:
        if tensor.dtype not in _REDUCED:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")


def poll(handle: Pending) -> bool:
    """Whether an operation is over, so that `synchronize` does not wait."""
    return handle.done()


def synchronize(handle: Pending) -> Any:
    """Wait for an operation and return its result.

    Raises:
        HorovodInternalError: if a learner of the super learner has ended, or the learners' calls differ.
    """
    return handle.wait()


def _begin(
    kind: str, name: str | None, same: Any, own: Any, tensors: Tensors, single: bool = True
) -> Pending:
    its = world.present or world.current()
    if kind == JOIN:
        full = JOIN
    else:
        full = its.number(kind) if name is None else f"{kind}.{name}"
    pending = Pending(Request(full, kind, same, own), tensors, single)
    its.negotiation.begin(pending)
    return pending


def _specs(tensors: Tensors) -> list[Any]:
    return [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    *,
    single: bool = False,
) -> Pending:
    """Begin to reduce tensors in place; return a handle."""
    if op is None or average is not None:
        op = handle_average_backwards_compatibility(op, average)
    if op == Adasum:
        refuse("op=hvd.Adasum")
    _require_reducible(tensors)
    device = tensors[0].device.type
    same = [int(op), float(prescale_factor), float(postscale_factor), device, _specs(tensors)]
    return _begin("allreduce", name, same, None, [t.detach() for t in tensors], single)


def grouped_allreduce_async(tensors: Tensors, *how: Any, **more: Any) -> Pending:
    """Begin to reduce tensors into new ones; return a handle."""
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return grouped_allreduce_async_(copies, *how, **more)


def allreduce_async(tensor: torch.Tensor, *how: Any, **more: Any) -> Pending:
    """Begin to reduce a tensor into a new one; return a handle."""
    return grouped_allreduce_async([tensor], *how, **more, single=True)


def allreduce_async_(tensor: torch.Tensor, *how: Any, **more: Any) -> Pending:
    """Begin to reduce a tensor in place; return a handle, whose result is `tensor`."""
    return grouped_allreduce_async_([tensor], *how, **more, single=True)


def grouped_allreduce_(tensors: Tensors, *how: Any, **more: Any) -> list[torch.Tensor]:
    """Reduce tensors in place, and return them."""
    synchronize(grouped_allreduce_async_(tensors, *how, **more))
    return list(tensors)


def allreduce_(tensor: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
    """Reduce a tensor in place, and return it."""
    synchronize(allreduce_async_(tensor, *how, **more))
    return tensor


class _Allreduce(torch.autograd.Function):
    """Differentiable allreduce: its gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(synchronize(grouped_allreduce_async(tensors, *how)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        average, _, *rest = ctx.how
        return None, *_Allreduce.apply((average, None, *rest), *grads)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[torch.Tensor]:
    """Reduce tensors into new ones; differentiable."""
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    how = (average, name, op, prescale_factor, postscale_factor)
    reduced = _Allreduce.apply(how, *compressed)
    return [compression.decompress(t, c) for t, c in zip(reduced, contexts, strict=True)]


def allreduce(tensor: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
    """Reduce a tensor into a new one; differentiable."""
    return grouped_allreduce([tensor], *how, **more)[0]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any, process_set: Any = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to reduce a sparse tensor; return a function that waits for the result."""
    tensor = tensor.coalesce()
    indices_handle = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices")
    values_handle = allgather_async(tensor._values(), f"{name}.values")

    def handle() -> torch.Tensor:
        values, indices = synchronize(values_handle), synchronize(indices_handle)
        if op == Average:
            values = values / world.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.size(), device=values.device)

    return handle


def grouped_allgather_async(
    tensors: Tensors,
    name: str | None = None,
    process_set: Any = global_process_set,
    *,
    single: bool = False,
) -> Pending:
    """Begin to concatenate the learners' tensors by rank; return a handle."""
    for tensor in tensors:
        if not tensor.dim():
            raise HorovodInternalError(
                "allgather of a tensor without dimensions: at least one is needed. Pass tensor.unsqueeze(0)."
            )
    same = [tensors[0].device.type, [[dtype, shape[1:]] for dtype, shape in _specs(tensors)]]
    rows = [tensor.shape[0] for tensor in tensors]
    return _begin("allgather", name, same, rows, [t.detach() for t in tensors], single)


def allgather_async(tensor: torch.Tensor, *how: Any, **more: Any) -> Pending:
    """Begin to concatenate the learners' tensors by rank; return a handle."""
    return grouped_allgather_async([tensor], *how, **more, single=True)


class _Allgather(torch.autograd.Function):
    """Differentiable allgather: its gradient is this learner's part of the mean gradient, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, name: str | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pending = grouped_allgather_async(tensors, name)
        gathered = synchronize(pending)
        before = pending.own[: world.rank()]  # numbers of rows of the learners before this one
        starts = [sum(rows) for rows in zip(*before, strict=True)] if before else [0] * len(tensors)
        ctx.parts = list(zip(starts, pending.own[world.rank()], strict=True))
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        means = grouped_allreduce(list(grads), op=Average)
        parts = zip(means, ctx.parts, strict=True)
        return None, *(mean.narrow(0, start, rows) for mean, (start, rows) in parts)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: Any = global_process_set
) -> list[torch.Tensor]:
    """Concatenate the learners' tensors by rank; differentiable."""
    return list(_Allgather.apply(name, *tensors))


def allgather(tensor: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
    """Concatenate the learners' tensors by rank; differentiable."""
    return grouped_allgather([tensor], *how, **more)[0]


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Pending:
    """Begin to overwrite a tensor with the one of learner `root_rank`; return a handle."""
    if not 0 <= root_rank < world.size():
        raise HorovodInternalError(
            f"broadcast(root_rank={root_rank}): allowed are ranks >= 0 and < {world.size()} in the super "
            "learner. Pass the inner rank of a learner."
        )
    same = [int(root_rank), tensor.device.type, _specs([tensor])]
    return _begin("broadcast", name, same, None, [tensor.detach()])


def broadcast_async(tensor: torch.Tensor, *how: Any, **more: Any) -> Pending:
    """Begin to return the tensor of learner `root_rank`; return a handle."""
    return broadcast_async_(tensor.detach().clone(), *how, **more)


def broadcast_(tensor: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
    """Overwrite a tensor with the one of learner `root_rank`, and return it."""
    synchronize(broadcast_async_(tensor, *how, **more))
    return tensor


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast: its gradient is the mean gradient at the root, else zero, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        return synchronize(broadcast_async(tensor, root_rank, name))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mean = allreduce(grads[0], op=Average)
        return (mean if world.rank() == ctx.root_rank else torch.zeros_like(mean)), None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Return the tensor of learner `root_rank`; differentiable."""
    return _Broadcast.apply(tensor, root_rank, name)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Begin to send parts of a tensor to the learners, `splits[i]` rows to learner i; return a handle."""
    rows, size = tensor.shape[0] if tensor.dim() else 0, world.size()
    counts = _even(tensor) if splits is None else torch.as_tensor(splits, device="cpu").tolist()
    if len(counts) != size or sum(counts) != rows:
        raise HorovodInternalError(
            f"alltoall of {rows} rows with splits {counts}: needed are {size} splits, whose sum is the "
            "number of rows. Pass a number of rows for each learner of the super learner."
        )
    (dtype, shape), *_ = _specs([tensor])
    same = [tensor.device.type, dtype, shape[1:], splits is None]
    return _begin("alltoall", name, same, counts, [tensor.detach()], single=True)


def _even(tensor: torch.Tensor) -> list[int]:
    size = world.size()
    return [tensor.shape[0] // size if tensor.dim() else 0] * size


class _Alltoall(torch.autograd.Function):
    """Differentiable alltoall: gradients go back to the learners from which the rows came."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = _even(tensor) if splits is None else splits
        output, received = synchronize(alltoall_async(tensor, counts, name))
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return synchronize(alltoall_async(grads[0].contiguous(), ctx.received))[0], None, None


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Send parts of a tensor to the learners; with splits, return also how many rows came from each."""
    output, received = _Alltoall.apply(tensor, splits, name)
    return output if splits is None else (output, received)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    single: bool = False,
) -> Pending:
    """Begin to reduce tensors, of which each learner gets some rows; return a handle."""
    for tensor in tensors:
        if not tensor.dim():
            raise HorovodInternalError(
                "reducescatter of a tensor without dimensions: at least one is needed. Use allreduce."
            )
    _require_reducible(tensors)
    same = [int(op), float(prescale_factor), float(postscale_factor), tensors[0].device.type]
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return _begin("reducescatter", name, [*same, _specs(tensors)], None, copies, single)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Begin to reduce a tensor, of which each learner gets some rows; return a handle."""
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter_async([tensor], name, op, process_set, *factors, single=True)


class _Reducescatter(torch.autograd.Function):
    """Differentiable reducescatter: its gradient is gathered from the learners that hold the rows."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        name, op, *factors = how
        ctx.factor = math.prod(factors) * (world.size() if op == Sum else 1)  # as Horovod's
        return tuple(synchronize(grouped_reducescatter_async(tensors, name, op, None, *factors)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *(grad * ctx.factor for grad in grouped_allgather(list(grads)))


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce tensors, of which each learner gets some rows; differentiable."""
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Reducescatter.apply((name, op, prescale_factor, postscale_factor), *compressed)
    return [compression.decompress(t, c) for t, c in zip(reduced, contexts, strict=True)]


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor, of which each learner gets some rows; differentiable."""
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]


def barrier(process_set: Any = global_process_set) -> None:
    """Wait until all learners of the super learner have called this."""
    synchronize(_begin("barrier", None, None, None, []))


def join(device: int = -1) -> int:
    """Contribute zeros to reductions until all learners have called this; return who called it last."""
    its = world.current()
    its.transfers.join_device = device
    last = int(synchronize(_begin(JOIN, None, None, None, [])))
    its.joined()
    return last
