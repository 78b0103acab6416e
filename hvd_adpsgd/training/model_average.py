"""The exact mean of the super learners' models, for evaluation and for the final checkpoint."""

import contextlib
import gc
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from hvd_adpsgd.collectives.usage import Caller, calls, counted
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.consistency import common, described, require_same
from hvd_adpsgd.training.means import Entry, finite_means, means_of_models, tell_finished
from hvd_adpsgd.training.parameters import shares_elements, statistics
from hvd_adpsgd.training.pause import paused
from hvd_adpsgd.training.presence import held, live
from hvd_adpsgd.training.sharded import is_sharded, local, reshard

log = logging.getLogger("hvd_adpsgd")


@torch.no_grad()
def average_model(model: torch.nn.Module, weight: float = 1.0, *, buffers: bool = True) -> None:
    """Set the model to the exact mean over super learners, in place; all learners call it together.

    Parameters and buffers become the mean of the leaders' values; with weights, sum of weight_i w_i / sum of
    weight_i. If an optimizer averages the model, its running exchanges finish and pending corrections are
    applied first. With a2cid2, the middle of its two models is averaged. Waits for the slowest super learner:
    use it for evaluation and for the final checkpoint.

    Of the buffers, those are averaged that are floating-point and persistent (in the state dict), but the
    vectors of spectral_norm. A buffer, or a parameter that is not trained, may hold NaN or Inf: its mean is
    that of the models in which it is finite. In all models, as a mask of infinities, it keeps its values. So
    does a buffer whose shape or dtype differs between learners, which the log names.

    Args:
        model: the same module on every learner.
        weight: weight of this super learner's model in the mean, >= 0, the same on all its learners; for
            instance 1 / its held-out loss. The weights must not all be 0.
        buffers: False: all buffers keep their own values.

    Raises:
        ConfigError: on every learner, if a weight is not a number >= 0, or all are 0.
        ModelMismatchError: on every learner, if their parameters differ in names, shapes or dtypes.
        NonFiniteModelError: on every learner, if a trained parameter holds NaN or Inf on a leader; no mean is
            taken. With HVD_ADPSGD_NONFINITE=skip all receive the mean of the finite models instead, unless
            their weights are all 0.
    """
    world = worlds.current()
    _require_weights(world, weight)
    if world.super_size == 1:
        return
    doing = "average_model"
    entries = _entries(world, doing, [model], buffers)
    tensors = [entry.tensor for entry in entries]
    with contextlib.ExitStack() as stack:
        averagings = stack.enter_context(held(world, doing))
        concerned = [a for a in averagings if any(t in a.tensors.parameters for t in tensors)]
        stack.enter_context(paused(world, doing, concerned))
        means = finite_means(world, doing, entries, float(weight))
        for averaging in concerned:
            averaging.rule.before_mean()
        _write(entries, means)
        for averaging in concerned:
            averaging.rule.after_mean()
            averaging.tensors.forget(tensors)


def _require_weights(world: World, weight: Any) -> None:
    """Raise ConfigError on every learner unless all weights are finite, >= 0, and not all leaders' are 0."""
    try:
        value = float(weight)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # the last of a tensor of several elements
        value = math.nan
    mine = (world.is_leader, value if 0 <= value < math.inf else None, repr(weight))
    told = world.collectives.gather("average_model", mine)
    bad = [text for _, value, text in told if value is None]
    weights = [value for leads, value, _ in told if leads]
    if bad or (weights and not any(weights)):  # without a leader there is no model to average
        raise ConfigError(
            f"average_model: weight={bad[0] if bad else 0} on {'a learner' if bad else 'all leaders'}, "
            "allowed are finite numbers >= 0, not all 0. Give each super learner's own weight, or none."
        )


@counted("consensus_distance")
@torch.no_grad()
def consensus_distance(model: torch.nn.Module) -> float:
    """Return the exact root mean square distance of the super learners' models from their mean.

    sqrt((1/n) sum over super learners of |w_l - mean|^2), over the parameters and buffers of average_model
    with their current values; pending corrections are not applied. All learners call it together; it
    waits for the slowest learner. Inside `averaged` all models are the mean, so the result is 0. It is not
    finite if a parameter is not, or a buffer in a part of the models. `metrics()` has an estimate without
    communication.

    Args:
        model: the same module on every learner.

    Raises:
        ModelMismatchError: on every learner, if their models differ in names, shapes or dtypes.
    """
    world, doing = worlds.current(), "consensus_distance"
    if world.super_size == 1:
        return 0.0
    entries = _entries(world, doing, [model])
    square = sum(
        float((local(t).detach().cpu().double() - mean.double()).square().sum())
        for (_, t, *_), mean in zip(entries, means_of_models(world, doing, entries)[0], strict=True)
        if mean is not None and (world.is_leader or is_sharded(t))
    )
    told = world.collectives.gather(doing, (world.is_leader, square))
    tell_finished(world, doing)
    return math.sqrt(sum(square for _, square in told) / sum(leads for leads, _ in told))


@contextlib.contextmanager
def averaged(
    model: torch.nn.Module, *more: torch.nn.Module, buffers: bool = False
) -> Iterator[None]:
    """Inside the `with` block, modules hold the exact mean over super learners; then their own values again.

    For evaluation and for checkpoints of the mean. All learners enter the block together and wait for the
    slowest super learner; each leaves it without waiting, also by an exception. The mean is that of
    parameters plus pending corrections: so a change that an exchange has made on one super learner, and not
    yet on its peer, counts on both. Exchanges pause while the mean is taken. They continue inside the block,
    and corrections are applied after it. Inside the block, backward(), step(), average_model and
    averaging_paused are not allowed. Blocks may be nested.

    Memory: a copy of the parameters and buffers on their device; while the block is entered, the mean in host
    memory, and on leaders a copy of the averaged tensors.

    Args:
        model: the same module on every learner.
        *more: further modules, such as a moving average of the model (EMA); each has its own mean.
        buffers: whether buffers hold their mean, too, see average_model; by default they keep their values.

    Raises:
        ModelMismatchError: on every learner, if their parameters differ in names, shapes or dtypes.
        NonFiniteModelError: on every learner, if a leader's model holds NaN or Inf; see average_model.
    """
    world, modules = worlds.current(), [model, *more]
    with contextlib.ExitStack() as left:
        with counted("averaged") as caller, torch.no_grad():
            entries = _entries(world, "averaged", modules, buffers) if world.super_size > 1 else []
            means = _means_of_the_run(world, entries) if entries else []
            _warn_if_apart(world, caller, entries, means)
            tensors = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}.values()
            for module in modules:
                left.callback(
                    _put_back,
                    [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()],
                )
            for tensor in tensors:
                part = local(tensor)
                left.callback(_restore, part, part.data, part.detach().clone())
            _write(entries, means)
            del means
            left.callback(reshard, *modules)  # called first: the block may have evaluated the model
        concerned = [
            a
            for a in live()
            if any(t in a.tensors.parameters or id(t) in a.tensors.trained for t in tensors)
        ]
        for averaging in concerned:
            averaging.holds_mean += 1
            left.callback(_give_back, averaging)
        yield


def _write(entries: Sequence[Entry], means: Sequence[torch.Tensor | None]) -> None:
    """Copy the means to the tensors; one without a mean keeps its values."""
    for entry, mean in zip(entries, means, strict=True):
        if mean is not None:
            local(entry.tensor).data.copy_(mean)


def _warn_if_apart(
    world: World, caller: Caller, entries: Sequence[Entry], means: Sequence[torch.Tensor | None]
) -> None:
    """Warn of models that differ, that a plain optimizer trains, and that nothing has averaged so far."""
    if calls(("DistributedOptimizer", "average_model")) or world.rank != world.collectives.ranks[0]:
        return
    apart = {
        id(entry.tensor)
        for entry, mean in zip(entries, means, strict=True)
        if mean is not None
        and not torch.equal(local(entry.tensor).cpu(), mean.to(entry.tensor.dtype))
    }
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    for optimizer in optimizers if apart else ():
        if any(id(p) in apart for group in optimizer.param_groups for p in group["params"]):
            log.warning(
                "%s at %s:%d: the models differ, and %s, which trains them, averages nothing. Wrap it by "
                "hvd.DistributedOptimizer, and step the optimizer that this returns.",
                *caller,
                type(optimizer).__name__,
            )
            return


def _means_of_the_run(world: World, entries: Sequence[Entry]) -> list[torch.Tensor | None]:
    """Return the tensors' means over super learners, with pending corrections, while exchanges are paused.

    Inside a nested block the tensors hold that mean already, so nothing counts as pending.
    """
    doing = "averaged"
    with contextlib.ExitStack() as stack:
        averagings = stack.enter_context(held(world, doing))
        pending = [
            a
            for a in averagings
            if not a.holds_mean and any(e.tensor in a.tensors.parameters for e in entries)
        ]
        if world.collectives.joining:  # a joining super learner has no peers until it has joined
            pending = []
        # of a model in shards, a leader has the pending corrections of its own shard only
        whole = [a for a in pending if a.tensors.shards == 1]
        stack.enter_context(paused(world, doing, pending, keeping_pending=whole))
        return finite_means(world, doing, entries, pending=whole)


def _put_back(held: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    """Put the tensors in `held` back into their modules: half() or cpu() may have replaced them."""
    for module, parameters, buffers in held:
        for mine, tensors in ((module._parameters, parameters), (module._buffers, buffers)):
            # no update(): a scripted module's _parameters is no dict
            for name, tensor in tensors.items():
                mine[name] = tensor


def _restore(tensor: torch.Tensor, memory: torch.Tensor, values: torch.Tensor) -> None:
    tensor.data = memory  # half() and cpu() may have replaced the memory
    if not shares_elements(memory):  # torch refuses to write to an expanded tensor
        memory.copy_(values)


def _give_back(averaging: Averaging) -> None:
    averaging.holds_mean -= 1


@torch.no_grad()
def mean_model(model: torch.nn.Module, wanted: Collection[int]) -> dict[int, torch.Tensor]:
    """Return means over the leaders of some parameters and buffers, in host memory, for a joining learner.

    Models that are not finite are left out. Buffers that are not averaged are copies of this learner's.
    DTensors are left out (see joining/join_state). All learners call it together.

    Args:
        model: the same module on all learners.
        wanted: indices in [*parameters, *buffers] of the tensors that this learner needs.

    Returns:
        By index, the mean, for each index in `wanted`.
    """
    world, doing = worlds.current(), "mean_model"
    entries = [e for e in _entries(world, doing, [model]) if not is_sharded(e.tensor)]
    tensors = [*model.parameters(), *model.buffers()]
    needed = {id(tensors[i]) for i in wanted}
    flags = [id(e.tensor) in needed for e in entries]
    found = means_of_models(world, doing, entries, wanted=flags)[0] if entries else []
    its = (id(e.tensor) for e in entries if id(e.tensor) in needed)
    means = dict(zip(its, found, strict=True))
    given = {i: means.get(id(tensors[i])) for i in wanted}
    return {i: tensors[i].detach().cpu().clone() if m is None else m for i, m in given.items()}


def mean_moments(averagings: Sequence[Averaging], wanted: bool) -> list[list[torch.Tensor]]:
    """Return means over the leaders of `UpdateRule.moments`, in host memory, for a joining learner.

    All learners call it together.

    Args:
        averagings: those of this learner's optimizers.
        wanted: whether this learner needs the means; else it gets empty lists.
    """
    tensors = [
        [moment for moment in averaging.rule.moments() if not is_sharded(moment)]
        for averaging in averagings
    ]
    flat = [Entry("a moment of the optimizer", tensor) for each in tensors for tensor in each]
    if not flat:
        return tensors
    means = means_of_models(worlds.current(), "mean_moments", flat, wanted=[wanted] * len(flat))[0]
    rest = iter([mean for mean in means if mean is not None])
    return [[next(rest) for _ in each] if wanted else [] for each in tensors]


def _entries(
    world: World, doing: str, modules: Sequence[torch.nn.Module], buffers: bool = True
) -> list[Entry]:
    """Return the tensors of the modules that can be averaged, each once, in one order on all learners."""
    parameters: dict[int, Entry] = {}
    others: dict[int, Entry] = {}
    trained = {key for averaging in live() for key in averaging.tensors.trained}
    stepped = {key for averaging in live() if averaging.step for key in averaging.tensors.trained}
    reshard(*(module for module in modules if isinstance(module, torch.nn.Module)))
    for i, module in enumerate(modules):
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(
                f"{doing} got a {type(module).__name__}, allowed is a torch.nn.Module. Pass the model itself."
            )
        start = f"{i}." if i else ""
        for name, p in module.named_parameters():
            if p.is_floating_point() and not shares_elements(p):
                is_trained = p.requires_grad or id(p) in trained
                parameters.setdefault(id(p), Entry(start + name, p, is_trained, id(p) in stepped))
        for name, b in statistics(module) if buffers else ():
            if not shares_elements(b):
                others.setdefault(id(b), Entry(start + name, b, False))
    require_same(world, doing, described((e.name, e.tensor) for e in parameters.values()))
    told = described((e.name, e.tensor) for e in others.values())
    by_fact = dict(zip(told, others.values(), strict=True))
    kept = common(world, doing, told) if buffers else []
    return [*parameters.values(), *(by_fact[fact] for fact in kept)]
