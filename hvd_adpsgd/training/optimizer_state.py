"""The user's (plain) optimizer and the wrapped one share param_groups, state, hooks and attributes.

The wrapped one is what hvd.DistributedOptimizer returns for the plain one. Scripts and learning-rate
schedulers keep references to the plain optimizer, its `param_groups`, one group, or a tensor of its state.
torch's `load_state_dict` replaces all of these objects, in one of the two optimizers, and changes through the
old references would have no effect any more. So loading here writes the values into the present objects.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_adpsgd.errors import UnsupportedOptimizerError

log = logging.getLogger("hvd_adpsgd")

# attributes and methods of wrapped optimizers; the first ones are Horovod's
_ATTRIBUTES = {"backward_passes_per_step", "gradient_predivide_factor", "op", "process_set"}
_ATTRIBUTES |= {"sparse_as_dense", "_alone", "_averaging", "_reducer"}
_METHODS = {"step", "synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad"}
_METHODS |= {"add_param_group", "close", "load_state_dict", "state_dict"}
# attributes of a step() that a scheduler has put on the optimizer, in this and in older torch
_COUNTS = ("_wrapped_by_lr_sched", "_with_counter")


def require_shareable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedOptimizerError if wrapping would lose an attribute of this optimizer object.

    A `step` that a learning-rate scheduler has put on the object may be lost, as it only counts calls.
    """
    kind = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        if name in _ATTRIBUTES:
            raise UnsupportedOptimizerError(
                f"this {kind} has an attribute {name!r}, which the wrapper uses itself. Rename it in the "
                "optimizer's class."
            )
        if name in _METHODS and not any(hasattr(value, mark) for mark in _COUNTS):
            raise UnsupportedOptimizerError(
                f"this {kind} has a {name}() of its own, set on the object and not in its class: wrapping "
                "would lose it. Wrap first, then replace the method of the wrapped optimizer; or override it "
                "in a subclass."
            )


def made_of(optimizer: torch.optim.Optimizer, methods: dict[str, Any]) -> Any:
    """Return an object that shares the optimizer's attributes, of a class derived from the optimizer's.

    The class has these methods, and the optimizer's class as `_parent`: the methods call that, not super(),
    so that a script may derive from the class made here. No constructor is called: it may need arguments, and
    makes a new state.
    """
    parent = type(optimizer)
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        # sets torch's attributes if a wrapper class has not called torch's constructor
        optimizer.__setstate__({})
    kind: Any = type(parent.__name__, (parent,), {**methods, "_parent": parent})
    made = kind.__new__(kind)
    made.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in _METHODS})
    return made


_bound: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()
# of each wrapped optimizer, the plain one, and the param_groups and the state that they share
_shared: weakref.WeakKeyDictionary[
    Any, tuple[Callable[[], torch.optim.Optimizer | None], list[dict[str, Any]], Any]
] = weakref.WeakKeyDictionary()


def bind(optimizer: torch.optim.Optimizer, wrapped: Any, runs: Callable[[Any], bool]) -> None:
    """Make the user's (plain) optimizer count the steps of the wrapped one, and refuse steps of its own.

    If the script has dropped the wrapped optimizer before its first step, steps of the plain one are not
    refused: a warning says that they average nothing.

    Registers hooks, and removes those of an earlier call. The wrapped optimizer is what
    hvd.DistributedOptimizer returns. Where torch has such hooks, one keeps the objects in param_groups and
    state when the plain optimizer loads a state dict.

    Args:
        optimizer: the plain optimizer, which shares its hooks with `wrapped`.
        wrapped: the object that `made_of` has made of it.
        runs: tells whether the wrapped optimizer is still in use; if not, the plain one may step.
    """
    for hook in _bound.pop(optimizer, ()):
        hook.remove()
    plain, unused = weakref.ref(optimizer), [True]
    hooks = [
        optimizer.register_step_pre_hook(
            functools.partial(_refuse_plain_step, plain, weakref.ref(wrapped), runs, unused)
        ),
        optimizer.register_step_post_hook(functools.partial(_count_step, plain, unused)),
        optimizer.register_load_state_dict_post_hook(
            functools.partial(_refill, optimizer.param_groups, optimizer.state)
        ),
    ]
    _bound[optimizer] = hooks
    _shared[wrapped] = plain, optimizer.param_groups, optimizer.state


def reunite(wrapped: Any) -> None:
    """Put param_groups or a state that a script has set on one of the two optimizers into the shared objects.

    The script's groups stay the same objects; the list that holds them is the shared one again. What is set
    on the wrapped optimizer comes first.
    """
    plain, groups, state = _shared.get(wrapped, (lambda: None, wrapped.param_groups, wrapped.state))
    its = plain()
    for one in (wrapped,) if its is None else (its, wrapped):
        if one.param_groups is not groups:
            groups[:] = one.param_groups
            one.param_groups = groups
        if one.state is not state:
            _replace(state, one.state)
            one.state = state


def _refuse_plain_step(
    plain: weakref.ref[Any],
    wrapped: weakref.ref[Any],
    runs: Callable[[Any], bool],
    unused: list[bool],
    optimizer: torch.optim.Optimizer,
    *_: Any,
) -> None:
    """Raise UnsupportedOptimizerError if the script steps the user's optimizer, not the wrapped one."""
    its = wrapped()
    if its is None and unused:
        log.warning(
            "step() of the plain %s averages nothing: the script has dropped what hvd.DistributedOptimizer "
            "returned for it, before its first step. Call step() of what it returned.",
            type(optimizer).__name__,
        )
    if optimizer is plain() and its is not None and runs(its):
        raise UnsupportedOptimizerError(
            f"step() of the plain {type(optimizer).__name__}, which was wrapped: it averages nothing. Call "
            "step() of what hvd.DistributedOptimizer returned, and pass that to GradScaler and trainers."
        )


def _count_step(plain: weakref.ref[Any], unused: list[bool], *_: Any) -> None:
    """Count a step on the user's optimizer: its schedulers check that it has stepped before they do."""
    unused.clear()
    if (optimizer := plain()) is not None:
        optimizer._opt_called = True
        # older torch reads this counter
        optimizer._step_count = getattr(optimizer, "_step_count", 0) + 1


@contextlib.contextmanager
def keeping_held(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a load_state_dict inside the `with` block write into the present param_groups and state objects.

    The list of groups, each group and the mapping of states stay the same objects. Tensors are replaced, as
    in torch: a state_dict() taken before keeps its values.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    _refill(groups, state, optimizer)


def _refill(groups: list[dict[str, Any]], state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer's new groups and states into its former objects `groups` and `state`."""
    for held, loaded in zip(groups, optimizer.param_groups, strict=True):
        _replace(held, loaded)
    _replace(state, optimizer.state)
    optimizer.param_groups, optimizer.state = groups, state


def _replace(held: Any, loaded: Any) -> None:
    if held is not loaded:
        held.clear()
        held.update(loaded)


def load_in_place(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state as load_state_dict does, but write tensors in place where shape and dtype agree."""
    with writing_in_place(optimizer):
        optimizer.load_state_dict(state)


@contextlib.contextmanager
def writing_in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """As keeping_held, but values are also written into the present tensors where shape and dtype agree.

    Horovod's broadcast does the same. A captured CUDA graph, for instance, then uses the new values.
    """
    before = options(optimizer)
    held = dict(optimizer.state)
    with keeping_held(optimizer):
        yield
    set_options(optimizer, options(optimizer), before)
    for parameter, loaded in list(optimizer.state.items()):
        optimizer.state[parameter] = _written(held.get(parameter), loaded)


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each param_group: learning rate and so on, all but its parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def set_options(
    optimizer: torch.optim.Optimizer, new: list[dict[str, Any]], held: list[dict[str, Any]]
) -> None:
    """Set the options of each param_group to `new`; write tensors into fitting tensors of `held`."""
    for group, values, before in zip(optimizer.param_groups, new, held, strict=True):
        group.update({k: _written(before.get(k), value) for k, value in values.items()})


@torch.no_grad()
def _written(held: Any, new: Any) -> Any:
    """Return the new value, written into the object `held` where that is a dict or a tensor that fits."""
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
