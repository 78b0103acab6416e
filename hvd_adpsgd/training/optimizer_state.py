"""One optimizer behind two objects: the user's and the wrapped one share groups, state, hooks, attributes.

Scripts and learning-rate schedulers hold the optimizer from before it was wrapped, its `param_groups`, one
group, a tensor of its state. torch's `load_state_dict` replaces all of these, in one of the two objects, and
what is held would have no effect any more. So values go into the objects that are there.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from horovod.torch.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer

from hvd_adpsgd.errors import UnsupportedOptimizerError

__all__ = [
    "bind",
    "keeping_held",
    "load_in_place",
    "options",
    "require_shareable",
    "set_options",
    "stand_in",
]

# What Horovod's constructor sets on the object that it makes.
_HOROVODS = {
    each.argval
    for kind in (_DistributedOptimizer, _DistributedAdasumOptimizer)
    for each in dis.get_instructions(kind.__init__)
    if each.opname == "STORE_ATTR"
}
_METHODS = {k for k, v in vars(_DistributedOptimizer).items() if isinstance(v, types.FunctionType)}
_METHODS |= {"add_param_group", "close", "state_dict"}  # of wrapped optimizers
_COUNTS = (
    "_wrapped_by_lr_sched",
    "_with_counter",
)  # on a scheduler's step, and that of older torch


# ---- wrapping -----------------------------------------------------------------------------------


def require_shareable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedOptimizerError if wrapping would lose an attribute of the object.

    The `step` that a learning-rate scheduler puts there only counts calls; see `stand_in`.
    """
    kind = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        if name in _HOROVODS or name == "_averaging":
            raise UnsupportedOptimizerError(
                f"this {kind} has an attribute {name!r}, which Horovod's wrapper uses itself. Rename it in "
                "the optimizer's class."
            )
        if name in _METHODS and not any(hasattr(value, mark) for mark in _COUNTS):
            raise UnsupportedOptimizerError(
                f"this {kind} has a {name}() of its own, set on the object and not in its class: wrapping "
                "would lose it. Wrap first, then replace the method of the wrapped optimizer; or override it "
                "in a subclass."
            )


def stand_in(optimizer: torch.optim.Optimizer) -> Any:
    """What Horovod wraps: its class makes objects that share everything with `optimizer`.

    Horovod calls the constructor of the optimizer's class with param_groups alone: it may need more
    arguments, and it makes a new state. Here the constructor takes over the attributes as they are.
    """
    parent = type(optimizer)
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        optimizer.__setstate__({})  # one around another, that has not called torch's constructor
    plain = weakref.ref(optimizer)  # a class is freed late, and must not keep tensors till then

    def share(self: Any, params: Any) -> None:
        self.__dict__.update({k: v for k, v in vars(plain()).items() if k not in _METHODS})

    kind: Any = type(parent.__name__, (parent,), {"__init__": share})
    made = kind.__new__(kind)
    share(made, None)
    return made


_bound: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()


def bind(optimizer: torch.optim.Optimizer, wrapped: Any, runs: Callable[[Any], bool]) -> None:
    """Hooks by which the plain optimizer follows the wrapped one. Those of an earlier wrapping are removed.

    Args:
        optimizer: the plain one, which shares its hooks with `wrapped`.
        wrapped: what Horovod has made of its stand-in.
        runs: whether the wrapped optimizer is in use still. Else the plain one may step by itself.
    """
    for hook in _bound.pop(optimizer, ()):
        hook.remove()
    plain = weakref.ref(optimizer)
    hooks = [
        optimizer.register_step_pre_hook(
            functools.partial(_refuse_plain_step, plain, weakref.ref(wrapped), runs)
        ),
        optimizer.register_step_post_hook(functools.partial(_count_step, plain)),
    ]
    if hasattr(optimizer, "register_load_state_dict_post_hook"):  # older torch has none
        hooks.append(
            optimizer.register_load_state_dict_post_hook(
                functools.partial(_refill, optimizer.param_groups, optimizer.state)
            )
        )
    _bound[optimizer] = hooks


def _refuse_plain_step(
    plain: weakref.ref[Any],
    wrapped: weakref.ref[Any],
    runs: Callable[[Any], bool],
    optimizer: torch.optim.Optimizer,
    *_: Any,
) -> None:
    """Raise UnsupportedOptimizerError if the plain optimizer is stepped in place of the wrapped one."""
    its = wrapped()
    if optimizer is plain() and its is not None and runs(its):
        raise UnsupportedOptimizerError(
            f"step() of the plain {type(optimizer).__name__}, which was wrapped: it averages nothing. Call "
            "step() of what hvd.DistributedOptimizer returned, and pass that to GradScaler and trainers."
        )


def _count_step(plain: weakref.ref[Any], *_: Any) -> None:
    """A scheduler of the plain optimizer asks there whether a step was made before its own."""
    if (optimizer := plain()) is not None:
        optimizer._opt_called = True
        optimizer._step_count = getattr(optimizer, "_step_count", 0) + 1  # of older torch


# ---- loading ------------------------------------------------------------------------------------


@contextlib.contextmanager
def keeping_held(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """What load_state_dict loads inside goes into the present param_groups and state.

    The list, each group and the mapping of states stay the objects that they are. Tensors are replaced, as in
    torch: a state_dict() taken before keeps its values.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    _refill(groups, state, optimizer)


def _refill(groups: list[dict[str, Any]], state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Move what the optimizer has now into the objects that it had."""
    for held, loaded in zip(groups, optimizer.param_groups, strict=True):
        _replace(held, loaded)
    _replace(state, optimizer.state)
    optimizer.param_groups, optimizer.state = groups, state


def _replace(held: Any, loaded: Any) -> None:
    if held is not loaded:
        held.clear()
        held.update(loaded)


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As load_state_dict, also into the tensors that are there, where shape and dtype agree.

    As Horovod's broadcast does: a captured CUDA graph, say, goes on with the new values.
    """
    before = options(optimizer)
    held = dict(optimizer.state)
    with keeping_held(optimizer):
        optimizer.load_state_dict(state)
    set_options(optimizer, options(optimizer), before)
    for parameter, loaded in list(optimizer.state.items()):
        optimizer.state[parameter] = _written(held.get(parameter), loaded)


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rate and the like of each group."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def set_options(
    optimizer: torch.optim.Optimizer, new: list[dict[str, Any]], held: list[dict[str, Any]]
) -> None:
    """Set the options of each group, tensors into those that are held."""
    for group, values, before in zip(optimizer.param_groups, new, held, strict=True):
        group.update({k: _written(before.get(k), value) for k, value in values.items()})


@torch.no_grad()
def _written(held: Any, new: Any) -> Any:
    """The new value, in the held object where that can take it: a dict of tensors, or a tensor."""
    if held is new:
        return held
    if isinstance(held, dict) and isinstance(new, dict):
        values = {key: _written(held.get(key), value) for key, value in new.items()}
        _replace(held, values)
        return held
    if isinstance(held, torch.Tensor) and isinstance(new, torch.Tensor) and _fits(held, new):
        held.copy_(new)
        return held
    return new


def _fits(held: torch.Tensor, new: torch.Tensor) -> bool:
    kinds = [(t.shape, t.dtype, t.layout, t.requires_grad) for t in (held, new)]
    return kinds[0] == kinds[1] and held.layout == torch.strided
