"""Collective `broadcast` over all learners, also of parameters, optimizer states and objects."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.errors import ConfigError, PeerFailedError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.inner.horovod import Average
from hvd_adpsgd.inner.tensor_bytes import bytes_of, lent, overwrite
from hvd_adpsgd.joining.join_state import filled, mesh_of, outlined, pack, state_of, unpack
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.torch.basics import global_process_set, inner_process_set
from hvd_adpsgd.torch.collectives.calls import described, or_inside, require_dense, run_call
from hvd_adpsgd.torch.collectives.reductions import allreduce
from hvd_adpsgd.training.inside import told
from hvd_adpsgd.training.means import among_counterparts
from hvd_adpsgd.training.optimizer_state import (
    load_in_place,
    options,
    set_options,
    writing_in_place,
)
from hvd_adpsgd.training.sharded import is_sharded, local

Parameters = dict[str, torch.Tensor] | list[torch.Tensor] | list[tuple[str, torch.Tensor]]


@or_inside
def broadcast(
    tensor: torch.Tensor,
    root_rank: int | None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Return the tensor of learner `root_rank` (the root), on all learners; differentiable.

    Args:
        tensor: a tensor of the same dtype and shape on all learners.
        root_rank: rank of the root, among all learners, or in the super learner if that is the process set.
            None: the first surviving learner.
        name: if given, the same on all learners.
        process_set: all learners, or hvd.super_learner.

    Raises:
        CollectiveMismatchError: on all learners, if their calls or tensors differ.
        ConfigError: for a root_rank out of range.
        PeerFailedError: if the root has failed.
    """
    return _Broadcast.apply(tensor, root_rank, name)


@or_inside
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int | None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with the tensor of learner `root_rank`, and return it; see broadcast."""
    broadcast_all("broadcast", name, [(None, tensor)], root_rank)
    return tensor


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast: its gradient is the mean gradient at the root, else zero, as in Horovod."""

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
    """Overwrite the parameters of all learners with those of learner `root_rank` (the root).

    Args:
        params: `model.state_dict()`, `list(model.named_parameters())` or a list of tensors. DTensors become
            those of the root's super learner.
        root_rank: rank of the root among all learners; None: the first surviving learner.

    Raises:
        ConfigError: for params of another type, an entry that is no dense tensor, a root_rank out of range.
        CollectiveMismatchError: on all learners, if their parameters differ in name, dtype or shape.
        ModelMismatchError: on all learners, if a tensor is expanded and cannot hold the root's numbers.
        PeerFailedError: if the root has failed.
    """
    named = _named(params)
    require_dense("broadcast_parameters", named)
    if inner_process_set(None, "broadcast_parameters") is not None:
        # of a DTensor each learner holds the part of the root's super learner: there is one
        whole = [(name, tensor) for name, tensor in named if not is_sharded(tensor)]
        horovod.broadcast_parameters(params if len(whole) == len(named) else whole, root_rank or 0)
        return
    broadcast_all("broadcast_parameters", None, named, root_rank)


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
    """Give all learners the optimizer state and options (learning rate, ...) of learner `root_rank`.

    Values are written into the present param_groups and tensors: schedulers made before, and references that
    the script keeps to parts of the optimizer, remain valid.

    Over several super learners every learner's state equals the root's exactly: if the root's optimizer has
    not stepped yet, all states are empty afterwards. (Horovod initializes an empty state by a step with zero
    gradients, which counts as a step and applies weight decay.)

    Args:
        optimizer: wrapped or not; with the same parameter groups on all learners.
        root_rank: rank of the root among all learners; None: the first surviving learner.
        model: as in Horovod, which needs the model to find sparse parameters.

    Raises:
        ConfigError: for LBFGS, or a root_rank out of range.
        CollectiveMismatchError: on all learners, if their parameter groups differ in size.
        PeerFailedError: if the root has failed.
    """
    if mesh_of(optimizer) is not None:
        _broadcast_sharded_state(optimizer, root_rank)
        return
    if inner_process_set(None, "broadcast_optimizer_state") is not None:
        held = options(optimizer)
        with writing_in_place(optimizer):  # the torch backend's loads a state dict
            horovod.broadcast_optimizer_state(optimizer, root_rank or 0, model)
        # because Horovod's broadcast replaces tensors, and omits the options of an optimizer without state
        set_options(optimizer, horovod.broadcast_object(options(optimizer), root_rank or 0), held)
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "broadcast_optimizer_state: cannot broadcast torch.optim.LBFGS state, which is nested. "
            "Use another optimizer, or load the same checkpoint on every learner."
        )
    groups = tuple((None, "group", (len(g["params"]),)) for g in optimizer.param_groups)
    call = Call("broadcast_optimizer_state", tensors=groups, root=root_rank)
    data = _broadcast_data(call, lambda: pack(optimizer.state_dict()))
    if data is not None:
        load_in_place(optimizer, unpack(data))


def _broadcast_sharded_state(optimizer: torch.optim.Optimizer, root_rank: int | None) -> None:
    """As broadcast_optimizer_state, for DTensors: learners get the parts of their counterparts."""
    outline = broadcast_object(outlined(optimizer.state_dict()), root_rank)
    state = filled(outline, mesh_of(optimizer))
    world = worlds.current()
    is_first = root_rank is None or world.collectives.joining
    if world.rank != (world.collectives.ranks[0] if is_first else root_rank):
        own = optimizer.state_dict()["state"]
        for i, its in state["state"].items():  # the parts of a learner that has them already
            for key, value in its.items():
                if isinstance(value, torch.Tensor) and is_sharded(value) and key in own.get(i, {}):
                    value.copy_(own[i][key])
        load_in_place(optimizer, state)
    if world.super_size > 1:
        parts = [t for t in state_of(optimizer) if is_sharded(t)]
        broadcast_all("broadcast_optimizer_state", None, [(None, t) for t in parts], root_rank)


def broadcast_object(
    obj: Any,
    root_rank: int | None = 0,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Return the object of learner `root_rank` (the root), on all learners; sent by cloudpickle.

    Args:
        obj: the object to send; used on the root alone, which gets `obj` itself back.
        root_rank: rank of the root, among all learners, or in the super learner if that is the process set.
            None: the first surviving learner.
        name: if given, the same on all learners.
        process_set: all learners, or hvd.super_learner.

    Raises:
        CollectiveMismatchError: on all learners, if their calls differ.
        ConfigError: for a root_rank out of range.
        PeerFailedError: if the root has failed.
    """
    inner = inner_process_set(process_set, "broadcast_object")
    if inner is not None:
        return told(horovod.broadcast_object)(obj, root_rank or 0, name, inner)
    call = Call("broadcast_object", name, root=root_rank)
    data = _broadcast_data(call, lambda: cloudpickle.dumps(obj))
    return obj if data is None else cloudpickle.loads(data)


def _broadcast_data(call: Call, make: Callable[[], bytes]) -> bytes | None:
    """Broadcast and return the bytes that make() returns on the root learner; None on the root itself."""
    world = worlds.current()
    # make() may raise, so it is called before the operation begins
    may_be_root = call.root in (None, world.rank) or world.collectives.joining
    mine = np.frombuffer(make(), dtype=np.uint8).copy() if may_be_root else np.empty(0, np.uint8)
    told = call._replace(private=mine.size)

    def operation(attempt: Attempt) -> bytes | None:
        root = _root_in(world, call)
        is_root = attempt.rank == root
        data = mine if is_root else np.empty(attempt.calls[root].private, np.uint8)
        attempt.broadcast(data, root)
        return None if is_root else data.tobytes()

    return run_call(world, told, operation)


def broadcast_all(
    kind: str,
    name: str | None,
    named: Sequence[tuple[str | None, torch.Tensor]],
    root_rank: int | None,
) -> None:
    """Overwrite tensors with those of the root learner; through host memory if MPI cannot write to them."""
    require_dense(kind, named)
    world = worlds.current()
    call = Call(kind, name, described(named), root_rank)

    def operation(attempt: Attempt) -> None:
        root = _root_in(world, call)
        _bcast(attempt, root, [(name, its) for name, its in named if not is_sharded(its)])
        parts = [(name, local(tensor)) for name, tensor in named if is_sharded(tensor)]
        if parts and not world.collectives.joining:
            _bcast(*_with_giver(world, attempt, root), parts)

    run_call(world, call, operation)


def _bcast(attempt: Attempt, root: int, named: Iterable[tuple[str | None, torch.Tensor]]) -> None:
    for name, tensor in named:
        staged = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        attempt.broadcast(lent(bytes_of(staged)), root)
        if staged.data_ptr() != tensor.data_ptr() and attempt.rank != root:
            overwrite(name, tensor.detach(), staged)


def _with_giver(world: World, attempt: Attempt, root: int) -> tuple[Attempt, int]:
    """Return the attempt of this learner's counterparts, and which of them is in the root's super learner.

    Raises:
        PeerFailedError: if that learner has failed.
    """
    part = among_counterparts(world, attempt)
    giver = world.groups[world.super_rank_of(attempt.ranks[root])][world.inner_rank]
    if giver not in part.ranks:
        raise PeerFailedError(
            f"broadcast of a sharded model: learner {giver}, of the root's super learner, "
            "has failed, and with it its part. Choose a root in another super learner."
        )
    return part, part.ranks.index(giver)


def _root_in(world: World, call: Call) -> int:
    """Return the root learner's index among the surviving learners: 0, the first one, for a root of None.

    In a super learner that has not joined yet, its own first learner is the root, whatever the argument.
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
