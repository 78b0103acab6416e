"""Operations over all learners, with Horovod's signatures and conventions.

With one super learner, or `process_set=hvd.super_learner`, they are Horovod's. Over several super
learners they go through plain messages: all learners first exchange what they call, so that a
mismatch is an error on all of them instead of a hang, and learners that failed are left out.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import horovod.torch as horovod
import numpy as np
import torch
from horovod.torch import Adasum, Average, Compression, Max, Min, Product, Sum
from horovod.torch.mpi_ops import handle_average_backwards_compatibility
from numpy.typing import NDArray

from hvd_adpsgd.errors import (
    AdpsgdError,
    CollectiveMismatchError,
    ConfigError,
    InnerOnlyError,
    PeerFailedError,
)
from hvd_adpsgd.runtime import world as worlds
from hvd_adpsgd.runtime.collectives import Call
from hvd_adpsgd.runtime.messages import Attempt
from hvd_adpsgd.runtime.world import World
from hvd_adpsgd.torch.basics import global_process_set, inner_process_set, one_super_learner
from hvd_adpsgd.torch.node import horovods

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "join",
]

T = TypeVar("T")
Parameters = dict[str, torch.Tensor] | list[torch.Tensor] | list[tuple[str, torch.Tensor]]

_REDUCED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_TOLD = 1024  # bytes up to which a tensor travels with its call
_COMBINED_BY = {Min: np.minimum, Max: np.maximum, Product: np.multiply}  # the others by np.add
_OP_NAMES = {Average: "Average", Sum: "Sum", Min: "Min", Max: "Max", Product: "Product"}


# ---- reduce -------------------------------------------------------------------------------------


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
        prescale_factor: the tensor is multiplied by it before,
        postscale_factor: and by it after.
        process_set: all learners, or hvd.super_learner.

    Returns:
        A tensor like `tensor`.

    Raises:
        CollectiveMismatchError: on all learners, if they do not call the same.
        InnerOnlyError: for hvd.Adasum over several super learners.
        ConfigError: for another dtype or op.
    """
    inner = inner_process_set(process_set, "allreduce")
    _require_tensor("allreduce", tensor)
    if inner is not None:
        return horovod.allreduce(
            tensor, average, name, compression, op, prescale_factor, postscale_factor, inner
        )
    how = reduction("allreduce", average, name, op, prescale_factor, postscale_factor)
    compressed, context = compression.compress(tensor)
    return compression.decompress(_Allreduce.apply(how, compressed)[0], context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over all learners in place; see allreduce. Returns `tensor`."""
    inner = inner_process_set(process_set, "allreduce_")
    _require_tensor("allreduce_", tensor)
    if inner is not None:
        return horovod.allreduce_(
            tensor, average, name, op, prescale_factor, postscale_factor, inner
        )
    how = reduction("allreduce", average, name, op, prescale_factor, postscale_factor)
    return reduce_([tensor], how)[0]


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
        Tensors like `tensors`.
    """
    inner = inner_process_set(process_set, "grouped_allreduce")
    require_tensors("grouped_allreduce", tensors)
    if inner is not None:
        return list(
            horovod.grouped_allreduce(
                tensors, average, name, compression, op, prescale_factor, postscale_factor, inner
            )
        )
    how = reduction("grouped_allreduce", average, name, op, prescale_factor, postscale_factor)
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Allreduce.apply(how, *compressed)
    return [compression.decompress(t, c) for t, c in zip(reduced, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Sequence[torch.Tensor]:
    """Combine several tensors over all learners in place; see grouped_allreduce. Returns `tensors`."""
    inner = inner_process_set(process_set, "grouped_allreduce_")
    require_tensors("grouped_allreduce_", tensors)
    if inner is not None:
        horovod.grouped_allreduce_(
            tensors, average, name, op, prescale_factor, postscale_factor, inner
        )
        return tensors
    how = reduction("grouped_allreduce", average, name, op, prescale_factor, postscale_factor)
    return reduce_(tensors, how)


def _require_tensor(doing: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"{doing} got a {type(tensor).__name__}, allowed is a tensor. Pass `torch.as_tensor(...)`, one "
            "tensor a call, or use allgather_object or broadcast_object for other values."
        )


def require_tensors(doing: str, tensors: Any) -> None:
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise ConfigError(
            f"{doing} got {tensors!r:.40}, allowed is a list of at least one tensor. Pass [tensor, ...]."
        )
    for tensor in tensors:
        _require_tensor(doing, tensor)


class Reduction(NamedTuple):
    """How tensors are combined; `kind` is the operation that the user calls."""

    kind: str
    op: Any
    prescale: float
    postscale: float
    name: str | None


def reduction(
    kind: str, average: bool | None, name: str | None, op: Any, prescale: float, postscale: float
) -> Reduction:
    """What Horovod's arguments mean.

    Raises:
        InnerOnlyError: for hvd.Adasum.
        ConfigError: for another op.
    """
    return Reduction(kind, _checked_op(kind, op, average), prescale, postscale, name)


class _Allreduce(torch.autograd.Function):
    """Its gradient is the same reduction of the gradients, as in Horovod."""

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
    """Combine them over all learners in place. Returns `tensors`."""
    for tensor, reduced in zip(tensors, reduce(tensors, how), strict=True):
        tensor.detach().copy_(reduced)
    return tensors


def reduce(tensors: Sequence[torch.Tensor], how: Reduction) -> list[torch.Tensor]:
    """The tensors combined over all learners, in one operation: one array of each dtype."""
    world, combine = worlds.current(), _COMBINED_BY.get(how.op, np.add)
    unfit = next((t for t in tensors if not _is_reducible(t)), None)
    mine = {} if unfit is not None else _packed([_scaled(_flat(t), how.prescale) for t in tensors])
    is_told = unfit is None and sum(array.nbytes for array in mine.values()) <= _TOLD
    call = Call(
        how.kind,
        how.name,
        _described([(None, t) for t in tensors]),
        None,
        _OP_NAMES[how.op],
        (how.prescale, how.postscale),
        mine if is_told else None,
    )

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

    return _unpacked(_run(world, call, operation), tensors)


def _packed(parts: list[torch.Tensor]) -> dict[torch.dtype, NDArray[Any]]:
    """The vectors of each dtype one after the other; a single one is not copied."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part)
    return {
        dtype: (same[0] if len(same) == 1 else torch.cat(same)).numpy()
        for dtype, same in by_dtype.items()
    }


def _unpacked(
    totals: dict[torch.dtype, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The parts of `totals` that belong to each tensor, like it."""
    taken = dict.fromkeys(totals, 0)
    parts = []
    for tensor in tensors:
        dtype = _REDUCED_IN.get(tensor.dtype, tensor.dtype)
        start = taken[dtype]
        taken[dtype] += tensor.numel()
        part = totals[dtype][start : taken[dtype]]
        parts.append(part.to(dtype=tensor.dtype).reshape(tensor.shape).to(tensor.device))
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
    return ConfigError(
        f"allreduce of a tensor of {tensor.dtype}: allowed are integers and floating-point "
        "numbers. Convert it (`.to(torch.int32)`)."
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in CPU memory, in the dtype in which they are reduced; maybe `tensor`'s own."""
    dtype = _REDUCED_IN.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Integers are scaled in double precision and cut off, as in Horovod."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


# ---- gather -------------------------------------------------------------------------------------


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """Concatenate the learners' tensors along the first dimension, by rank; differentiable.

    Args:
        tensor: at least one dimension; the same dtype and further dimensions on all learners.
        name: if given, the same on all learners.
        process_set: all learners, or hvd.super_learner.

    Raises:
        CollectiveMismatchError: on all learners, if they do not call the same.
        ConfigError: for a tensor without dimensions.
    """
    inner = inner_process_set(process_set, "allgather")
    _require_tensor("allgather", tensor)
    if inner is not None:
        return horovod.allgather(tensor, name, inner)
    return _Allgather.apply("allgather", name, tensor)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = global_process_set
) -> list[torch.Tensor]:
    """Concatenate several tensors in one operation; differentiable. See allgather."""
    inner = inner_process_set(process_set, "grouped_allgather")
    require_tensors("grouped_allgather", tensors)
    if inner is not None:
        return list(horovod.grouped_allgather(tensors, name, inner))
    return list(_Allgather.apply("grouped_allgather", name, *tensors))


class _Allgather(torch.autograd.Function):
    """Its gradient is this learner's part of the mean gradient, as in Horovod."""

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
    """All rows, the first that is this learner's, and how many are."""

    tensor: torch.Tensor
    start: int
    rows: int


def gather(kind: str, name: str | None, tensors: Sequence[torch.Tensor]) -> list[Gathered]:
    """The learners' tensors one below the other, in one operation."""
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

    return _run(world, call, operation)


def _gathered(attempt: Attempt, tensor: torch.Tensor, rows: Sequence[int]) -> Gathered:
    gathered = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype)
    everything = _bytes(gathered).numpy()
    row = everything.size // max(sum(rows), 1)
    attempt.allgatherv(_bytes(tensor.detach().cpu()).numpy(), everything, [row * n for n in rows])
    mine = attempt.rank
    return Gathered(gathered.to(tensor.device), sum(rows[:mine]), rows[mine])


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The learners' objects by rank, through cloudpickle."""
    if inner_process_set(None, "allgather_object") is not None:
        return horovod.allgather_object(obj, name)
    world = worlds.current()
    call = Call("allgather_object", name, private=cloudpickle.dumps(obj))
    calls = _run(world, call, lambda attempt: attempt.calls)
    return [cloudpickle.loads(other.private) for other in calls]


# ---- broadcast ----------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor,
    root_rank: int | None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """The tensor of learner `root_rank`, on all learners; differentiable.

    Args:
        tensor: the same dtype and shape on all learners.
        root_rank: whose; among all learners, or in the super learner if that is the process set. None:
            the first surviving learner.
        name: if given, the same on all learners.
        process_set: all learners, or hvd.super_learner.

    Raises:
        CollectiveMismatchError: on all learners, if they do not call the same.
        ConfigError: for a root_rank out of range.
        PeerFailedError: if the root failed.
    """
    inner = inner_process_set(process_set, "broadcast")
    _require_tensor("broadcast", tensor)
    if inner is not None:
        return horovod.broadcast(tensor, root_rank or 0, name, inner)
    return _Broadcast.apply(tensor, root_rank, name)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int | None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with that of learner `root_rank`; see broadcast. Returns `tensor`."""
    inner = inner_process_set(process_set, "broadcast_")
    _require_tensor("broadcast_", tensor)
    if inner is not None:
        return horovod.broadcast_(tensor, root_rank or 0, name, inner)
    broadcast_all("broadcast", name, [(None, tensor)], root_rank)
    return tensor


class _Broadcast(torch.autograd.Function):
    """Its gradient is the mean gradient at the root and zero elsewhere, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int | None, name: str | None
    ) -> torch.Tensor:
        output = tensor.detach().clone()
        broadcast_all("broadcast", name, [(None, output)], root_rank)
        ctx.root_rank = worlds.current().collectives.ranks[0] if root_rank is None else root_rank
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mean = allreduce(grads[0], op=Average)
        if worlds.current().rank != ctx.root_rank:
            mean = torch.zeros_like(mean)
        return mean, None, None


def broadcast_parameters(params: Parameters, root_rank: int | None) -> None:
    """Overwrite parameters with those of learner `root_rank`.

    Args:
        params: `model.state_dict()`, `list(model.named_parameters())` or a list of tensors.
        root_rank: whose, among all learners; None: the first surviving learner.

    Raises:
        ConfigError: for params of another type or a root_rank out of range.
        CollectiveMismatchError: on all learners, if their parameters differ in name, dtype, shape.
        PeerFailedError: if the root failed.
    """
    if inner_process_set(None, "broadcast_parameters") is not None:
        horovod.broadcast_parameters(params, root_rank or 0)
        return
    broadcast_all("broadcast_parameters", None, _named(params), root_rank)


def _named(params: Parameters) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, dict):
        return sorted(params.items())
    if isinstance(params, list):
        return [p if isinstance(p, tuple) else (None, p) for p in params]
    raise ConfigError(
        f"broadcast_parameters() got a {type(params).__name__}, allowed are a dict and a list of "
        "tensors or of (name, tensor). Pass model.state_dict()."
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int | None, model: torch.nn.Module | None = None
) -> None:
    """Give all learners the optimizer state and options (learning rate, ...) of `root_rank`.

    Over several super learners the state is the root's exactly: where the root's optimizer has not
    stepped yet, no learner's has afterwards. (Horovod makes an empty state by a step with zero
    gradients, which counts as a step and applies weight decay.)

    Args:
        optimizer: wrapped or not; with the same parameter groups on all learners.
        root_rank: whose, among all learners; None: the first surviving learner.
        model: as in Horovod, which needs it to find sparse parameters.

    Raises:
        ConfigError: for LBFGS, or a root_rank out of range.
        CollectiveMismatchError: on all learners, if their parameter groups differ in size.
        PeerFailedError: if the root failed.
    """
    if inner_process_set(None, "broadcast_optimizer_state") is not None:
        horovod.broadcast_optimizer_state(optimizer, root_rank or 0, model)
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "broadcast_optimizer_state: cannot broadcast torch.optim.LBFGS state, which is nested. "
            "Use another optimizer, or load the same checkpoint on every learner."
        )
    groups = tuple((None, "group", (len(g["params"]),)) for g in optimizer.param_groups)
    call = Call("broadcast_optimizer_state", tensors=groups, root=root_rank)
    data = _broadcast_data(call, lambda: _saved(optimizer.state_dict()))
    if data is not None:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        optimizer.load_state_dict(state)


def _saved(state: dict[str, Any]) -> bytes:
    """A state with tensors of any device, so that it can be loaded into CPU memory."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def broadcast_object(
    obj: Any,
    root_rank: int | None = 0,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """The object of learner `root_rank`, on all learners, through cloudpickle.

    Args:
        obj: the root's counts; it is returned there itself.
        root_rank: whose; among all learners, or in the super learner if that is the process set. None:
            the first surviving learner.
        name: if given, the same on all learners.
        process_set: all learners, or hvd.super_learner.

    Raises:
        CollectiveMismatchError: on all learners, if they do not call the same.
        ConfigError: for a root_rank out of range.
        PeerFailedError: if the root failed.
    """
    inner = inner_process_set(process_set, "broadcast_object")
    if inner is not None:
        return horovod.broadcast_object(obj, root_rank or 0, name, inner)
    call = Call("broadcast_object", name, root=root_rank)
    data = _broadcast_data(call, lambda: cloudpickle.dumps(obj))
    return obj if data is None else cloudpickle.loads(data)


def _broadcast_data(call: Call, make: Callable[[], bytes]) -> bytes | None:
    """What the root makes; None on the root itself."""
    world = worlds.current()
    may_be_root = (
        call.root in (None, world.rank) or world.collectives.joining
    )  # made here: it may raise
    mine = np.frombuffer(make(), dtype=np.uint8).copy() if may_be_root else np.empty(0, np.uint8)
    told = call._replace(private=mine.size)

    def operation(attempt: Attempt) -> bytes | None:
        root = _root_in(world, call)
        is_root = attempt.rank == root
        data = mine if is_root else np.empty(attempt.calls[root].private, np.uint8)
        attempt.broadcast(data, root)
        return None if is_root else data.tobytes()

    return _run(world, told, operation)


def broadcast_all(
    kind: str,
    name: str | None,
    named: Sequence[tuple[str | None, torch.Tensor]],
    root_rank: int | None,
) -> None:
    """Overwrite tensors with the root's. One that MPI cannot write to is copied there and back."""
    world = worlds.current()
    call = Call(kind, name, _described(named), root_rank)

    def operation(attempt: Attempt) -> None:
        root = _root_in(world, call)
        for _, tensor in named:
            staged = tensor.detach().cpu().contiguous()
            attempt.broadcast(_bytes(staged).numpy(), root)
            if staged.data_ptr() != tensor.data_ptr() and attempt.rank != root:
                tensor.detach().copy_(staged)

    _run(world, call, operation)


def _root_in(world: World, call: Call) -> int:
    """The root's rank among the surviving learners; None is the first surviving learner.

    To a joining learner that has not joined yet its own first learner stands for the root.
    """
    if call.root is None or world.collectives.joining:
        return 0
    if not 0 <= call.root < world.size:
        raise ConfigError(
            f"{call.kind}(root_rank={call.root}): allowed are ranks >= 0 and < {world.size}. Pass "
            "the rank of a learner."
        )
    ranks = world.collectives.ranks
    if call.root not in ranks:
        raise PeerFailedError(
            f"{call.kind}(root_rank={call.root}): learner {call.root} failed. Choose another "
            f"root, or None for the first survivor ({ranks[0]} of the {len(ranks)} left)."
        )
    return ranks.index(call.root)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as bytes."""
    # as_strided: with at most one element the stride may be anything, which view() refuses
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# ---- wait ---------------------------------------------------------------------------------------


def barrier(process_set: Any = global_process_set) -> None:
    """Wait until all learners are here."""
    inner = inner_process_set(process_set, "barrier")
    if inner is not None:
        horovod.barrier(inner)
        return
    _run(worlds.current(), Call("barrier"), lambda attempt: None)


def join(device: int = -1) -> int:
    """Wait until all learners have no more data; in the node, supply zero gradients meanwhile.

    Args:
        device: id of the GPU for these zeros; -1 is the CPU.

    Returns:
        Rank of the learner that joined last, by the clocks of the hosts.
    """
    if inner_process_set(None, "join") is not None:
        return int(horovod.join(device))
    world = worlds.current()
    call = Call("join", private=(time.time(), world.rank))
    horovod.join(device)
    calls = _run(world, call, lambda attempt: attempt.calls)
    return int(max(other.private for other in calls)[1])


# ---- agree --------------------------------------------------------------------------------------


def _described(
    named: Sequence[tuple[str | None, torch.Tensor]],
) -> tuple[tuple[str | None, str, tuple[int, ...]], ...]:
    return tuple((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in named)


def _run(world: World, call: Call, operation: Callable[[Attempt], T]) -> T:
    """Run it over all learners; a mismatch is Horovod's error, too."""
    try:
        return world.collectives.run(call, operation)
    except CollectiveMismatchError as error:
        raise horovods(CollectiveMismatchError)(*error.args) from None
