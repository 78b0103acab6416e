"""`DistributedOptimizer`: gradients are averaged in a super learner, models between super learners.

The wrapped object gets a class made at run time: its base is the user's class, with the methods of `_METHODS`
below. One step is

    gradient all-reduce in the super learner (training.reducer), the user's optimizer, and with several
    super learners Averaging.finish_step: apply the corrections of the last exchanges, offer the model.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvd_adpsgd.collectives.usage import counted
from hvd_adpsgd.errors import CopyError, UnsupportedOptimizerError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch import bootstrap
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.torch.adasum import ADASUM_METHODS, AdasumReducer
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
    Alone,
    PlainReducer,
    local_peers,
    say_nothing_to_average,
)
from hvd_adpsgd.training import checkpoint
from hvd_adpsgd.training.async_mean import serve_means
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.consistency import agree, require_same_sets
from hvd_adpsgd.training.inner_averaging import AveragingReducer
from hvd_adpsgd.training.optimizer_state import bind, keeping_held, made_of, reunite
from hvd_adpsgd.training.peer_watch import watch_peers
from hvd_adpsgd.training.presence import (
    drop,
    live,
    new_number,
    register,
    stop_dropped,
    stop_unreferenced,
)
from hvd_adpsgd.training.reducer import remove

log = logging.getLogger("hvd_adpsgd")


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
        wire_dtype: format in which models travel, as HVD_ADPSGD_WIRE_DTYPE; the mean is kept exactly.
            Default, and "float32": as the model is stored.
        moments: "shared": Adam, AdamW, NAdam, RAdam and RMSprop step with moments of all super learners, as
            in synchronous training, Muon with averaged momentum, and other classes with what their method
            momentum_keys(group) names of a parameter's state, and second_moment_key(group) if that group is
            updated by Adam's law; messages are longer by a quarter. "own": each has its own. Default:
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
    wanted = optimizer, averaging, given, inner, process_set, named, buffers, average_gradients
    spec = agree(world, lambda: make_spec(world, *wanted))
    world = _join_if_synchronous(world, spec.strategy)
    if world.is_plain:
        its = inner_process_set(process_set, world).ranks or ()
        require_same_sets(world, "hvd.DistributedOptimizer", its)
    _retire_owners(tensor for _, tensor in spec.named if tensor.requires_grad)
    ranks = inner_process_set(process_set, world)
    combines_steps = op == horovod.Adasum and world.inner_size > 1
    kind: Any = PlainReducer if world.is_plain else AveragingReducer
    kind = AdasumReducer if combines_steps else kind
    reducer = kind(optimizer.param_groups, named, **inner, process_set=ranks)
    wrapped = made_of(optimizer, _METHODS | (ADASUM_METHODS if combines_steps else {}))
    wrapped._reducer, wrapped._averaging, wrapped._alone = reducer, None, None
    wrapped.op, wrapped.process_set, wrapped.sparse_as_dense = op, ranks, sparse_as_dense
    wrapped.backward_passes_per_step = backward_passes_per_step
    wrapped.gradient_predivide_factor = gradient_predivide_factor
    if combines_steps:
        reducer.step_alone = functools.partial(_step_alone, weakref.ref(wrapped))
    if world.is_plain:
        say_nothing_to_average(world, spec.strategy)
        wrapped._alone = Alone(world, spec)
        if ranks is horovod.global_process_set and not combines_steps:
            reducer.inner = local_peers(world)
        if not (spec.averages_gradients or spec.is_sharded):
            wrapped.register_step_pre_hook(wrapped._alone.compare)
        bind(optimizer, wrapped, lambda its: its._alone.is_in_use)
    else:
        mine = wrapped._averaging = reducer.averaging = Averaging(world, spec, new_number(world))
        register(mine)
        serve_means(mine)
        mine.optimizer = weakref.ref(wrapped)
        if combines_steps:  # parameters hold differences until step()
            mine.first_models.skip()
        if world.inner_size > 1:
            watch_peers(mine.super_learner)
        if mine.rule.in_update:
            _hook_first(wrapped, mine)
        mine.at_stop.append(functools.partial(remove, reducer.hooks))
        weakref.finalize(wrapped, drop, mine).atexit = False  # shutdown() stops averaging at exit
        bind(optimizer, wrapped, lambda its: not its._averaging.stopped)
    reducer.start(spec.averages_gradients)
    return wrapped


def _hook_first(wrapped: Any, averaging: Averaging) -> None:
    """Let `after_update` run before the script's step hooks, which may read the optimizer's state."""
    hook = wrapped.register_step_post_hook(functools.partial(_end_update, weakref.ref(averaging)))
    wrapped._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
    averaging.at_stop.append(hook.remove)


def _end_update(averaging: weakref.ref[Averaging], *_: Any) -> None:
    if (found := averaging()) is not None:
        found.rule.after_update()


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


def _step_alone(optimizer: Callable[[], Any]) -> None:
    wrapped = optimizer()
    wrapped._parent.step(wrapped)


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Average gradients in the super learner, step; add corrections from exchanges, offer the model to peers.

    With a closure, gradients are averaged after each of its evaluations. The user's step hooks run
    once, around the optimizer's own step.
    """
    stop_dropped()
    averaging = self._averaging
    reunite(self)
    if averaging is None:
        return self._alone.step(self, closure)
    with averaging.stepping(self.param_groups):
        if closure is None:
            self._reducer.before_step()
            if not averaging.before_optimizer():
                averaging.finish_step()
                return None
        with averaging.record.part("optimizer", averaging.step):
            try:
                loss = self._parent.step(self, _synchronized(self, closure))
            finally:
                averaging.rule.after_update()
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
            self._reducer.before_step()
            averaging.spec.strategy.refuse("step(closure)", UnsupportedOptimizerError)
        with torch.no_grad():
            averaging.rule.before_update()
        return loss

    return evaluate


def _synchronize(self: Any) -> None:
    """Average gradients now, before they are clipped, for instance."""
    with contextlib.nullcontext() if self._alone is None else self._alone.part("inner_allreduce"):
        self._reducer.synchronize()


def _skip_synchronize(self: Any) -> AbstractContextManager[None]:
    """Return a context manager in which step() averages no gradients, after synchronize()."""
    return self._reducer.skip_synchronize()


def _set_backward_passes_per_step(self: Any, passes: int) -> None:
    """Add up the gradients of this number of backward passes from now on."""
    self.backward_passes_per_step = passes
    self._reducer.set_passes(passes)


def _zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    self._reducer.before_zero_grad()
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
    if self._averaging is None:
        self._parent.add_param_group(self, param_group)
        _average_replaced(self)
        return
    _require_extensible(self)
    require_same_kind(self._averaging.world, self._averaging.spec, param_group)
    require_shareable_moments(self._averaging.spec, self, [param_group], "add_param_group")
    self._parent.add_param_group(self, param_group)
    prefix = f"allreduce.added.{len(self.param_groups) - 1}"
    _average_added(self, prefix, self.param_groups[-1]["params"])


def _average_added(self: Any, prefix: str, parameters: list[torch.Tensor]) -> None:
    """Train and average further parameters, which the optimizer has now; their names begin with `prefix`."""
    names = {p: f"{prefix}.{j}" for j, p in enumerate(parameters)}
    if self._averaging is not None:
        added = self._averaging.rule.extend(trained_tensors(names, [{"params": parameters}]))
        self._averaging.tensors.add(added)
    self._reducer.extend(names)


def _average_replaced(self: Any) -> None:
    """Average the parameters in param_groups that a script has set in place of the optimizer's, or added."""
    averaging = self._averaging
    known = set(map(id, self._reducer.trained)) if averaging is None else averaging.tensors.trained
    for group in self.param_groups:
        parameters = [p for p in group["params"] if p.requires_grad and id(p) not in known]
        if parameters and averaging is not None:
            _require_extensible(self)
            new = {**group, "params": parameters}
            require_same_kind(averaging.world, averaging.spec, new)
            require_shareable_moments(averaging.spec, self, [new], "param_groups")
        if parameters:
            # a group of this number may have been added before
            _average_added(self, f"allreduce.replaced.{len(self._reducer.names)}", parameters)


def _state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the optimizer's own state and, under "averaging", the state of the strategy."""
    state: dict[str, Any] = self._parent.state_dict(self, *args, **kwargs)
    mine = self._averaging and checkpoint.state(self._averaging)
    return {**state, "averaging": mine} if mine else state


def _load_state_dict(self: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Load a state as torch does; drop gradients that backward() has left for a step, as Horovod does.

    Frameworks that fine-tune replace `param_groups` before they load: parameters that are new are averaged.
    """
    averaging = self._averaging
    if averaging is not None:
        groups = state_dict.get("param_groups", [])
        require_shareable_moments(averaging.spec, self, groups, "load_state_dict")
    self._reducer.drop()
    reunite(self)
    _average_replaced(self)
    own = {key: value for key, value in state_dict.items() if key != "averaging"}
    with keeping_held(self):
        self._parent.load_state_dict(self, own, *args, **kwargs)
    if averaging is not None:
        checkpoint.load_state(averaging, state_dict.get("averaging"))


def _close(self: Any) -> None:
    """Free the engine, its thread and its memory now; later calls of step() raise. Idempotent.

    In a job of one super learner, only stop averaging gradients. An exchange that runs at that moment may
    count on one side only: the mean of all models stays exact if all learners call this inside
    `with hvd.averaging_paused():`.
    """
    if self._averaging is None:
        self._alone.is_closed = True
        self._reducer.close()
        return
    self._averaging.super_learner.mates.closes()
    self._averaging.stop("optimizer.close() was called")


def _refuse_copy(self: Any, *args: Any) -> Any:
    raise CopyError(
        "a wrapped optimizer cannot be copied or pickled: it owns an averaging engine and gradient "
        "hooks. Save optimizer.state_dict() and load it into a newly wrapped optimizer."
    )


# marks step() as wrapped, so that torch does not wrap it again, which would run the step hooks twice
_step.hooked = True  # type: ignore[attr-defined]

_METHODS = {
    "__module__": "horovod.torch.optimizer",  # Horovod's broadcast_optimizer_state() steps others
    "step": _step,
    "synchronize": _synchronize,
    "skip_synchronize": _skip_synchronize,
    "set_backward_passes_per_step": _set_backward_passes_per_step,
    "zero_grad": _zero_grad,
    "add_param_group": _add_param_group,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "close": _close,
    "__deepcopy__": _refuse_copy,
    "__copy__": _refuse_copy,
    "__reduce_ex__": _refuse_copy,
    "__getstate__": _refuse_copy,
}
