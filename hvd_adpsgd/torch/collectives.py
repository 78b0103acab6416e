"""Operations over all learners, with Horovod's signatures and conventions.

With one super learner, or `process_set=hvd.super_learner`, they are Horovod's. Over several super
learners they go through MPI: all learners first exchange what they call, so that a mismatch
is an error on all of them instead of a hang, and learners that failed are left out.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import horovod.torch as horovod
import numpy as np
import torch
from horovod.torch import Adasum, Average, Compression, Max, Min, Product, Sum
from horovod.torch.mpi_ops import handle_average_backwards_compatibility

from hvd_adpsgd.errors import (
    CollectiveMismatchError,
    ConfigError,
    InnerOnlyError,
    PeerFailedError,
)
from hvd_adpsgd.runtime import world as worlds
from hvd_adpsgd.runtime.collectives import wait
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
    "join",
]

Parameters = dict[str, torch.Tensor] | list[torch.Tensor] | list[tuple[str, torch.Tensor]]

_PIECE = 2**28  # elements per MPI call, whose counts are 32-bit integers
_REDUCED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_OP_NAMES = {Average: "Average", Sum: "Sum", Min: "Min", Max: "Max", Product: "Product"}


class Call(NamedTuple):
    """What one learner calls; must be equal on all, but for `private`.

    Attributes:
        kind: name of the operation.
        name: the user's name for it.
        tensors: (name, dtype, shape) of each; of an allgather without the first dimension.
        root: whose value counts, if the operation has a root.
        op: how values are combined, if they are.
        factors: prescale_factor, postscale_factor.
        private: values that are not compared with those of peers.
    """

    kind: str
    name: str | None = None
    tensors: tuple[tuple[str | None, str, tuple[int, ...]], ...] = ()
    root: int | None = None
    op: str | None = None
    factors: tuple[float, float] = (1.0, 1.0)
    private: Any = None


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
    if inner is not None:
        return horovod.allreduce(
            tensor, average, name, compression, op, prescale_factor, postscale_factor, inner
        )
    how = _Reduction(_checked_op(op, average), prescale_factor, postscale_factor, name)
    compressed, context = compression.compress(tensor)
    return compression.decompress(_Allreduce.apply(compressed, how), context)


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
    if inner is not None:
        return horovod.allreduce_(
            tensor, average, name, op, prescale_factor, postscale_factor, inner
        )
    how = _Reduction(_checked_op(op, average), prescale_factor, postscale_factor, name)
    tensor.detach().copy_(_reduce(tensor, how))
    return tensor


class _Reduction(NamedTuple):
    op: Any
    prescale: float
    postscale: float
    name: str | None


class _Allreduce(torch.autograd.Function):
    """Its gradient is the same reduction of the gradients, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, how: _Reduction) -> torch.Tensor:
        ctx.how = how
        return _reduce(tensor, how)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Allreduce.apply(grads[0], ctx.how._replace(name=None)), None


def _checked_op(op: Any, average: bool | None) -> Any:
    op = handle_average_backwards_compatibility(op, average)
    if op == Adasum:
        world = worlds.current()
        raise InnerOnlyError(
            f"allreduce(op=hvd.Adasum) on learner {world.rank}: Adasum works in one super learner, "
            f"this job has {world.super_size}. Use hvd.Average or hvd.Sum, or start the job as one "
            f"super learner: {one_super_learner(world)}"
        )
    if op not in _OP_NAMES:
        raise ConfigError(
            f"allreduce(op={op!r}): allowed are hvd.{', hvd.'.join(_OP_NAMES.values())}. Pass one "
            "of these."
        )
    return op


def _reduce(tensor: torch.Tensor, how: _Reduction) -> torch.Tensor:
    world = worlds.current()
    factors = (how.prescale, how.postscale)
    call = Call(
        "allreduce", how.name, _described([(None, tensor)]), None, _OP_NAMES[how.op], factors
    )

    def operation(comm: Any) -> torch.Tensor:
        _tell(world, comm, call)
        _require_reducible(tensor)
        mine = _scaled(_flat(tensor), how.prescale)
        total = _allreduced(comm, mine, how.op)
        return _scaled(total, how.postscale / (comm.Get_size() if how.op == Average else 1))

    total = world.collectives.run("allreduce", operation)
    return total.to(dtype=tensor.dtype).reshape(tensor.shape).to(tensor.device)


def _require_reducible(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool or tensor.is_complex() or tensor.is_quantized:
        raise ConfigError(
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


def _allreduced(comm: Any, mine: torch.Tensor, op: Any) -> torch.Tensor:
    total = torch.empty_like(mine)
    for a, b in zip(_pieces(mine), _pieces(total), strict=True):
        wait(comm.Iallreduce(a, b, op=_mpi_op(op)))
    return total


def _mpi_op(op: Any) -> Any:
    from mpi4py import MPI

    return {Min: MPI.MIN, Max: MPI.MAX, Product: MPI.PROD}.get(op, MPI.SUM)


def _pieces(flat: torch.Tensor) -> Iterator[np.ndarray]:
    """The tensor's own memory, in arrays that MPI can count."""
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE].numpy()


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
    if inner is not None:
        return horovod.allgather(tensor, name, inner)
    return _Allgather.apply(tensor, name)


class _Allgather(torch.autograd.Function):
    """Its gradient is this learner's part of the mean gradient, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        gathered, ctx.start, ctx.rows = _gather(tensor, name)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mean = allreduce(grads[0], op=Average)
        return mean.narrow(0, ctx.start, ctx.rows), None


def _gather(tensor: torch.Tensor, name: str | None) -> tuple[torch.Tensor, int, int]:
    """All rows, the first that is this learner's, and how many are."""
    world = worlds.current()
    rows = tensor.shape[0] if tensor.dim() else None
    described = ((None, str(tensor.dtype), tuple(tensor.shape[1:])),)
    call = Call("allgather", name, described, private=rows)

    def operation(comm: Any) -> tuple[torch.Tensor, int, int]:
        counts = [other.private for other in _tell(world, comm, call)]
        if None in counts:
            raise ConfigError(
                f"allgather of a tensor without dimensions on learner "
                f"{world.collectives.ranks[counts.index(None)]}: at least one is needed. Pass "
                "`tensor.unsqueeze(0)`."
            )
        gathered = torch.empty((sum(counts), *tensor.shape[1:]), dtype=tensor.dtype)
        _allgather_rows(comm, _bytes(tensor.detach().cpu()), _bytes(gathered), counts)
        mine = comm.Get_rank()
        return gathered.to(tensor.device), sum(counts[:mine]), counts[mine]

    return world.collectives.run("allgather", operation)


def _allgather_rows(
    comm: Any, mine: torch.Tensor, everything: torch.Tensor, rows: Sequence[int]
) -> None:
    """Fill `everything` with the bytes of all learners, each in proportion to its rows."""
    row = everything.numel() // max(sum(rows), 1)
    parts = everything.split([row * n for n in rows])
    if everything.numel() < 2**31:
        counts = np.array([part.numel() for part in parts])
        a, b = mine.numpy(), everything.numpy()
        wait(comm.Iallgatherv(a, [b, counts]))
        return
    parts[comm.Get_rank()].copy_(mine)
    for root, part in enumerate(parts):
        _broadcast_bytes(comm, part, root)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The learners' objects by rank, through cloudpickle."""
    if inner_process_set(None, "allgather_object") is not None:
        return horovod.allgather_object(obj, name)
    world = worlds.current()
    call = Call("allgather_object", name, private=cloudpickle.dumps(obj))
    calls = world.collectives.run("allgather_object", lambda comm: _tell(world, comm, call))
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
    if inner is not None:
        return horovod.broadcast_(tensor, root_rank or 0, name, inner)
    _broadcast_all("broadcast", name, [(None, tensor)], root_rank)
    return tensor


class _Broadcast(torch.autograd.Function):
    """Its gradient is the mean gradient at the root and zero elsewhere, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int | None, name: str | None
    ) -> torch.Tensor:
        output = tensor.detach().clone()
        _broadcast_all("broadcast", name, [(None, output)], root_rank)
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
    _broadcast_all("broadcast_parameters", None, _named(params), root_rank)


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

    def operation(comm: Any) -> bytes | None:
        calls = _tell(world, comm, told)
        root = _root_in(world, call)
        is_root = comm.Get_rank() == root
        data = mine if is_root else np.empty(calls[root].private, np.uint8)
        _broadcast_bytes(comm, torch.from_numpy(data), root)
        return None if is_root else data.tobytes()

    return world.collectives.run(call.kind, operation)


def _broadcast_all(
    kind: str,
    name: str | None,
    named: Sequence[tuple[str | None, torch.Tensor]],
    root_rank: int | None,
) -> None:
    """Overwrite tensors with the root's. One that MPI cannot write to is copied there and back."""
    world = worlds.current()
    call = Call(kind, name, _described(named), root_rank)

    def operation(comm: Any) -> None:
        _tell(world, comm, call)
        root = _root_in(world, call)
        for _, tensor in named:
            staged = tensor.detach().cpu().contiguous()
            _broadcast_bytes(comm, _bytes(staged), root)
            if staged.data_ptr() != tensor.data_ptr() and comm.Get_rank() != root:
                tensor.detach().copy_(staged)

    world.collectives.run(kind, operation)


def _root_in(world: World, call: Call) -> int:
    """The root's rank in world.comm; None is the first surviving learner.

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


def _broadcast_bytes(comm: Any, data: torch.Tensor, root: int) -> None:
    for piece in _pieces(data):
        wait(comm.Ibcast(piece, root=root))


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
    world = worlds.current()
    world.collectives.run("barrier", lambda comm: _tell(world, comm, Call("barrier")))


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
    calls = world.collectives.run("join", lambda comm: _tell(world, comm, call))
    return int(max(other.private for other in calls)[1])


# ---- agree --------------------------------------------------------------------------------------


def _described(
    named: Sequence[tuple[str | None, torch.Tensor]],
) -> tuple[tuple[str | None, str, tuple[int, ...]], ...]:
    return tuple((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in named)


def _tell(world: World, comm: Any, call: Call) -> list[Call]:
    """The calls of all learners, equal but for what is private.

    Raises:
        CollectiveMismatchError: on all learners alike, if they are not.
    """
    try:
        calls: list[Call] = world.collectives.gather_in(comm, call.kind, call)
    except CollectiveMismatchError as error:
        raise horovods(CollectiveMismatchError)(*error.args) from None
    first = calls[0]
    for rank, other in zip(world.collectives.ranks, calls, strict=True):
        for what in ("name", "root", "op", "factors", "tensors"):
            if getattr(first, what) != getattr(other, what):
                raise _mismatch(what, world.collectives.ranks[0], first, rank, other)
    return calls


def _mismatch(what: str, rank: int, first: Call, other_rank: int, other: Call) -> Exception:
    mine, theirs = getattr(first, what), getattr(other, what)
    if what == "tensors":
        if len(mine) != len(theirs):
            what, mine, theirs = "number of tensors", len(mine), len(theirs)
        else:
            i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            what, mine, theirs = f"tensor {i}", _text(mine[i]), _text(theirs[i])
    return horovods(CollectiveMismatchError)(
        f"{first.kind}: {what} differs: {mine} on learner {rank}, {theirs} on learner {other_rank}. "
        "Call the same operations in the same order, with equal arguments, on all learners."
    )


def _text(described: tuple[str | None, str, tuple[int, ...]]) -> str:
    name, dtype, shape = described
    return f"{name or 'a tensor'} of {dtype}, shape {list(shape)}"
