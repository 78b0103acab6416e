"""`DistributedOptimizer`: Horovod averages gradients in a super learner, the engine models between them.

As in Horovod, the wrapped object gets a class made at run time: its base is the user's class, its
methods are Horovod's, overridden by those of `_METHODS` below. One step is

    gradient all-reduce in the super learner, the user's optimizer, then Averaging.finish_step:
    apply the corrections of the last exchanges, offer the model to the engine.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from hvd_adpsgd.collectives.usage import counted
from hvd_adpsgd.errors import (
    CopyError,
    UnsupportedOptimizerError,
)
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch import bootstrap
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.torch.adasum import ADASUM_METHODS
from hvd_adpsgd.torch.collectives import global_process_set
from hvd_adpsgd.torch.optimizer_arguments import (
    NamedTensors,
    inner_process_set,
    listed,
    make_spec,
    require_same_kind,
    require_shareable_moments,
    trained_tensors,
)
from hvd_adpsgd.torch.plain_optimizer import (
    become_plain,
    is_plain_in_use,
    pass_on,
    plain_step,
    record_parts,
    say_nothing_to_average,
)
from hvd_adpsgd.training import checkpoint
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.consistency import agree, require_same_sets
from hvd_adpsgd.training.gradients import Gradients
from hvd_adpsgd.training.inner_averaging import (
    Reducible,
    allreduce_grad_async,
    average_for_step,
    drop_gradients,
    drop_hooks,
    grouped_allreduce_grad_async,
    introduce,
    refuse_graphs,
    require_no_handles,
    synchronize,
    watch_computed,
)
from hvd_adpsgd.training.optimizer_state import bind, keeping_held, reunite, stand_in
from hvd_adpsgd.training.peer_watch import watch_peers
from hvd_adpsgd.training.presence import (
    drop,
    live,
    new_number,
    register,
    stop_dropped,
    stop_unreferenced,
)
from hvd_adpsgd.training.timeline import StepRecord

__all__ = ["DistributedOptimizer"]

log = logging.getLogger("hvd_adpsgd")


# A process set without this learner: Horovod registers no gradient hooks for it. Hooks could not be dropped:
# DistributedDataParallel holds their autograd nodes.
_NOBODY: Any = SimpleNamespace(included=lambda: False)


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
    exchange_share: float | str | None = None,
    max_staleness: int | None = None,
    wire_dtype: str | None = None,
    moments: str | None = None,
    buffers: torch.nn.Module | NamedTensors | None = None,
    average_gradients: bool | None = None,
) -> torch.optim.Optimizer:
    """Wrap `optimizer`: gradients are averaged in the super learner, models between super learners.

    Inside the super learner every argument up to `process_set` means what it means in Horovod. All
    learners of the job must call this together, with the same arguments. With several super learners,
    backward() returns when the gradients are averaged, so they may be clipped before step().

    Args:
        optimizer: any torch optimizer but LBFGS.
        named_parameters: names for messages and for Horovod; the same on all learners.
        compression: compression of gradients for the all-reduce inside the super learner.
        backward_passes_per_step: backward passes whose gradients one step adds up.
        op: reduction of gradients inside the super learner.
        gradient_predivide_factor: with op=Average, gradients are divided by it before their sum, and the sum
            is multiplied by it / inner size.
        num_groups: older form of `groups`.
        groups: groups of parameters whose gradients Horovod reduces together.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: all learners (default) or `hvd.super_learner`; others only with one super
            learner.
        averaging: a strategy or its name; default HVD_ADPSGD_AVERAGING, else RandomPairs().
        exchanges_per_step: average number of exchanges per step in which a super learner takes part,
            active and passive together; default 1.
        exchange_share: in (0, 1]: fraction of the model's chunks per exchange; successive exchanges
            cycle through the model. The mean stays exact. "auto": each super learner chooses the fraction
            so that averaging costs at most HVD_ADPSGD_MAX_OVERHEAD of its steps. Default 1.
        max_staleness: steps; step() waits (at most deadline_s) rather than apply a correction from
            an older snapshot. Default: never waits.
        wire_dtype: "float16" or "bfloat16": models travel in 16 bits. "int8" or "int4": between hosts, their
            differences in 8 or 4 bits. "auto", with exchange_share="auto": in as few as the link
            demands. The mean is kept exactly. Default, and "float32": as the model is stored.
        moments: "shared": Adam, AdamW, NAdam, RAdam and RMSprop step with moments of all super learners, as
            in synchronous training; messages are longer by a quarter. "own": each has its own. Default:
            shared where that is possible.
        average_gradients: False: the script averages gradients in the super learner before step(), by
            DistributedDataParallel or fully_shard in hvd.super_learner_group(), or by itself. Default: found.
        buffers: also average the floating-point buffers of this module (BatchNorm statistics), or
            these (name, tensor) pairs.

    Returns:
        An instance of the optimizer's own class: LR schedulers and GradScaler accept it, and
        state_dict() is the optimizer's own. It shares param_groups, state, hooks and attributes with
        `optimizer`, so that a scheduler made of `optimizer` acts on the returned one, too.

    Raises:
        NotInitializedError: before hvd.init().
        UnsupportedOptimizerError: for LBFGS, an optimizer that is wrapped already, or an object with
            attributes that wrapping would lose.
        ModelMismatchError, StrategyMismatchError: on every learner, if tensors or arguments differ, or for a
            DistributedDataParallel or fully_shard model over other learners than those of the super learner.
        ConfigError: for a value out of its range.

    Source: Zhang et al., H-ADPSGD, arXiv:1907.05701; Lian et al., AD-PSGD, arXiv:1710.06952.
    """
    world = worlds.current()
    # frees the memory of dropped optimizers before the new engine allocates its own, and removes their hooks:
    # with one super learner these would submit gradients beside those of the new optimizer
    stop_unreferenced()
    named = listed(named_parameters)
    given = {
        "exchanges_per_step": exchanges_per_step,
        "exchange_share": exchange_share,
        "max_staleness": max_staleness,
        "wire_dtype": wire_dtype,
        "moments": moments,
    }
    inner = {  # arguments that are passed to Horovod
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
    }
    spec = agree(
        world,
        lambda: make_spec(
            world,
            optimizer,
            averaging,
            given,
            inner,
            process_set,
            named,
            buffers,
            average_gradients,
        ),
    )
    world = _join_if_synchronous(world, spec.strategy)
    if world.is_plain:
        its = inner_process_set(process_set, world).ranks or ()
        require_same_sets(world, "hvd.DistributedOptimizer", its)
    _retire_owners(tensor for _, tensor in spec.named if tensor.requires_grad)
    ranks = inner_process_set(process_set, world)
    wrapped = horovod.DistributedOptimizer(
        stand_in(optimizer),
        named_parameters=named,
        **inner,
        process_set=ranks if spec.averages_gradients else _NOBODY,
    )
    wrapped.process_set = ranks
    refuse_graphs(wrapped._grad_accs)
    combines_steps = op == horovod.Adasum and world.inner_size > 1
    if world.is_plain:
        say_nothing_to_average(world, spec.strategy)
        compares = not (spec.averages_gradients or spec.is_sharded)
        if combines_steps:
            pass_on(wrapped)
        else:
            become_plain(wrapped, type(optimizer), spec.trained, compares)
            if world.config.timeline is not None:
                record_parts(wrapped, StepRecord(world))
        bind(optimizer, wrapped, functools.partial(is_plain_in_use, weakref.ref(world)))
        return wrapped
    _become_averaging(wrapped, type(optimizer), ADASUM_METHODS if combines_steps else {})
    mine = wrapped._averaging = Averaging(world, spec, new_number(world))
    register(mine)
    mine.optimizer = weakref.ref(wrapped)
    if combines_steps:  # parameters hold differences until step()
        mine.first_models.skip()
    else:
        watch_computed(wrapped, wrapped._grad_accs)
    if world.inner_size > 1:
        watch_peers(mine.super_learner)
    if mine.rule.in_update:
        _hook_first(wrapped, mine)
    mine.at_stop.append(functools.partial(drop_hooks, weakref.proxy(wrapped)))
    weakref.finalize(wrapped, drop, mine).atexit = False  # shutdown() stops averaging at exit
    bind(optimizer, wrapped, lambda its: not its._averaging.stopped)
    return wrapped


def _hook_first(wrapped: Any, averaging: Averaging) -> None:
    """Let `after_update` run before the script's step hooks, which may read the optimizer's state."""
    plain = weakref.ref(averaging)

    def end(*_: Any) -> None:
        if (its := plain()) is not None:
            its.after_update()

    hook = wrapped.register_step_post_hook(end)
    wrapped._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
    averaging.at_stop.append(hook.remove)


def _join_if_synchronous(world: World, strategy: Strategy) -> World:
    """Merge all learners into one super learner if the strategy is `synchronous`; return the World."""
    if strategy.averages != "nothing" or world.super_size == 1:
        return world
    return bootstrap.merge_super_learners(world)


def _retire_owners(tensors: Iterable[torch.Tensor]) -> None:
    """Stop the averaging of each earlier optimizer that has one of `tensors`: a tensor has one optimizer."""
    tensors = list(tensors)
    for averaging in list(live()):
        if any(id(tensor) in averaging.tensors.trained for tensor in tensors):
            _say_retired(averaging, {id(tensor) for tensor in tensors})
            averaging.stop("another optimizer was wrapped around its parameters")


def _say_retired(averaging: Averaging, ids: set[int]) -> None:
    """Log that one optimizer stops averaging; warn if the new optimizer lacks some parameters of that one."""
    trained = averaging.spec.trained
    left = [name for name, p in trained if p.requires_grad and id(p) not in ids]
    if not left:
        log.info("an earlier optimizer of the same parameters has stopped averaging")
        return
    log.warning(
        "an earlier optimizer has stopped averaging %s, as another one was wrapped around %d of its %d "
        "parameters: the next step() of the earlier one raises. Wrap one optimizer with all parameter "
        "groups, or several with parameters of their own.",
        left[0],
        len(trained) - len(left),
        len(trained),
    )


# ---- the class made at run time ------------------------------------------------------------


def _become_averaging(
    wrapped: Any, parent: type[torch.optim.Optimizer], more: dict[str, Any]
) -> None:
    """Give the instance that Horovod made a class with Horovod's methods, overridden by _METHODS and `more`.

    Horovod's methods call super(self.__class__, self), so the class must derive from the user's class
    directly: a subclass of Horovod's class would recurse without end. The methods of `_METHODS` call
    `_parent`, the user's class, so that a script may derive from the class made here, and call its methods on
    another object.
    """
    horovods = type(wrapped)
    namespace = {k: v for k, v in vars(horovods).items() if k not in ("__dict__", "__weakref__")}
    namespace.update(_METHODS | more)
    namespace["_horovod"] = horovods
    namespace["_parent"] = parent
    wrapped.__class__ = type(parent.__name__, (parent,), namespace)
    wrapped._compression = Reducible(wrapped._compression)
    wrapped._gradients = Gradients()


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Average gradients in the super learner, step, add corrections from exchanges, offer the model to peers.

    With a closure, gradients are averaged after each of its evaluations. The user's step hooks run
    once, around the optimizer's own step.
    """
    stop_dropped()
    averaging = self._averaging
    reunite(self)
    with averaging.stepping(self.param_groups):
        if closure is None:
            average_for_step(self)
            if not averaging.before_optimizer():
                averaging.finish_step()
                return None
        with averaging.record.part("optimizer", averaging.step):
            try:
                loss = self._parent.step(self, _synchronized(self, closure))
            finally:
                averaging.after_update()
        averaging.finish_step()
        return loss


def _synchronized(self: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """Return the closure of the optimizer's step; it runs after the script's step hooks."""
    averaging = self._averaging
    if closure is None and not averaging.rule.in_update:
        return None

    def evaluate() -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            average_for_step(self)
            averaging.spec.strategy.refuse("step(closure)", UnsupportedOptimizerError)
        averaging.before_update()
        return loss

    return evaluate


def _zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    if self._handles:
        self._averaging.super_learner.require_whole()
    require_no_handles(self)
    self._gradients.release()
    self._parent.zero_grad(self, *args, **kwargs)


def _require_extensible(self: Any) -> None:
    """Raise a typed error unless parameters can be added to the optimizer."""
    self._averaging.require_running(also_before_joining=True)
    if self._averaging.plan.rule is not None:
        raise UnsupportedOptimizerError(
            f"add_param_group with averaging={self._averaging.spec.strategy.spec()}, which keeps tensors "
            "of its own for each parameter: wrap a new optimizer with all groups instead."
        )


def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    """Train and average one more param_group from the next step on; all learners add groups in one order."""
    self._require_extensible()
    require_same_kind(self._averaging.world, self._averaging.spec, param_group)
    require_shareable_moments(self._averaging.spec, self, [param_group], "add_param_group")
    self._parent.add_param_group(self, param_group)
    prefix = f"allreduce.added.{len(self.param_groups) - 1}"
    _average_added(self, prefix, self.param_groups[-1]["params"])


def _average_added(self: Any, prefix: str, parameters: list[torch.Tensor]) -> None:
    """Train and average further parameters, which the optimizer has now; their names begin with `prefix`."""
    names = {p: f"{prefix}.{j}" for j, p in enumerate(parameters)}
    added = self._averaging.rule.extend(trained_tensors(names, [{"params": parameters}]))
    self._averaging.tensors.add(added)
    is_averaged = self._averaging.world.inner_size > 1 and self._averaging.spec.averages_gradients
    introduce(self, names, is_averaged)


def _average_replaced(self: Any) -> None:
    """Average the parameters in param_groups that a script has set in place of the optimizer's."""
    known = self._averaging.tensors.trained
    for group in self.param_groups:
        parameters = [p for p in group["params"] if p.requires_grad and id(p) not in known]
        if parameters:
            self._require_extensible()
            new = {**group, "params": parameters}
            require_same_kind(self._averaging.world, self._averaging.spec, new)
            require_shareable_moments(self._averaging.spec, self, [new], "param_groups")
            # a group of this number may have been added before
            _average_added(self, f"allreduce.replaced.{len(known)}", parameters)


def _state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the optimizer's own state and, under "averaging", the state of the strategy."""
    state: dict[str, Any] = self._parent.state_dict(self, *args, **kwargs)
    mine = checkpoint.state(self._averaging)
    return {**state, "averaging": mine} if mine else state


def _load_state_dict(self: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Load a state as torch does; drop gradients that backward() has left for a step, as Horovod does.

    Frameworks that fine-tune replace `param_groups` before they load: parameters that are new are averaged.
    """
    groups = state_dict.get("param_groups", [])
    require_shareable_moments(self._averaging.spec, self, groups, "load_state_dict")
    self._drop_gradients()
    self._gradients.forget()
    reunite(self)
    _average_replaced(self)
    own = {key: value for key, value in state_dict.items() if key != "averaging"}
    with keeping_held(self):
        self._parent.load_state_dict(self, own, *args, **kwargs)
    checkpoint.load_state(self._averaging, state_dict.get("averaging"))


def _close(self: Any) -> None:
    """Free the engine, its thread and its memory now; later calls of step() raise. Idempotent.

    An exchange that runs at that moment may count on one side only: the mean of all models stays exact if all
    learners call this inside `with hvd.averaging_paused():`.
    """
    self._averaging.super_learner.mates.closes()
    self._averaging.stop("optimizer.close() was called")


def _refuse_copy(self: Any, *args: Any) -> Any:
    raise CopyError(
        "a wrapped optimizer cannot be copied or pickled: it owns an averaging engine and gradient "
        "hooks. Save optimizer.state_dict() and load it into a newly wrapped optimizer."
    )


# marks step() as wrapped, so that torch does not wrap it again, which would run the step hooks twice
_step.hooked = plain_step.hooked = True  # type: ignore[attr-defined]

_METHODS = {
    "step": _step,
    "synchronize": synchronize,
    "zero_grad": _zero_grad,
    "add_param_group": _add_param_group,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "close": _close,
    "_allreduce_grad_async": allreduce_grad_async,
    "_grouped_allreduce_grad_async": grouped_allreduce_grad_async,
    "_require_extensible": _require_extensible,
    "_drop_gradients": drop_gradients,
    "__deepcopy__": _refuse_copy,
    "__copy__": _refuse_copy,
    "__reduce_ex__": _refuse_copy,
    "__getstate__": _refuse_copy,
}
