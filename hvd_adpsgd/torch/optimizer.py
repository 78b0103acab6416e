"""`DistributedOptimizer`: Horovod's inside a super learner, the averaging engine between super learners.

As in Horovod, the wrapped object gets a class made at run time: its base is the user's class, its
methods are Horovod's, overridden by those of `_METHODS` below. One step is

    gradient all-reduce in the super learner, the user's optimizer, then Averaging.finish_step:
    apply the corrections of the last exchanges, offer the model to the engine.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import horovod.torch as horovod
import torch
from torch.amp import grad_scaler

from hvd_adpsgd import strategies
from hvd_adpsgd.collectives.usage import counted
from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import (
    AdpsgdError,
    ConfigError,
    CopyError,
    GradientOrderError,
    InnerOnlyError,
    StrategyMismatchError,
    UnsupportedOptimizerError,
)
from hvd_adpsgd.launch import bootstrap
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.torch.collectives import global_process_set
from hvd_adpsgd.training import checkpoint
from hvd_adpsgd.training.averaging import Averaging, live, stop_dropped
from hvd_adpsgd.training.consistency import agree, require_same_sets
from hvd_adpsgd.training.gradients import Gradients
from hvd_adpsgd.training.optimizer_state import bind, keeping_held, require_shareable, stand_in
from hvd_adpsgd.training.parameters import AveragingSpec, statistics
from hvd_adpsgd.training.super_learner import inside_super_learner
from hvd_adpsgd.training.supported import require_models, require_supported
from hvd_adpsgd.training.timeline import StepRecord

__all__ = ["DistributedOptimizer"]

log = logging.getLogger("hvd_adpsgd")

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_OPS = {horovod.Average: "Average", horovod.Sum: "Sum", horovod.Adasum: "Adasum"}


@counted("DistributedOptimizer")
def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedTensors | None = None,
    compression: Any = horovod.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    *,
    averaging: Strategy | str | None = None,
    exchanges_per_step: float | None = None,
    exchange_share: float | None = None,
    max_staleness: int | None = None,
    wire_dtype: str | None = None,
    buffers: torch.nn.Module | NamedTensors | None = None,
) -> torch.optim.Optimizer:
    """Wrap `optimizer`: gradients are averaged in the super learner, models between super learners.

    Inside the super learner every argument up to `process_set` means what it means in Horovod. All
    learners of the job must call this together, with the same arguments. With several super learners,
    backward() returns when the gradients are averaged, so they may be clipped before step().

    Args:
        optimizer: any torch optimizer but LBFGS.
        named_parameters: names for messages and for Horovod; the same on all learners.
        compression: of gradients, inside the super learner.
        backward_passes_per_step: backward passes whose gradients one step adds up.
        op: reduction of gradients inside the super learner.
        gradient_predivide_factor: how much of the mean is divided before the sum.
        num_groups: older form of `groups`.
        groups: gradients that Horovod reduces together.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: all learners (default) or `hvd.super_learner`; others only with one super
            learner.
        averaging: a strategy or its name; default HVD_ADPSGD_AVERAGING, else RandomPairs().
        exchanges_per_step: in how many exchanges a super learner takes part per step on average,
            active and passive together; default 1.
        exchange_share: in (0, 1]: an exchange moves that share of the model's chunks, each in its turn.
            The mean stays exact. Default 1.
        max_staleness: steps; step() waits (at most deadline_s) rather than apply a correction from
            an older snapshot. Default: never waits.
        wire_dtype: "float16" or "bfloat16": models travel in 16 bits; the mean is kept exactly.
        buffers: also average the floating-point buffers of this module (BatchNorm statistics), or
            these (name, tensor) pairs.

    Returns:
        An instance of the optimizer's own class: LR schedulers and GradScaler accept it, and
        state_dict() is the optimizer's own. It shares param_groups, state, hooks and attributes with
        `optimizer`: what was made of that, such as a scheduler, goes on, and has effect here.

    Raises:
        NotInitializedError: before hvd.init().
        UnsupportedOptimizerError: for LBFGS, an optimizer that is wrapped already, or an object with
            attributes that wrapping would lose.
        ModelMismatchError, StrategyMismatchError: on every learner, if tensors or arguments differ.
        ConfigError: for a value out of its range.

    Source: Zhang et al., H-ADPSGD, arXiv:1907.05701; Lian et al., AD-PSGD, arXiv:1710.06952.
    """
    world = worlds.current()
    named = _listed(named_parameters)
    given = {
        "exchanges_per_step": exchanges_per_step,
        "exchange_share": exchange_share,
        "max_staleness": max_staleness,
        "wire_dtype": wire_dtype,
    }
    inner = {  # Horovod's
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
    }
    spec = agree(
        world, lambda: _spec(world, optimizer, averaging, given, inner, process_set, named, buffers)
    )
    world = _join_if_synchronous(world, spec.strategy)
    if world.is_plain:
        ranks = _inner_process_set(process_set, world).ranks or ()
        require_same_sets(world, "hvd.DistributedOptimizer", ranks)
    if live():
        gc.collect()  # before the new engine: a dropped optimizer in a cycle still holds its memory
    stop_dropped()
    _retire_owners(tensor for _, tensor in spec.named if tensor.requires_grad)
    wrapped = horovod.DistributedOptimizer(
        stand_in(optimizer),
        named_parameters=named,
        **inner,
        process_set=_inner_process_set(process_set, world),
    )
    if world.is_plain:
        _say_nothing_to_average(world, spec.strategy)
        _become_plain(wrapped, type(optimizer))
        if world.config.timeline is not None:
            _record_parts(wrapped, StepRecord(world))
        bind(optimizer, wrapped, functools.partial(_is_plain_in_use, weakref.ref(world)))
        return wrapped
    _become_averaging(wrapped, type(optimizer))
    mine = wrapped._averaging = Averaging(world, spec)
    mine.optimizer = weakref.ref(wrapped)
    mine.at_stop.append(functools.partial(_unhook, weakref.proxy(wrapped)))
    weakref.finalize(wrapped, mine.drop).atexit = False  # shutdown() stops what is left
    bind(optimizer, wrapped, lambda its: not its._averaging.stopped)
    return wrapped


def _spec(
    world: World,
    optimizer: torch.optim.Optimizer,
    averaging: Strategy | str | None,
    given: dict[str, Any],
    inner: dict[str, Any],
    process_set: Any,
    named: list[tuple[str, torch.Tensor]] | None,
    buffers: torch.nn.Module | NamedTensors | None,
) -> AveragingSpec:
    """The spec of this learner's call, after the checks that need no peer."""
    require_supported(optimizer)
    require_shareable(optimizer)
    _require_named("named_parameters", named)
    strategy = _strategy(averaging, world.config.averaging)
    _require_joinable(strategy, world)
    if not world.is_plain and strategy.averages != "nothing":
        require_models(optimizer, named)
    config: Config = world.config.replace(**{k: v for k, v in given.items() if v is not None})
    if strategy.averages != "nothing":
        _inner_process_set(process_set, world)
    _require_wire(strategy, config, world)
    _require_pairs(strategy, config, world)
    if buffers is not None:
        strategy.refuse("buffers=")
    if inner["op"] == horovod.Adasum:
        strategy.refuse("op=Adasum")
    names = _names(optimizer, named)
    trained = _trained(names, optimizer.param_groups)
    compared = {
        "optimizer": type(optimizer),
        "averaging": strategy.spec(),
        **{name: getattr(config, name) for name in given},
        **inner,
        "op": _OPS.get(inner["op"], inner["op"]),
    }
    arguments = [f"{name}={_as_text(value, names)}" for name, value in compared.items()]
    return AveragingSpec(strategy, config, trained, _floating(buffers), arguments)


def _as_text(value: Any, names: dict[torch.Tensor, str]) -> str:
    """An argument of DistributedOptimizer for comparisons, the same in every process."""
    if isinstance(value, torch.Tensor):
        return names.get(value, "a tensor that is not a parameter")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_as_text(each, names) for each in value)}]"
    if value is None or isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, (int, float)):
        return repr(float(value)).removesuffix(".0")
    kind = value if isinstance(value, type) else type(value)
    return kind.__qualname__


def _listed(pairs: Any) -> Any:
    """An iterable, which may be read once only, as a list; anything else as it is."""
    return list(pairs) if isinstance(pairs, Iterable) else pairs


def _require_named(argument: str, pairs: Any) -> None:
    """Raise ConfigError unless `pairs` is None or a list of (name, tensor)."""
    if pairs is None:
        return
    odd = (
        pairs if not isinstance(pairs, list) else next((p for p in pairs if not _is_named(p)), None)
    )
    if odd is not None:
        raise ConfigError(
            f"{argument} got a {type(odd).__name__}, allowed are pairs (name, tensor). Pass "
            f"model.named_{argument.removeprefix('named_')}()."
        )


def _is_named(pair: Any) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], torch.Tensor)
    )


def _require_wire(strategy: Strategy, config: Config, world: World) -> None:
    """Raise ConfigError if wire_dtype is set for a mean of all, which is summed in full precision."""
    plan = strategy.plan(world.super_rank, world.super_size)
    if plan.averages_all and plan.width == 0 and config.wire_dtype is not None:
        raise ConfigError(
            f"wire_dtype={config.wire_dtype} with averaging={strategy.spec()}: the mean of all is summed "
            "in full precision. Leave wire_dtype out, or use a strategy of pairs."
        )


def _require_joinable(strategy: Strategy, world: World) -> None:
    """Raise StrategyMismatchError if others may join the job, and cannot with this strategy."""
    if world.config.join_secret_file is None:
        return
    if strategy.averages == "nothing" or (world.super_size == 1 and not strategy.is_gossip):
        raise StrategyMismatchError(
            f"averaging={strategy.spec()} with HVD_ADPSGD_JOIN_SECRET_FILE and "
            f"super_size()={world.super_size}: others cannot join this job. Use random_pairs, fixed_ring or "
            "random_ring, or leave the file out."
        )


def _require_pairs(strategy: Strategy, config: Config, world: World) -> None:
    """Raise ConfigError if exchange_share is set for a strategy without pairs."""
    plan = strategy.plan(world.super_rank, world.super_size)
    if world.super_size > 1 and plan.averages_all and plan.width == 0 and config.exchange_share < 1:
        raise ConfigError(
            f"exchange_share={config.exchange_share:g} with averaging={strategy.spec()}: a mean of "
            "all is one of whole models. Leave exchange_share out, or use a strategy of pairs."
        )


def _names(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Horovod's names of the parameters, before Horovod has looked at them."""
    names = {
        p: f"allreduce.noname.{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    }
    if named is not None and all(isinstance(pair, tuple) for pair in named):
        names.update({p: name for name, p in sorted(named, key=lambda pair: pair[0])})
    return names


def _strategy(averaging: Strategy | str | None, default: str) -> Strategy:
    if isinstance(averaging, Strategy):
        return averaging
    if averaging is not None and not isinstance(averaging, str):
        raise ConfigError(
            f"averaging={averaging!r}: allowed are a strategy and its name. Pass hvd.RandomPairs() or "
            '"random_pairs", for instance.'
        )
    return strategies.parse(default if averaging is None else averaging)


def _join_if_synchronous(world: World, strategy: Strategy) -> World:
    """The synchronous strategy makes all learners one super learner: plain Horovod."""
    if strategy.averages != "nothing" or world.super_size == 1:
        return world
    if live():
        raise StrategyMismatchError(
            "averaging=synchronous joins all learners into one super learner, but an optimizer is "
            "already averaged between super learners. Use one strategy for all optimizers."
        )
    return bootstrap.merge_super_learners(world)


def _retire_owners(tensors: Iterable[torch.Tensor]) -> None:
    """Stop averagings of these tensors by earlier optimizers: a tensor has one owner."""
    tensors = list(tensors)
    for averaging in list(live()):
        if any(id(tensor) in averaging.trained for tensor in tensors):
            _say_retired(averaging, {id(tensor) for tensor in tensors})
            averaging.stop("another optimizer was wrapped around its parameters")


def _say_retired(averaging: Averaging, ids: set[int]) -> None:
    """Warn unless the new optimizer trains all that the earlier one did."""
    trained = averaging.spec.trained
    left = [name for name, p in trained if p.requires_grad and id(p) not in ids]
    if not left:
        log.info("an optimizer wrapped around the same parameters before averages no longer")
        return
    log.warning(
        "the optimizer wrapped before averages %s no longer, for another one was wrapped around %d of its %d "
        "parameters: its next step() raises. Wrap one optimizer with all parameter groups, or several with "
        "parameters of their own.",
        left[0],
        len(trained) - len(left),
        len(trained),
    )


def _unhook(wrapped: Any) -> None:
    """Drop the gradient hooks: their autograd nodes have no other reference."""
    with contextlib.suppress(ReferenceError):  # the optimizer and its hooks are freed already
        wrapped._grad_accs.clear()


def _inner_process_set(process_set: Any, world: World) -> Any:
    if process_set is None or process_set is global_process_set:
        return horovod.global_process_set
    if not world.is_plain and process_set is not horovod.global_process_set:
        raise InnerOnlyError(
            f"process_set={process_set} with {world.super_size} super learners: gradients are "
            "averaged in a whole super learner. Leave process_set out, pass hvd.super_learner, or "
            "run one super learner."
        )
    return process_set


def _become_plain(wrapped: Any, parent: type[torch.optim.Optimizer]) -> None:
    """With one super learner: Horovod's class, for this instance alone, with what users expect of torch.

    The step hooks run once; a script may derive from the class. Horovod's Adasum steps by itself.
    """
    kind = type(wrapped)
    kind._parent, kind.close, kind._closed = parent, _plain_close, False
    kind.zero_grad, kind.load_state_dict = _plain_zero_grad, _plain_load_state_dict
    if not hasattr(wrapped, "_starting_models"):
        kind.step = _plain_step
    _repair(wrapped)


def _plain_close(self: Any) -> None:
    self._closed = True
    _unhook(self)


def _is_plain_in_use(world: weakref.ref[World], wrapped: Any) -> bool:
    """Whether it is not closed, and hvd.shutdown() was not called since it was wrapped."""
    return not wrapped._closed and worlds.is_initialized() and worlds.current() is world()


def _plain_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    _synchronize_for_step(self)
    return self._parent.step(self, closure)


def _plain_zero_grad(self: Any, set_to_none: bool = True) -> None:
    _require_no_handles(self)
    self._parent.zero_grad(self, set_to_none)


def _plain_load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    _drop_gradients(self)
    with keeping_held(self):
        self._parent.load_state_dict(self, state_dict)


def _repair(wrapped: Any) -> None:
    """Accept gradients that torch accepts and Horovod does not."""
    kind = type(wrapped)
    wrapped._compression = _Reducible(wrapped._compression)
    if hasattr(wrapped, "_starting_models"):  # Adasum reduces parameters
        return
    reduce, reduce_group = kind._allreduce_grad_async, kind._grouped_allreduce_grad_async

    def allreduce_grad_async(self: Any, parameter: torch.Tensor) -> Any:
        _lay_out_gradient(parameter)
        return reduce(self, parameter)

    def grouped_allreduce_grad_async(self: Any, parameters: tuple[torch.Tensor, ...]) -> Any:
        for parameter in parameters:
            _lay_out_gradient(parameter)
        return reduce_group(self, parameters)

    kind._allreduce_grad_async = allreduce_grad_async
    kind._grouped_allreduce_grad_async = grouped_allreduce_grad_async


def _record_parts(wrapped: Any, record: StepRecord) -> None:
    """With one super learner: the parts of Horovod's steps go into the timeline."""
    kind = type(wrapped)  # Horovod made this class for this instance
    horovods_synchronize, horovods_step = kind.synchronize, kind.step
    made = 0

    def synchronize(self: Any) -> None:
        with record.part("inner_allreduce", made):
            horovods_synchronize(self)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        nonlocal made
        adasum = hasattr(self, "_starting_models")  # its step reduces by itself
        if not adasum:
            _synchronize_for_step(self)
        with record.part("optimizer", made):
            loss = horovods_step(self, closure) if adasum else self._parent.step(self, closure)
        made += 1
        return loss

    step.hooked = getattr(horovods_step, "hooked", False)  # type: ignore[attr-defined]
    kind.synchronize, kind.step = synchronize, step


def _synchronize_for_step(self: Any) -> None:
    if self._should_synchronize:
        if self._synchronized:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize() averages the gradients again; put "
                "it in `with optimizer.skip_synchronize():`.",
                stacklevel=3,  # the line that calls step()
            )
        self.synchronize()
    self._synchronized = False


_said_nothing_to_average = False


def _say_nothing_to_average(world: World, strategy: Strategy) -> None:
    """Once, however many optimizers there are."""
    global _said_nothing_to_average
    if world.rank > 0 or _said_nothing_to_average:
        return
    if strategy.averages != "nothing":
        _said_nothing_to_average = True
        log.warning(
            "one super learner of %d learner%s: nothing to average between super learners, this is "
            "plain Horovod. HVD_ADPSGD_SUPER_LEARNER_SIZE=k cuts a host into super learners of k.",
            world.size,
            "" if world.size == 1 else "s",
        )


def _floating(buffers: torch.nn.Module | NamedTensors | None) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the buffers asked for that can be averaged."""
    if buffers is None:
        return []
    pairs = _listed(statistics(buffers) if isinstance(buffers, torch.nn.Module) else buffers)
    _require_named("buffers", pairs)
    return [(f"buffer.{name}", b) for name, b in pairs if b.is_floating_point()]


def _trained(
    names: dict[torch.Tensor, str], groups: Iterable[dict[str, Any]]
) -> list[tuple[str, torch.Tensor]]:
    return [(names[p], p) for group in groups for p in group["params"] if p.requires_grad]


# ---- the class made at run time ------------------------------------------------------------


def _become_averaging(wrapped: Any, parent: type[torch.optim.Optimizer]) -> None:
    """Give Horovod's instance a class with Horovod's methods, overridden by ours.

    Horovod's methods call super(self.__class__, self), so the class must derive from the user's
    directly: a subclass of Horovod's class would recurse without end. Ours call `_parent`, the user's
    class, so that a script may derive from the class made here, and call its methods on another object.
    """
    horovods = type(wrapped)
    namespace = {k: v for k, v in vars(horovods).items() if k not in ("__dict__", "__weakref__")}
    namespace.update(_METHODS)
    if hasattr(wrapped, "_starting_models"):
        namespace.update(_ADASUM_METHODS)
    namespace["_horovod"] = horovods
    namespace["_parent"] = parent
    wrapped.__class__ = type(parent.__name__, (parent,), namespace)
    wrapped._compression = _Reducible(wrapped._compression)
    wrapped._gradients = Gradients()
    _watch_computed(wrapped, wrapped._grad_accs)


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Average gradients in the super learner, step the optimizer, apply corrections, offer the model.

    With a closure, gradients are averaged after each of its evaluations. The user's step hooks run
    once, around the optimizer's own step.
    """
    averaging = self._averaging
    with averaging.stepping(self.param_groups):
        if closure is None:
            _average_for_step(self)
            if not averaging.before_optimizer():
                averaging.finish_step()
                return None
        with averaging.record.part("optimizer", averaging.step):
            loss = self._parent.step(self, _synchronized(self, closure))
        averaging.finish_step()
        return loss


def _synchronized(self: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
    if closure is None:
        return None

    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        _average_for_step(self)
        self._averaging.spec.strategy.refuse("step(closure)", UnsupportedOptimizerError)
        return loss

    return evaluate


# ---- when gradients are averaged -----------------------------------------------------------
#
# With the last gradient submitted, backward() waits for the averages at its end, as with DDP: what a script
# does to gradients before step() (clip, unscale, log, zero), it does to the same numbers on all learners.
# If a gradient is missing then (unused parameters, several backward passes), synchronize() or step() waits.


def _allreduce_grad_async(self: Any, parameter: torch.Tensor) -> Any:
    return _submit(self, (parameter,), lambda h: h._allreduce_grad_async(self, parameter))


def _grouped_allreduce_grad_async(self: Any, parameters: tuple[torch.Tensor, ...]) -> Any:
    return _submit(self, parameters, lambda h: h._grouped_allreduce_grad_async(self, parameters))


def _submit(self: Any, parameters: tuple[torch.Tensor, ...], submit: Callable[[Any], Any]) -> Any:
    """Pass gradients to Horovod; with the last one, backward() averages them at its end."""
    _before_gradient(self, parameters)
    for parameter in parameters:
        _lay_out_gradient(parameter)
    with inside_super_learner(self._averaging):
        handle = submit(self._horovod)
    is_last = self._gradients.submit(parameters, self._requires_update)
    in_backward = any(p.requires_grad for p in parameters)  # else it is one that synchronize() adds
    if is_last and in_backward and torch._C._current_graph_task_id() != -1:  # in backward()
        self._averaging.mates.submitted()
        # run by the thread of the last gradient: on a GPU that is not the caller's
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(_average_after_backward, self)
        )
    return handle


def _before_gradient(self: Any, parameters: tuple[torch.Tensor, ...]) -> None:
    """See Averaging.before_gradient. If it refuses the first gradient of a step, Horovod forgets the hook."""
    try:
        _require_no_accumulation(self, parameters)
        self._averaging.before_gradient(len(parameters), len(self._requires_update))
    except AdpsgdError:
        if not self._handles:  # else the all-reduces of other gradients are running
            for parameter in self._allreduce_delay:
                self._allreduce_delay[parameter] = self.backward_passes_per_step
            self._group_counts = dict.fromkeys(self._group_counts, 0)
        raise


def _watch_computed(self: Any, nodes: Iterable[Any]) -> None:
    """Note gradients that backward() has computed and Horovod does not have yet."""
    if hasattr(self, "_starting_models"):  # Adasum uses them inside backward()
        return
    for node in nodes:
        node.register_hook(functools.partial(_note_computed, weakref.ref(self), node.variable))


def _note_computed(optimizer: weakref.ref[Any], parameter: torch.Tensor, *_: Any) -> None:
    if (self := optimizer()) is not None:
        self._gradients.computed(parameter)


def _require_no_accumulation(self: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Raise GradientOrderError if new gradients were added to averaged ones."""
    added = self._gradients.accumulated(parameters)
    if added:
        raise GradientOrderError(
            f"step {self._averaging.step}: the gradient of {_named(self, added)} was computed more than "
            f"backward_passes_per_step={self.backward_passes_per_step} times before step(), and added to one "
            "that is averaged. Increase backward_passes_per_step to accumulate gradients, or call "
            "optimizer.zero_grad() before backward() if a step is skipped."
        )


def _named(self: Any, parameters: list[torch.Tensor]) -> str:
    """The first of them by name, for messages."""
    others = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
    return f"{self._parameter_names.get(parameters[0])!r}{others}"


def _average_after_backward(self: Any) -> None:
    """Average, unless another learner of the super learner lacks gradients and waits for this one."""
    if not self._handles:  # a hook has called step() or synchronize()
        return
    if self._averaging.all_submit(_are_averaged(self)):
        _average(self, by_backward=True)


def _are_averaged(self: Any) -> Callable[[], bool]:
    """Whether Horovod has finished with the gradients that are submitted now, also in failure."""
    handles = [h for handle, _ in self._handles.values() for h in _pollable(handle)]
    return lambda: all(map(horovod.poll, handles))


def _pollable(handle: Any) -> list[int]:
    """Horovod's handles; those of a sparse gradient are inside the function that Horovod gives for it."""
    if isinstance(handle, int):
        return [handle]
    assert handle is not None, "every gradient is submitted"
    held = inspect.getclosurevars(handle).nonlocals
    return [value for name, value in held.items() if name.endswith("_handle")]


def _synchronize(self: Any) -> None:
    """Wait until the gradients are averaged in the super learner; if backward() has not done it, do it."""
    gradients = self._gradients
    if gradients.averaged and gradients.by_backward and not self._handles:
        self._averaging.require_running()
        gradients.by_backward = False  # what comes now may be added to them, as in Horovod
        self._synchronized = True
        return
    _average(self)


def _average_for_step(self: Any) -> None:
    """Average what is not averaged yet, unless the script says that step() must not."""
    gradients, averaging = self._gradients, self._averaging
    if self._handles and not self._should_synchronize:
        raise GradientOrderError(
            f"step {averaging.step}: step() inside optimizer.skip_synchronize(), and gradients are not "
            "averaged: each learner would use its own. Call optimizer.synchronize() before it."
        )
    if self._should_synchronize and (self._handles or not gradients.averaged):
        _average(self, unscaled=bool(self._handles) and _is_called_by_scaler())
    if averaging.world.inner_size > 1:
        averaging.replacements.step(averaging.mates.sets, gradients.replaced(_reduced(self)))
    gradients.release()
    self._synchronized = False


def _is_called_by_scaler() -> bool:
    """Whether GradScaler calls step(): it has unscaled the gradients, which their version does not show."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == grad_scaler.__file__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


def _average(self: Any, by_backward: bool = False, unscaled: bool = False) -> None:
    """Submit missing gradients, and wait for all.

    Args:
        self: the optimizer.
        by_backward: backward() does it.
        unscaled: gradients were changed since they were submitted.

    Raises:
        GradientOrderError: if gradients were changed between backward() and now. Those that Horovod has are
            averaged first.
    """
    gradients, averaging = self._gradients, self._averaging
    _require_no_accumulation(self, self._handles)
    changed = gradients.changed()
    if unscaled:
        changed = gradients.submitted() + gradients.accumulating()
    if changed and not gradients.submitted():  # no all-reduce is running
        accumulated = gradients.accumulating()
        _drop_gradients(self)
        gradients.forget()
        _refuse_early(self, changed, accumulated)
    missing = gradients.missing(self._requires_update) if changed else []
    again = not self._handles and gradients.is_same(in_place=averaging.world.inner_size == 1)
    gradients.release()
    for parameter in changed:
        _lay_out_gradient(parameter)  # Horovod needs one to overwrite
    if changed:
        averaging.mates.refuses()
    _submit_missing(self)
    are_averaged = None if by_backward else _are_averaged(self)  # it has waited for the others
    with averaging.reducing(len(self._requires_update), again, are_averaged):
        self._horovod.synchronize(self)
    refusing = averaging.mates.refusing()
    differ = averaging.replacements.differ(averaging.mates.sets - 1)
    if refusing or differ:
        gradients.forget()
    if differ:
        _refuse_replaced(self)
    if changed:
        _refuse_changed(self, changed, missing, by_backward)
    if refusing:
        _refuse_with(self, refusing[0])
    gradients.average(_reduced(self), by_backward)


def _submit_missing(self: Any) -> None:
    """Pass Horovod the gradients that it lacks, as its synchronize() does before it waits."""
    sent: set[torch.Tensor] = set()
    for key, (handle, _) in self._handles.items():
        if handle is not None:
            sent.update(key if isinstance(key, tuple) else (key,))
    for parameter in self._requires_update - sent:
        self._handles[parameter] = self._allreduce_grad_async(parameter)


def _reduced(self: Any) -> Iterable[torch.Tensor]:
    """The parameters whose gradients are averaged; none where nobody asks whether they are the same."""
    if self._averaging.world.inner_size == 1 and self._averaging.plan.in_step is None:
        return ()
    return self._requires_update or self._allreduce_delay


def _refuse_changed(
    self: Any, changed: list[torch.Tensor], missing: list[torch.Tensor], by_backward: bool
) -> None:
    why = "another learner of the super learner was in another operation"
    if missing:
        count = f"{len(missing)} of {len(self._requires_update)} parameters"
        why = f"{count} got no gradient ({_named(self, missing)})"
    if by_backward:
        why = "a hook changed it inside backward()"
    raise GradientOrderError(
        f"step {self._averaging.step}: the gradient of {_named(self, changed)} was changed while the "
        f"super learner averaged it: backward() had not waited for the average, because {why}. Call "
        "optimizer.synchronize() after backward(), before gradients are changed; or freeze parameters that "
        "the loss does not use (requires_grad_(False))."
    )


def _refuse_early(self: Any, changed: list[torch.Tensor], accumulated: list[torch.Tensor]) -> None:
    raise GradientOrderError(
        f"step {self._averaging.step}: the gradient of {_named(self, changed)} was changed before the super "
        f"learner averaged it: {_named(self, accumulated)} waited for more backward passes "
        f"(backward_passes_per_step={self.backward_passes_per_step}), or for other gradients of its group. "
        "Call optimizer.synchronize() before gradients are clipped or unscaled, where an epoch may end with "
        "fewer passes. Nothing was applied."
    )


def _refuse_replaced(self: Any) -> None:
    raise GradientOrderError(
        f"step {self._averaging.step}: in the step before, gradients that were averaged had been replaced "
        "(p.grad = ...), and the learners of this super learner stepped with different ones: their models "
        "differ now. Change gradients in place, alike on all learners; or call optimizer.zero_grad() before "
        "you set them, and step() averages them. Load a checkpoint, or call hvd.broadcast_parameters."
    )


def _refuse_with(self: Any, mate: int) -> None:
    world = self._averaging.world
    raise GradientOrderError(
        f"step {self._averaging.step}: learner {world.groups[world.super_rank][mate]}, of the same super "
        "learner, changed gradients while they were averaged, so no learner of it steps with them. See the "
        "error of that learner."
    )


def _lay_out_gradient(parameter: torch.Tensor) -> None:
    """Make the gradient contiguous, as Horovod requires; torch gives it the parameter's strides."""
    grad = parameter.grad
    if grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif not grad.is_sparse and not grad.is_contiguous():
        parameter.grad = grad.contiguous()


class _Reducible:
    """The user's compression, then bfloat16, which Horovod cannot reduce, as float32."""

    def __init__(self, compression: Any):
        self._compression = compression

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        compressed, context = self._compression.compress(tensor)
        widened = compressed.dtype == torch.bfloat16
        return compressed.float() if widened else compressed, (widened, context)

    def decompress(self, tensor: torch.Tensor, context: tuple[bool, Any] | None) -> torch.Tensor:
        if context is None:  # a sparse gradient, which Horovod never compresses
            return tensor
        widened, inner = context
        narrow = tensor.to(torch.bfloat16) if widened else tensor
        return self._compression.decompress(narrow, inner)


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    _require_no_handles(self)
    self._gradients.release()
    self._parent.zero_grad(self, set_to_none)


def _require_no_handles(self: Any) -> None:
    if self._handles:
        raise GradientOrderError(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(), and the gradients are not averaged yet. Call optimizer.synchronize() "
            "before a step is skipped (GradScaler does for infinite gradients) and after an exception in "
            "backward(); or raise backward_passes_per_step, if more backward passes follow."
        )


def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    """Train and average one more group, from the next step on; on all learners, in one order."""
    self._averaging.require_running(also_before_joining=True)
    if self._averaging.plan.rule is not None:
        raise UnsupportedOptimizerError(
            f"add_param_group with averaging={self._averaging.spec.strategy.spec()}, which keeps tensors "
            "of its own for each parameter: wrap a new optimizer with all groups instead."
        )
    self._parent.add_param_group(self, param_group)
    group = self.param_groups[-1]
    names = {
        parameter: f"allreduce.added.{len(self.param_groups) - 1}.{j}"
        for j, parameter in enumerate(group["params"])
    }
    self._averaging.add(_trained(names, [group]))
    for parameter, name in names.items():
        self._parameter_names[parameter] = name
        self._allreduce_delay[parameter] = self.backward_passes_per_step
        if getattr(self, "_groups", None) is not None:  # Horovod's Adasum optimizer has none
            self._p_to_group[parameter] = (parameter,)
            self._group_counts[(parameter,)] = 0
    if self._averaging.world.inner_size > 1:
        _register_hooks(self, group["params"])


def _register_hooks(self: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Average these gradients in the super learner as soon as backward has computed them."""
    for parameter in parameters:
        if parameter.requires_grad:
            self._requires_update.add(parameter)
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            assert node is not None
            node.register_hook(self._make_hook(parameter))
            _watch_computed(self, [node])
            self._grad_accs.append(node)


def _state_dict(self: Any) -> dict[str, Any]:
    """The optimizer's own state, and under "averaging" the strategy's."""
    state: dict[str, Any] = self._parent.state_dict(self)
    mine = checkpoint.state(self._averaging)
    return {**state, "averaging": mine} if mine else state


def _load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    """Load as torch does. Gradients that backward() has left for a step are dropped, as in Horovod."""
    _drop_gradients(self)
    self._gradients.forget()
    own = {key: value for key, value in state_dict.items() if key != "averaging"}
    with keeping_held(self):
        self._parent.load_state_dict(self, own)
    checkpoint.load_state(self._averaging, state_dict.get("averaging"))


def _drop_gradients(self: Any) -> None:
    """Forget gradients that wait for a step, as Horovod does; all-reduces under way end first."""
    if hasattr(self, "_starting_models"):  # Adasum: the parameters hold differences until step()
        return
    running = {key: handle for key, (handle, _) in self._handles.items() if handle is not None}
    if running:
        sent = sum(len(key) if isinstance(key, tuple) else 1 for key in running)
        averaging = getattr(self, "_averaging", None)
        total = len(self._requires_update) if sent == len(self._requires_update) else 0
        with averaging.reducing(total) if averaging else contextlib.nullcontext():
            for handle in running.values():
                handle() if callable(handle) else horovod.synchronize(handle)
    self._handles.clear()
    self._synchronized, self._should_synchronize = False, True
    for parameter in self._allreduce_delay:
        self._allreduce_delay[parameter] = self.backward_passes_per_step
    self._group_counts = dict.fromkeys(self._group_counts, 0)


def _close(self: Any) -> None:
    """Free the engine, its thread and its memory now. step() raises afterwards; idempotent."""
    self._averaging.mates.closes()
    self._averaging.stop("optimizer.close() was called")


def _refuse_copy(self: Any, *args: Any) -> Any:
    raise CopyError(
        "a wrapped optimizer cannot be copied or pickled: it owns an averaging engine and gradient "
        "hooks. Save optimizer.state_dict() and load it into a newly wrapped optimizer."
    )


# torch adds no second call of the step hooks
_step.hooked = _plain_step.hooked = True  # type: ignore[attr-defined]

_METHODS = {
    "step": _step,
    "synchronize": _synchronize,
    "zero_grad": _zero_grad,
    "add_param_group": _add_param_group,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "close": _close,
    "_allreduce_grad_async": _allreduce_grad_async,
    "_grouped_allreduce_grad_async": _grouped_allreduce_grad_async,
    "__deepcopy__": _refuse_copy,
    "__copy__": _refuse_copy,
    "__reduce_ex__": _refuse_copy,
    "__getstate__": _refuse_copy,
}


# ---- Adasum ----------------------------------------------------------------------------------


def _adasum_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """As `_step`; Horovod's Adasum optimizer steps parameter by parameter during backward."""
    averaging = self._averaging
    with averaging.stepping(self.param_groups):
        changed = [] if closure else self._gradients.changed()
        self._gradients.forget()
        if changed:
            raise GradientOrderError(
                f"step {averaging.step}: the gradient of {_named(self, changed)} was changed after "
                "backward(), without effect: op=Adasum uses gradients inside backward(). Change them in "
                "Parameter.register_post_accumulate_grad_hook, or use op=Average."
            )
        if closure is None:
            _submit_missing(self)
        are_averaged = None if closure else _are_averaged(self)
        with averaging.reducing(len(self._requires_update), are_averaged=are_averaged):
            loss = self._horovod.step(self, closure)
        self._gradients.forget()
        averaging.finish_step()
        return loss


def _adasum_allreduce(self: Any, parameter: torch.Tensor) -> Any:
    self._averaging.before_gradient(1, len(self._requires_update))
    self._averaging.before_update()
    with inside_super_learner(self._averaging):
        handle = self._horovod._allreduce_grad_async(self, parameter)
    self._gradients.submit((parameter,), self._requires_update)
    return handle


def _adasum_add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    _add_param_group(self, param_group)
    for parameter in self.param_groups[-1]["params"]:
        self._starting_models[parameter] = torch.zeros_like(parameter, requires_grad=False)


_ADASUM_METHODS = {
    "step": _adasum_step,
    "synchronize": lambda self: None,
    "add_param_group": _adasum_add_param_group,
    "_allreduce_grad_async": _adasum_allreduce,
}
