"""The exact mean of the super learners' models, for evaluation and for the final checkpoint."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.collectives.usage import counted
from hvd_adpsgd.errors import ConfigError, NonFiniteModelError, PeerFailedError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.consistency import described, require_same
from hvd_adpsgd.training.parameters import shares_elements, statistics
from hvd_adpsgd.training.pause import paused
from hvd_adpsgd.training.presence import held, live

__all__ = ["average_model", "averaged", "consensus_distance", "mean_model", "mean_moments"]

log = logging.getLogger("hvd_adpsgd")


@torch.no_grad()
def average_model(model: torch.nn.Module, weight: float = 1.0) -> None:
    """Set the model to the exact mean over super learners, in place; all learners call it together.

    Parameters and floating-point buffers (but the vectors of spectral_norm) become the mean of the leaders'
    values; with weights, sum of weight_i w_i / sum of weight_i. If an optimizer averages the model, its
    running exchanges finish and pending corrections are applied first. With a2cid2, the middle of its two
    models is averaged. Waits for the slowest super learner: use it for evaluation and for the final
    checkpoint.

    Args:
        model: the same module on every learner.
        weight: weight of this super learner's model in the mean, >= 0, the same on all its learners; for
            instance 1 / its held-out loss. The weights must not all be 0.

    Raises:
        ConfigError: on every learner, if a weight is not a number >= 0, or all are 0.
        ModelMismatchError: on every learner, if their models differ in names, shapes or dtypes.
        NonFiniteModelError: on every learner, if a leader's model holds NaN or Inf; no mean is taken.
            With HVD_ADPSGD_NONFINITE=skip all receive the mean of the finite models instead, unless
            their weights are all 0.
    """
    world = worlds.current()
    _require_weights(world, weight)
    if world.super_size == 1:
        return
    doing = "average_model"
    tensors = _floating(world, doing, [model])
    with contextlib.ExitStack() as stack:
        averagings = stack.enter_context(held(world, doing))
        concerned = [a for a in averagings if any(t in a.tensors.parameters for t in tensors)]
        stack.enter_context(paused(world, doing, concerned))
        means = _finite_means(world, doing, tensors, float(weight))
        for averaging in concerned:
            averaging.rule.before_mean()
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.data.copy_(mean)
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
    ):  # torch raises RuntimeError for a tensor of several elements
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


def _without(world: World, doing: str, unfit: list[int], finite: bool) -> None:
    """Raise or warn because the models of some leaders hold NaN or infinity.

    Args:
        world: the World of this learner.
        doing: name of the operation, for messages.
        unfit: ranks of these leaders.
        finite: whether the mean of the other models is finite.

    Raises:
        NonFiniteModelError: on every learner, unless HVD_ADPSGD_NONFINITE is "skip" and `finite` is true.
    """
    who = f"the model of learner {', '.join(map(str, unfit))}, and of its super learner,"
    if world.config.nonfinite == "raise" or not finite:
        raise NonFiniteModelError(
            f"{doing}: {who} holds NaN or Inf; no mean was taken. Load a checkpoint, lower the "
            "learning rate or clip gradients; HVD_ADPSGD_NONFINITE=skip takes the mean of the others, "
            "for all."
        )
    if world.rank == world.collectives.ranks[0]:
        log.warning(
            "%s: %s holds NaN or Inf; the mean of the other models takes its place.", doing, who
        )


@counted("consensus_distance")
@torch.no_grad()
def consensus_distance(model: torch.nn.Module) -> float:
    """Return the exact root mean square distance of the super learners' models from their mean.

    sqrt((1/n) sum over super learners of |w_l - mean|^2), over parameters and floating-point buffers
    with their current values; pending corrections are not applied. All learners call it together; it
    waits for the slowest learner. Inside `averaged` all models are the mean, so the result is 0. `metrics()`
    has an estimate without communication.

    Args:
        model: the same module on every learner.

    Raises:
        ModelMismatchError: on every learner, if their models differ in names, shapes or dtypes.
    """
    world, doing = worlds.current(), "consensus_distance"
    if world.super_size == 1:
        return 0.0
    tensors = _floating(world, doing, [model])
    square = sum(
        float((t.detach().cpu().double() - mean.double()).square().sum())
        for t, mean in zip(tensors, _means(world, doing, tensors)[0], strict=True)
    )
    told = world.collectives.gather(doing, (world.is_leader, square))
    squares = [square for leads, square in told if leads]
    return math.sqrt(sum(squares) / len(squares))


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
        buffers: whether floating-point buffers hold their mean, too; by default they keep their own values.

    Raises:
        ModelMismatchError: on every learner, if their models differ in names, shapes or dtypes.
        NonFiniteModelError: on every learner, if a leader's model holds NaN or Inf; see average_model.
    """
    world, modules = worlds.current(), [model, *more]
    with contextlib.ExitStack() as left:
        with counted("averaged"), torch.no_grad():
            named = _floating(world, "averaged", modules, buffers) if world.super_size > 1 else []
            means = _means_of_the_run(world, named) if named else []
            tensors = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}.values()
            for module in modules:
                left.callback(
                    _put_back,
                    [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()],
                )
            for tensor in tensors:
                left.callback(_restore, tensor, tensor.data, tensor.detach().clone())
            for tensor, mean in zip(named, means, strict=True):
                tensor.data.copy_(mean)
            del means
        concerned = [
            a
            for a in live()
            if any(t in a.tensors.parameters or id(t) in a.tensors.trained for t in tensors)
        ]
        for averaging in concerned:
            averaging.holds_mean += 1
            left.callback(_give_back, averaging)
        yield


def _means_of_the_run(world: World, named: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors' means over super learners, with pending corrections, while exchanges are paused.

    Inside a nested block the tensors hold that mean already, so nothing counts as pending.
    """
    doing = "averaged"
    with contextlib.ExitStack() as stack:
        averagings = stack.enter_context(held(world, doing))
        pending = [
            a
            for a in averagings
            if not a.holds_mean and any(t in a.tensors.parameters for t in named)
        ]
        if world.collectives.joining:  # a joining super learner has no peers until it has joined
            pending = []
        # of a model in shards, a leader has the pending corrections of its own shard only
        whole = [a for a in pending if a.tensors.shards == 1]
        stack.enter_context(paused(world, doing, pending, keeping_pending=whole))
        return _finite_means(world, doing, named, pending=whole)


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


def _finite_means(
    world: World,
    doing: str,
    tensors: list[torch.Tensor],
    weight: float = 1.0,
    pending: Sequence[Averaging] = (),
) -> list[torch.Tensor]:
    """Return the tensors' means over super learners; raise or warn, as configured, on NaN or infinity."""
    means, unfit = _means(world, doing, tensors, weight, pending)
    if unfit:
        _without(world, doing, unfit, all(bool(torch.isfinite(mean).all()) for mean in means))
    return means


@torch.no_grad()
def mean_model(model: torch.nn.Module, wanted: Collection[int]) -> dict[int, torch.Tensor]:
    """Return means over the leaders of some parameters and buffers, in host memory, for a joining learner.

    Models that are not finite are left out. Buffers that are not floating-point are copies of this learner's.
    All learners call it together.

    Args:
        model: the same module on all learners.
        wanted: indices in [*parameters, *buffers] of the tensors that this learner needs.

    Returns:
        By index, the mean, for each index in `wanted`.
    """
    world, doing = worlds.current(), "mean_model"
    named = _floating(world, doing, [model])
    tensors = [*model.parameters(), *model.buffers()]
    needed = {id(tensors[i]) for i in wanted}
    flags = [id(t) in needed for t in named]
    found = _means(world, doing, named, wanted=flags)[0] if named else []
    means = dict(zip((id(t) for t in named if id(t) in needed), found, strict=True))
    given = {i: means.get(id(tensors[i])) for i in wanted}
    return {i: tensors[i].detach().cpu().clone() if m is None else m for i, m in given.items()}


def mean_moments(averagings: Sequence[Averaging], wanted: bool) -> list[list[torch.Tensor]]:
    """Return means over the leaders of `UpdateRule.moments`, in host memory, for a joining learner.

    All learners call it together.

    Args:
        averagings: those of this learner's optimizers.
        wanted: whether this learner needs the means; else it gets empty lists.
    """
    tensors = [averaging.rule.moments() for averaging in averagings]
    flat = [tensor for each in tensors for tensor in each]
    if not flat:
        return tensors
    means = _means(worlds.current(), "mean_moments", flat, wanted=[wanted] * len(flat))[0]
    rest = iter(means)
    return [[next(rest) for _ in each] if wanted else [] for each in tensors]


def _floating(
    world: World, doing: str, modules: Sequence[torch.nn.Module], buffers: bool = True
) -> list[torch.Tensor]:
    """Return the tensors of the modules that can be averaged, each once, in one order on all learners."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for i, module in enumerate(modules):
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(
                f"{doing} got a {type(module).__name__}, allowed is a torch.nn.Module. Pass the model itself."
            )
        more = statistics(module) if buffers else ()
        for name, tensor in (*module.named_parameters(), *more):
            if tensor.is_floating_point() and not shares_elements(tensor):
                named.setdefault(id(tensor), (f"{i}.{name}" if i else name, tensor))
    require_same(world, doing, described(named.values()))
    return [tensor for _, tensor in named.values()]


def _means(
    world: World,
    doing: str,
    tensors: list[torch.Tensor],
    weight: float = 1.0,
    pending: Sequence[Averaging] = (),
    wanted: Sequence[bool] = (),
) -> tuple[list[torch.Tensor], list[int]]:
    """Return the (weighted) mean of each tensor over the leaders, float64 for float64 tensors, else float32.

    Args:
        world: the World of this learner.
        doing: name of the operation, for messages.
        tensors: tensors of the same shapes and dtypes on every learner.
        weight: weight of this super learner's model.
        pending: paused averagings whose pending corrections count as applied.
        wanted: per tensor, whether this learner needs its mean; () for all.

    Returns:
        The means of the wanted tensors, over the finite models, or over all models if none with a weight
        above 0 is finite; and the ranks of the leaders whose models are not finite.
    """
    wanted = wanted or [True] * len(tensors)
    hosts = [
        t.detach().to("cpu", torch.float64 if t.dtype == torch.float64 else torch.float32)
        for t in tensors
    ]
    if world.is_leader:
        hosts = _with_pending(pending, tensors, hosts)
    fit = all(bool(torch.isfinite(h).all()) for h in hosts)

    def operation(attempt: Attempt) -> tuple[list[NDArray[Any] | None], list[int]]:
        told = [call.private for call in attempt.calls]
        leaders = [i for i, (leads, _, _) in enumerate(told) if leads]
        weights = {i: told[i][2] for i in leaders if told[i][1]}
        if not any(weights.values()):
            weights = {i: told[i][2] for i in leaders}
        if not any(weights.values()):
            raise PeerFailedError(
                f"{doing}: no leader of a super learner{' has a weight above 0' if leaders else ' is left'} "
                f"(failed learners: {sorted(world.collectives.gone())}). "
                f"{'Give the others a weight, or none.' if leaders else 'Start again from a checkpoint.'}"
            )
        weights = _within_range(weights)
        means = _means_of(attempt, weights, [h.contiguous().numpy() for h in hosts], wanted)
        return means, [attempt.ranks[i] for i in leaders if not told[i][1]]

    call = Call(doing, private=(world.is_leader, fit, weight))
    means, unfit = world.collectives.run(call, operation)
    kept = (mean for mean, keeps in zip(means, wanted, strict=True) if keeps)
    return [torch.from_numpy(mean) for mean in kept], unfit


def _with_pending(
    pending: Sequence[Averaging], tensors: list[torch.Tensor], hosts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors in host memory plus pending corrections from exchanges; averaged ones are copies."""
    copies = {id(t): h for t, h in zip(tensors, hosts, strict=True)}
    for averaging in pending:
        for t in averaging.tensors.parameters.tensors:
            if (h := copies.get(id(t))) is not None:
                copies[id(t)] = h.clone() if h.data_ptr() == t.data_ptr() else h
                copies[id(t)] = copies[id(t)].contiguous()
        averaging.tensors.add_pending(copies)
    return list(copies.values())


def _within_range(weights: dict[int, float]) -> dict[int, float]:
    """Return the weights divided by a power of two, so that each is below 1 and no sum overflows float32."""
    _, exponent = math.frexp(max(weights.values()))
    return {i: math.ldexp(weight, -exponent) for i, weight in weights.items()}


def _means_of(
    attempt: Attempt,
    weights: dict[int, float],
    arrays: list[NDArray[Any]],
    wanted: Sequence[bool],
) -> list[NDArray[Any] | None]:
    """Return the mean of each array over the ranks in `weights`; in one pass if all share a host's memory."""
    means: dict[int, NDArray[Any] | None] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        places = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        same = [arrays[i] for i in places]
        combine = functools.partial(_mean_in, weights)
        found = attempt.elementwise(same, combine, sorted(weights), [wanted[i] for i in places])
        if found is None:
            found = [_mean(attempt, weights, array) for array in same]
        means.update(zip(places, found, strict=True))
    return [means[i] for i in range(len(arrays))]


def _mean_in(
    weights: dict[int, float], parts: Sequence[NDArray[Any]], result: NDArray[Any]
) -> None:
    """Write the weighted mean of `parts`, given in the order of their ranks, to `result`; as `_mean` does."""
    result[:] = 0.0
    for rank, part in zip(sorted(weights), parts, strict=True):
        difference = part - parts[0]
        difference *= weights[rank]
        result += difference
    result /= sum(weights.values())
    result += parts[0]


def _mean(attempt: Attempt, weights: dict[int, float], mine: NDArray[Any]) -> NDArray[Any]:
    """Return the mean over the ranks in `weights`: of differences to one rank, so equal models stay equal."""
    reference = mine.copy()
    attempt.broadcast(reference, min(weights))
    weight = weights.get(attempt.rank, 0.0)
    difference = weight * (mine - reference) if weight else np.zeros_like(mine)
    return np.asarray(reference + attempt.allreduce(difference) / sum(weights.values()))
