"""Means of tensors over super learners: of the leaders' tensors, or of the parts that counterparts hold."""

import functools
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.errors import NonFiniteModelError, PeerFailedError
from hvd_adpsgd.inner.tensor_bytes import lent
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.drift import warn_of_drift
from hvd_adpsgd.training.sharded import is_sharded, local

log = logging.getLogger("hvd_adpsgd")


_ANY = 1024  # powers of two: more than any mean needs

# names of tensors that are not trained, of which the log has said that they are not finite
_logged: set[str] = set()


class Entry(NamedTuple):
    """A tensor of which the mean over super learners is taken; of the same shape and dtype on every learner.

    Attributes:
        name: its name, for messages.
        tensor: the tensor.
        is_trained: whether a model is not finite if this tensor is not. The mean of another tensor is that of
            the models in which it is finite; without any there is no mean.
        is_same: whether the learners of a super learner should hold the same.
    """

    name: str
    tensor: torch.Tensor
    is_trained: bool = True
    is_same: bool = False


def finite_means(
    world: World,
    doing: str,
    entries: Sequence[Entry],
    weight: float = 1.0,
    pending: Sequence[Averaging] = (),
) -> list[torch.Tensor | None]:
    """Return the tensors' means over super learners; raise or warn, as configured, on NaN or infinity.

    None for a tensor without a mean, see Entry.
    """
    means, unfit = means_of_models(world, doing, entries, weight, pending)
    tell_finished(world, doing)
    if unfit:
        finite = all(bool(torch.isfinite(mean).all()) for mean in means if mean is not None)
        if any(is_sharded(entry.tensor) for entry in entries):
            finite = all(world.collectives.gather(doing, finite))
        _without(world, doing, unfit, finite)
    return means


def tell_finished(world: World, doing: str) -> None:
    """Log a warning if a mean lacks models because the scripts of their learners have ended."""
    collectives = world.collectives
    finished = collectives.finished() & collectives.gone()
    left = sum(not finished.issuperset(group) for group in world.groups)
    if left < world.super_size and world.rank == collectives.ranks[0]:
        log.warning(
            "%s: the mean is that of %d of %d models, as the scripts of learners %s have ended. Call %s on "
            "all learners, not only on one (`if hvd.rank() == 0:`).",
            doing,
            left,
            world.super_size,
            sorted(finished),
            doing,
        )


def _without(world: World, doing: str, unfit: Mapping[int, str], finite: bool) -> None:
    """Raise or warn because the models of some leaders hold NaN or infinity.

    Args:
        world: the World of this learner.
        doing: name of the operation, for messages.
        unfit: ranks of these leaders, each with the name of a tensor that is not finite.
        finite: whether the mean of the other models is finite.

    Raises:
        NonFiniteModelError: on every learner, unless HVD_ADPSGD_NONFINITE is "skip" and `finite` is true.
    """
    who = f"the model of learner {', '.join(map(str, unfit))}, and of its super learner,"
    where = next(iter(unfit.values()))
    if world.config.nonfinite == "raise" or not finite:
        raise NonFiniteModelError(
            f"{doing}: {who} holds NaN or Inf ({where}); no mean was taken. Load a checkpoint, lower the "
            "learning rate or clip gradients; HVD_ADPSGD_NONFINITE=skip takes the mean of the others, "
            "for all."
        )
    if world.rank == world.collectives.ranks[0]:
        log.warning(
            "%s: %s holds NaN or Inf (%s); the mean of the other models takes its place.",
            doing,
            who,
            where,
        )


def means_of_models(
    world: World,
    doing: str,
    entries: Sequence[Entry],
    weight: float = 1.0,
    pending: Sequence[Averaging] = (),
    wanted: Sequence[bool] = (),
) -> tuple[list[torch.Tensor | None], dict[int, str]]:
    """Return the (weighted) mean of each tensor over the leaders, float64 for float64 tensors, else float32.

    Args:
        world: the World of this learner.
        doing: name of the operation, for messages.
        entries: the tensors.
        weight: weight of this super learner's model.
        pending: paused averagings whose pending corrections count as applied.
        wanted: per tensor, whether this learner needs its mean; () for all.

    Returns:
        The means of the wanted tensors, over the finite models, or over all models if none with a weight
        above 0 is finite; None for a tensor without a mean, see Entry. And the ranks of the leaders whose
        models are not finite, with the name of a tensor of each that is not.
    """
    wanted = wanted or [True] * len(entries)
    tensors = [entry.tensor for entry in entries]
    cut = list(map(is_sharded, tensors))
    if any(cut) and not all(cut):
        return _means_of_both(world, doing, entries, weight, pending, wanted)
    gives = world.is_leader or any(cut)
    hosts = [
        local(t).detach().to("cpu", torch.float64 if t.dtype == torch.float64 else torch.float32)
        for t in tensors
    ]
    # an optimizer that the script has dropped is so on other learners at another time
    same = {i for i, entry in enumerate(entries) if entry.is_same and not cut[i]}
    mine = {entries[i].name: float(hosts[i].sum()) for i in same}
    if gives:
        hosts = _with_pending(pending, tensors, hosts)
    spares = list(map(_spare, hosts))
    bad = [i for i, spare in enumerate(spares) if spare is None]
    unfit = next((entries[i].name for i in bad if entries[i].is_trained), None)
    spare = min((spare for spare in spares if spare is not None), default=_ANY)

    def operation(attempt: Attempt) -> tuple[list[NDArray[Any] | None], dict[int, str]]:
        told = [call.private for call in attempt.calls]
        leaders = [i for i, its in enumerate(told) if its[0]]
        names = {i: told[i][1] for i in leaders if told[i][1] is not None}
        sums.update(zip(attempt.ranks, (its[5] for its in told), strict=True))
        if any(cut):
            leaders, names = _whole(world, attempt, [its[1] for its in told])
        weights = {i: told[i][2] for i in leaders if i not in names}
        if not any(weights.values()):
            weights = {i: told[i][2] for i in leaders}
        if not any(weights.values()):
            raise PeerFailedError(
                f"{doing}: no leader of a super learner{' has a weight above 0' if leaders else ' is left'} "
                f"(failed learners: {sorted(world.collectives.gone())}). "
                f"{'Give the others a weight, or none.' if leaders else 'Start again from a checkpoint.'}"
            )
        weights = _within_range(weights)
        # a difference of finite numbers, or a sum of differences, may be beyond the dtype's range; no power
        # of two changes a mean's other digits
        needed = 1 + (len(weights) - 1).bit_length()
        shift = needed if min(its[4] for its in told) < needed else 0
        arrays = [lent(host.contiguous()) for host in hosts]
        if shift:
            arrays = [np.asarray(np.ldexp(array, -shift)) for array in arrays]
        if any(cut):
            means = _means_of(*_weighed(world, attempt, weights), arrays, wanted)
        else:
            others = [set(its[3]) for its in told]
            means = _means_of_finite(attempt, doing, entries, weights, others, arrays, wanted)
        if shift:
            means = [None if m is None else np.asarray(np.ldexp(m, shift)) for m in means]
        return means, {attempt.ranks[i]: name for i, name in names.items()}

    untrained = [i for i in bad if not entries[i].is_trained]
    sums: dict[int, dict[str, float]] = {}
    call = Call(doing, private=(gives, unfit, weight, untrained, spare, mine))
    means, found = world.collectives.run(call, operation)
    warn_of_drift(world, doing, {entries[i].name: hosts[i] for i in same}, sums)
    kept = (mean for mean, keeps in zip(means, wanted, strict=True) if keeps)
    return [None if mean is None else torch.from_numpy(mean) for mean in kept], found


def _spare(host: torch.Tensor) -> int | None:
    """Return by how many powers of two all elements are within the dtype's range; None: one is not finite."""
    largest = max(map(abs, map(float, torch.aminmax(host)))) if host.numel() else 0.0
    if not math.isfinite(largest):
        return None
    return math.frexp(torch.finfo(host.dtype).max)[1] - math.frexp(largest)[1]


def _means_of_both(
    world: World,
    doing: str,
    entries: Sequence[Entry],
    weight: float,
    pending: Sequence[Averaging],
    wanted: Sequence[bool],
) -> tuple[list[torch.Tensor | None], dict[int, str]]:
    """As `means_of_models`, for DTensors and plain tensors: in two operations."""
    means: dict[int, torch.Tensor | None] = {}
    unfit: dict[int, str] = {}
    for kind in (False, True):
        its = [i for i, entry in enumerate(entries) if is_sharded(entry.tensor) is kind]
        some, keeps = [entries[i] for i in its], [wanted[i] for i in its]
        found, bad = means_of_models(world, doing, some, weight, pending, keeps)
        means.update(zip((i for i in its if wanted[i]), found, strict=True))
        unfit.update(bad)
    return [means[i] for i in sorted(means)], dict(sorted(unfit.items()))


def _whole(
    world: World, attempt: Attempt, unfit: Sequence[str | None]
) -> tuple[list[int], dict[int, str]]:
    """Return the leaders of super learners without a failed learner, and whose models are not finite.

    Args:
        world: the World of this learner.
        attempt: the attempt at the operation.
        unfit: by rank in the attempt, the name of a tensor whose part there is not finite; None: all are.

    Returns:
        Ranks in the attempt, and for each whose model is not finite the name of a tensor.
    """
    places = {rank: i for i, rank in enumerate(attempt.ranks)}
    whole = [[places[r] for r in group] for group in world.groups if places.keys() >= set(group)]
    bad = [(group[0], name) for group in whole for i in group if (name := unfit[i]) is not None]
    return [group[0] for group in whole], dict(bad)


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


def _means_of_finite(
    attempt: Attempt,
    doing: str,
    entries: Sequence[Entry],
    weights: dict[int, float],
    bad: Sequence[Collection[int]],
    arrays: list[NDArray[Any]],
    wanted: Sequence[bool],
) -> list[NDArray[Any] | None]:
    """As `_means_of`, each over the ranks on which it is finite; None if it is on none, or not wanted.

    Args:
        attempt: the attempt at the operation.
        doing: name of the operation, for messages.
        entries: the tensors that are averaged.
        weights: the weight of each model that counts, by rank in the attempt.
        bad: by rank, the numbers of the tensors that are not trained and not finite there.
        arrays: this rank's values of the tensors.
        wanted: per tensor, whether this learner needs its mean.
    """
    means: list[NDArray[Any] | None] = [None] * len(arrays)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(arrays)):
        groups.setdefault(tuple(r for r in weights if i not in bad[r]), []).append(i)
    for ranks, its in groups.items():
        its_weights = {rank: weights[rank] for rank in ranks}
        if len(ranks) < len(weights) and attempt.rank == 0:
            _log_others(doing, {entries[i].name for i in its}, len(ranks), len(weights))
        if any(its_weights.values()):
            keeps = [wanted[i] for i in its]
            found = _means_of(attempt, its_weights, [arrays[i] for i in its], keeps)
            for i, mean in zip(its, found, strict=True):
                means[i] = mean
    return means


def _log_others(doing: str, names: set[str], finite: int, models: int) -> None:
    """Log, once for each, that tensors that are not trained hold NaN or infinity in some of the models."""
    if not names - _logged:
        return
    log.log(
        # a mask of infinities is the same everywhere
        logging.WARNING if finite else logging.INFO,
        "%s: %s is not trained, and holds NaN or Inf in %d of %d models; %s.",
        doing,
        ", ".join(map(repr, sorted(names - _logged))),
        models - finite,
        models,
        "its mean is that of the others" if finite else "it has no mean, and keeps its values",
    )
    _logged.update(names)


def _means_of(
    attempt: Attempt, weights: dict[int, float], arrays: list[NDArray[Any]], wanted: Sequence[bool]
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


def _mean_in(weights: dict[int, float], parts: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
    """Write the weighted mean of `parts`, given in the order of their ranks, to `out`; as `_mean` does."""
    out[:] = 0.0
    for rank, part in zip(sorted(weights), parts, strict=True):
        difference = part - parts[0]
        difference *= weights[rank]
        out += difference
    out /= sum(weights.values())
    out += parts[0]


def _mean(attempt: Attempt, weights: dict[int, float], mine: NDArray[Any]) -> NDArray[Any]:
    """Return the mean over the ranks in `weights`: of differences to one rank, so equal models stay equal."""
    reference = mine.copy()
    attempt.broadcast(reference, min(weights))
    weight = weights.get(attempt.rank, 0.0)
    difference = weight * (mine - reference) if weight else np.zeros_like(mine)
    return np.asarray(reference + attempt.allreduce(difference) / sum(weights.values()))
