"""Means of tensors over super learners: of the leaders' tensors, or of the parts that counterparts hold."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.errors import NonFiniteModelError, PeerFailedError
from hvd_adpsgd.inner.tensor_bytes import lent
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.sharded import is_sharded, local

__all__ = ["among_counterparts", "finite_means", "means_of_models"]

log = logging.getLogger("hvd_adpsgd")


def finite_means(
    world: World,
    doing: str,
    tensors: list[torch.Tensor],
    weight: float = 1.0,
    pending: Sequence[Averaging] = (),
) -> list[torch.Tensor]:
    """Return the tensors' means over super learners; raise or warn, as configured, on NaN or infinity."""
    means, unfit = means_of_models(world, doing, tensors, weight, pending)
    if unfit:
        finite = all(bool(torch.isfinite(mean).all()) for mean in means)
        if any(map(is_sharded, tensors)):
            finite = all(world.collectives.gather(doing, finite))
        _without(world, doing, unfit, finite)
    return means


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


def means_of_models(
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
    cut = list(map(is_sharded, tensors))
    if any(cut) and not all(cut):
        return _means_of_both(world, doing, tensors, weight, pending, wanted)
    gives = world.is_leader or any(cut)
    hosts = [
        local(t).detach().to("cpu", torch.float64 if t.dtype == torch.float64 else torch.float32)
        for t in tensors
    ]
    if gives:
        hosts = _with_pending(pending, tensors, hosts)
    fit = all(bool(torch.isfinite(h).all()) for h in hosts)

    def operation(attempt: Attempt) -> tuple[list[NDArray[Any] | None], list[int]]:
        told = [call.private for call in attempt.calls]
        leaders = [i for i, (leads, _, _) in enumerate(told) if leads]
        fits = [i for i in leaders if told[i][1]]
        if any(cut):
            leaders, fits = _whole(world, attempt, [fit for _, fit, _ in told])
        weights = {i: told[i][2] for i in fits}
        if not any(weights.values()):
            weights = {i: told[i][2] for i in leaders}
        if not any(weights.values()):
            raise PeerFailedError(
                f"{doing}: no leader of a super learner{' has a weight above 0' if leaders else ' is left'} "
                f"(failed learners: {sorted(world.collectives.gone())}). "
                f"{'Give the others a weight, or none.' if leaders else 'Start again from a checkpoint.'}"
            )
        weights = _within_range(weights)
        arrays = [lent(h.contiguous()) for h in hosts]
        unfit = [attempt.ranks[i] for i in leaders if i not in fits]
        if not any(cut):
            return _means_of(attempt, weights, arrays, wanted), unfit
        return _means_of(*_weighed(world, attempt, weights), arrays, wanted), unfit

    call = Call(doing, private=(gives, fit, weight))
    means, unfit = world.collectives.run(call, operation)
    kept = (mean for mean, keeps in zip(means, wanted, strict=True) if keeps)
    return [torch.from_numpy(mean) for mean in kept], unfit


def _means_of_both(
    world: World,
    doing: str,
    tensors: list[torch.Tensor],
    weight: float,
    pending: Sequence[Averaging],
    wanted: Sequence[bool],
) -> tuple[list[torch.Tensor], list[int]]:
    """As `means_of_models`, for DTensors and plain tensors: in two operations."""
    means: dict[int, torch.Tensor] = {}
    unfit: set[int] = set()
    for kind in (False, True):
        its = [i for i, tensor in enumerate(tensors) if is_sharded(tensor) is kind]
        keeps = [wanted[i] for i in its]
        found, bad = means_of_models(
            world, doing, [tensors[i] for i in its], weight, pending, keeps
        )
        means.update(
            zip((i for i, keep in zip(its, keeps, strict=True) if keep), found, strict=True)
        )
        unfit.update(bad)
    return [means[i] for i in sorted(means)], sorted(unfit)


def _whole(world: World, attempt: Attempt, fit: list[bool]) -> tuple[list[int], list[int]]:
    """Return the leaders of super learners without a failed learner, and those whose parts are all finite.

    Args:
        world: the World of this learner.
        attempt: the attempt at the operation.
        fit: by rank in the attempt, whether the learner's part is finite.

    Returns:
        Ranks in the attempt.
    """
    places = {rank: i for i, rank in enumerate(attempt.ranks)}
    whole = [group for group in world.groups if places.keys() >= set(group)]
    finite = [group for group in whole if all(fit[places[rank]] for rank in group)]
    return [places[group[0]] for group in whole], [places[group[0]] for group in finite]


def among_counterparts(world: World, attempt: Attempt) -> Attempt:
    """Return the attempt at an operation of this learner's counterparts alone."""
    return attempt.among([i for i, rank in enumerate(attempt.ranks) if rank in world.counterparts])


def _weighed(
    world: World, attempt: Attempt, weights: dict[int, float]
) -> tuple[Attempt, dict[int, float]]:
    """Return the attempt of this learner's counterparts, and their weights there.

    Args:
        world: the World of this learner.
        attempt: the attempt of all learners.
        weights: the weight of each super learner, by its leader's rank in `attempt`.
    """
    part = among_counterparts(world, attempt)
    # without those that do not count: `_mean` adds differences to the model of one that does
    by_leader = {attempt.ranks[i]: weight for i, weight in weights.items() if weight}
    its = {group[world.inner_rank]: group[0] for group in world.groups if group[0] in by_leader}
    return part, {i: by_leader[its[rank]] for i, rank in enumerate(part.ranks) if rank in its}


def _with_pending(
    pending: Sequence[Averaging], tensors: list[torch.Tensor], hosts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors in host memory plus pending corrections from exchanges; averaged ones are copies."""
    copies = {id(t): h for t, h in zip(tensors, hosts, strict=True)}
    for averaging in pending:
        parameters = averaging.tensors.parameters
        for given, t in zip(parameters.given, parameters.tensors, strict=True):
            if (h := copies.get(id(given))) is not None:
                copy = h.clone() if h.data_ptr() == t.data_ptr() else h
                copies[id(given)] = copy.contiguous()
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
