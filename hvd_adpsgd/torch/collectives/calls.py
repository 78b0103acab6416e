"""Helpers of operations over all learners: checks of arguments, descriptions of tensors, running a call."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.errors import CollectiveMismatchError, ConfigError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.torch.basics import inner_process_set
from hvd_adpsgd.training.inside import told
from hvd_adpsgd.training.sharded import is_sharded
from hvd_adpsgd.training.super_learner import horovods

T = TypeVar("T")
P = ParamSpec("P")


def or_inside(operation: Callable[P, T], like: Callable[..., Any] | None = None) -> Callable[P, T]:
    """Return an operation in whose place Horovod's of its name runs where a super learner is concerned.

    It has the arguments of `like`, by default its own: a tensor or (grouped) list, ..., the process set.
    """
    name, signature = operation.__name__, inspect.signature(like or operation)

    @functools.wraps(operation)
    def run(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given, *how, process_set = bound.args
        inner = inner_process_set(process_set, name)
        (require_tensors if name.startswith("grouped") else require_tensor)(name, given)
        if inner is None:
            return operation(*bound.args, **bound.kwargs)
        if "root_rank" in bound.arguments:
            how[0] = how[0] or 0
        result = told(getattr(horovod, name))(given, *how, inner)
        return list(result) if isinstance(result, tuple) else result

    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def require_tensor(doing: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"{doing} got a {type(tensor).__name__}, allowed is a tensor. Pass `torch.as_tensor(...)`, one "
            "tensor a call, or use allgather_object or broadcast_object for other values."
        )
    if is_sharded(tensor):
        raise ConfigError(
            f"{doing} got a DTensor, of which each learner holds a part. Pass its `to_local()` or its "
            "`full_tensor()`."
        )


def require_tensors(doing: str, tensors: Any) -> None:
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise ConfigError(
            f"{doing} got {tensors!r:.40}, allowed is a list of at least one tensor. Pass [tensor, ...]."
        )
    for tensor in tensors:
        require_tensor(doing, tensor)


def require_dense(doing: str, named: Iterable[tuple[str | None, Any]]) -> None:
    """Raise ConfigError for a value, such as an entry of a state dict, that is no dense tensor."""
    for name, value in named:
        which = f"{doing}: {name!r}" if name else doing
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{which} is a {type(value).__name__}, as a module's get_extra_state() returns it; "
                "allowed are tensors. Leave it out, and pass it on by hvd.broadcast_object."
            )
        if value.layout != torch.strided:
            raise ConfigError(
                f"{which} has the layout {value.layout}, allowed are dense tensors. Pass its to_dense(), or "
                "leave it out and pass it on by hvd.broadcast_object."
            )


def described(
    named: Sequence[tuple[str | None, torch.Tensor]],
) -> tuple[tuple[str | None, str, tuple[int, ...]], ...]:
    return tuple((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in named)


def run_call(world: World, call: Call, operation: Callable[[Attempt], T]) -> T:
    """Run `operation` over all learners; a mismatch of their calls also raises a HorovodInternalError."""
    try:
        return world.collectives.run(call, operation)
    except CollectiveMismatchError as error:
        raise horovods(CollectiveMismatchError)(*error.args) from None
