"""Collective `allreduce` over all learners, with its grouped and in-place forms."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.errors import AdpsgdError, ConfigError, InnerOnlyError
from hvd_adpsgd.inner.horovod import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    handle_average_backwards_compatibility,
)
from hvd_adpsgd.inner.tensor_bytes import lent
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.torch.basics import global_process_set, one_super_learner
from hvd_adpsgd.torch.collectives.calls import described, or_inside, run_call

_REDUCED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# largest number of bytes of tensors that travel in the message that announces the call; larger ones follow it
_TOLD = 1024
_COMBINED_BY = {Min: np.minimum, Max: np.maximum, Product: np.multiply}  # Sum and Average: np.add
_OP_NAMES = {Average: "Average", Sum: "Sum", Min: "Min", Max: "Max", Product: "Product"}


@or_inside
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over all learners; differentiable.

    Args:
        tensor: any real tensor; the same dtype and shape on all learners. float16 and bfloat16 are
            summed in float32.
        average: deprecated by Horovod in favour of op.
        name: if given, the same on all learners.
        compression: hvd.Compression.none or .fp16.
        op: hvd.Average (default), Sum, Min, Max or Product.
        prescale_factor: factor on the tensor before the reduction.
        postscale_factor: factor on the result.
        process_set: all learners, or hvd.super_learner.

    Returns:
        The reduced tensor, of the dtype, shape and device of `tensor`.

    Raises:
        CollectiveMismatchError: on all learners, if their calls or tensors differ.
        InnerOnlyError: for hvd.Adasum over several super learners.
        ConfigError: for another dtype or op.
    """
    how = reduction("allreduce", average, name, op, prescale_factor, postscale_factor)
    compressed, context = compression.compress(tensor)
    return compression.decompress(_Allreduce.apply(how, compressed)[0], context)


@or_inside
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over all learners in place, and return it; see allreduce."""
    how = reduction("allreduce", average, name, op, prescale_factor, postscale_factor)
    return reduce_([tensor], how)[0]


@or_inside
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors over all learners in one operation; differentiable. See allreduce.

    Returns:
        The reduced tensors, each of the dtype, shape and device of its counterpart in `tensors`.
    """
    how = reduction("grouped_allreduce", average, name, op, prescale_factor, postscale_factor)
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Allreduce.apply(how, *compressed)
    return [compression.decompress(t, c) for t, c in zip(reduced, contexts, strict=True)]


@or_inside
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Sequence[torch.Tensor]:
    """Combine several tensors over all learners in place, and return them; see grouped_allreduce."""
    how = reduction("grouped_allreduce", average, name, op, prescale_factor, postscale_factor)
    return reduce_(tensors, how)


class Reduction(NamedTuple):
    """The arguments of an all-reduce; `kind` is the name of the function that the script calls."""

    kind: str
    op: Any
    prescale: float
    postscale: float
    name: str | None


def reduction(
    kind: str, average: bool | None, name: str | None, op: Any, prescale: float, postscale: float
) -> Reduction:
    """Return Horovod's arguments of an all-reduce as a Reduction.

    Raises:
        InnerOnlyError: for hvd.Adasum.
        ConfigError: for another op.
    """
    return Reduction(kind, _checked_op(kind, op, average), prescale, postscale, name)


class _Allreduce(torch.autograd.Function):
    """Differentiable all-reduce: its gradient is the same reduction of the gradients, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, how: Reduction, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(reduce(tensors, how))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *_Allreduce.apply(ctx.how._replace(name=None), *grads)


def _checked_op(kind: str, op: Any, average: bool | None) -> Any:
    op = handle_average_backwards_compatibility(op, average)
    if op == Adasum:
        world = worlds.current()
        raise InnerOnlyError(
            f"{kind}(op=hvd.Adasum) on learner {world.rank}: Adasum works in one super learner, "
            f"this job has {world.super_size}. Use hvd.Average or hvd.Sum, or start the job as one "
            f"super learner: {one_super_learner(world)}"
        )
    if op not in _OP_NAMES:
        raise ConfigError(
            f"{kind}(op={op!r}): allowed are hvd.{', hvd.'.join(_OP_NAMES.values())}. Pass one "
            "of these."
        )
    return op


def reduce_(tensors: Sequence[torch.Tensor], how: Reduction) -> Sequence[torch.Tensor]:
    """Combine tensors over all learners in place, and return the tensors."""
    for tensor, reduced in zip(tensors, _reduced(tensors, how), strict=True):
        tensor.detach().copy_(reduced)
    return tensors


def reduce(tensors: Sequence[torch.Tensor], how: Reduction) -> list[torch.Tensor]:
    """Return tensors combined over all learners; each has memory of its own, which the script may resize."""
    reduced = zip(tensors, _reduced(tensors, how), strict=True)
    return [tensor.new_empty(tensor.shape).copy_(its) for tensor, its in reduced]


def _reduced(tensors: Sequence[torch.Tensor], how: Reduction) -> list[torch.Tensor]:
    """As reduce, in one operation that sends one array per dtype; the results are views of these arrays."""
    world, combine = worlds.current(), _COMBINED_BY.get(how.op, np.add)
    unfit = next((t for t in tensors if not _is_reducible(t)), None)
    mine = {} if unfit is not None else _packed([_scaled(_flat(t), how.prescale) for t in tensors])
    is_told = unfit is None and sum(array.nbytes for array in mine.values()) <= _TOLD
    shapes, scales = described([(None, t) for t in tensors]), (how.prescale, how.postscale)
    told = mine if is_told else None
    call = Call(how.kind, how.name, shapes, None, _OP_NAMES[how.op], scales, told)

    def combined(attempt: Attempt, dtype: torch.dtype) -> torch.Tensor:
        if is_told:
            arrays = [call.private[dtype] for call in attempt.calls]
            return torch.from_numpy(functools.reduce(combine, arrays))
        return torch.from_numpy(attempt.allreduce(mine[dtype], combine))

    def operation(attempt: Attempt) -> dict[torch.dtype, torch.Tensor]:
        if unfit is not None:
            raise _irreducible(unfit)
        share = how.postscale / (attempt.size if how.op == Average else 1)
        return {dtype: _scaled(combined(attempt, dtype), share) for dtype in mine}

    return _unpacked(run_call(world, call, operation), tensors)


def _packed(parts: list[torch.Tensor]) -> dict[torch.dtype, NDArray[Any]]:
    """Concatenate the tensors of each dtype into one array, which is sent; a single one is not copied."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part)
    return {
        dtype: lent(same[0] if len(same) == 1 else torch.cat(same))
        for dtype, same in by_dtype.items()
    }


def _unpacked(
    totals: dict[torch.dtype, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Split reduced arrays into one view for each of `tensors`, of its shape."""
    taken = dict.fromkeys(totals, 0)
    parts = []
    for tensor in tensors:
        dtype = _REDUCED_IN.get(tensor.dtype, tensor.dtype)
        start = taken[dtype]
        taken[dtype] += tensor.numel()
        parts.append(totals[dtype][start : taken[dtype]].view(tensor.shape))
    return parts


def _is_reducible(tensor: torch.Tensor) -> bool:
    has_elements = tensor.layout == torch.strided and tensor.device.type != "meta"
    is_number = not (tensor.dtype == torch.bool or tensor.is_complex() or tensor.is_quantized)
    return has_elements and is_number


def _irreducible(tensor: torch.Tensor) -> AdpsgdError:
    if tensor.layout != torch.strided:
        return InnerOnlyError(
            f"allreduce of a {tensor.layout} tensor works in one super learner only. Reduce `.to_dense()`, "
            "or pass process_set=hvd.super_learner."
        )
    cure = "torch.view_as_real(tensor)" if tensor.is_complex() else "tensor.to(torch.int32)"
    return ConfigError(
        f"allreduce of a tensor of {tensor.dtype}: allowed are integers and floating-point numbers. Convert "
        f"it: `{cure}`."
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a vector in CPU memory, in the reduction's dtype; a copy only if necessary."""
    dtype = _REDUCED_IN.get(tensor.dtype, tensor.dtype)
    host = tensor.detach().to(device="cpu", dtype=dtype)
    return host.contiguous().resolve_neg().reshape(-1)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a tensor by `factor`; integers in double precision and truncated, as in Horovod."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)
