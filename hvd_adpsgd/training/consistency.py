"""Checks that arguments, models and process sets are equal on all learners before training starts."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from hvd_adpsgd import errors
from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.config import Config, environment_name
from hvd_adpsgd.errors import ModelMismatchError, StrategyMismatchError, WorldError
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.parameters import AveragingSpec, averaged_dtype
from hvd_adpsgd.training.sharded import sharding

log = logging.getLogger("hvd_adpsgd")

T = TypeVar("T")

_logged: set[str] = set()  # names of tensors of which the log has said that they differ


def unanimous(world: World, doing: str, act: Callable[[], T]) -> T:
    """Run `act` on every learner; if it fails on one, raise on all, so that no learner blocks.

    Args:
        world: the World of this learner.
        doing: name of the operation, for messages.
        act: function without arguments.

    Returns:
        What `act` returned on this learner.

    Raises:
        Exception: what `act` raised on this learner.
        AdpsgdError: an error of the same class, if it is one of this library, that names the learner on which
            `act` raised; else a WorldError with the text of that error.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as mine:  # also of the script's own objects: the others wait in gather
        error = mine
    told = (type(error).__name__, str(error)) if error else None
    errors_by_rank = world.collectives.gather(doing, told)
    if error is not None:
        raise error
    for rank, other in zip(world.collectives.ranks, errors_by_rank, strict=True):
        if other is not None:
            name, text = other
            if hasattr(errors, name):
                raise getattr(errors, name)(f"learner {rank}: {text}")
            raise WorldError(
                f"{doing}: learner {rank} raised {name}: {text}. Correct what it was given there."
            )
    return result  # type: ignore[return-value]


def agree(world: World, spec: Callable[[], AveragingSpec]) -> AveragingSpec:
    """Return this learner's `spec()`, after comparing its arguments and tensors with those of all learners.

    Raises:
        ModelMismatchError, StrategyMismatchError: on every learner, if tensors or arguments differ on one.
        AdpsgdError: on every learner, if `spec` raises on one.
    """
    doing = "hvd.DistributedOptimizer"
    mine = unanimous(world, doing, spec)
    _require_same_arguments(world, doing, mine.arguments)
    require_same(world, doing, described(mine.named))
    return mine


def _require_same_arguments(world: World, doing: str, arguments: list[str]) -> None:
    """Raise StrategyMismatchError on every learner if an argument differs between two learners."""
    found = _first_difference(world, doing, arguments)
    if found is None:
        return
    first, other, mine, theirs = found
    one, another = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
    name = one.split("=", 1)[0]
    or_environment = f", or {environment_name(name)}" if hasattr(Config, name) else ""
    raise StrategyMismatchError(
        f"{doing}: {name} differs between learners, {one} on learner {first} and {another} on learner "
        f"{other}. Use the same on all learners ({name}={or_environment})."
    )


def require_same_sets(world: World, doing: str, ranks: Sequence[int]) -> None:
    """Raise StrategyMismatchError on every learner if the members of a process set do not all pass that set.

    Args:
        world: the World of this learner, with one super learner.
        doing: name of the operation, for messages.
        ranks: the ranks of the process set that this learner passes; learners outside may pass other sets.
    """
    told = world.collectives.gather(doing, tuple(ranks))
    for rank, members in enumerate(told):
        other = next((m for m in members if told[m] != members), None)
        if other is not None:
            raise StrategyMismatchError(
                f"{doing}: process_set differs between learners, {list(members)} on learner {rank} and "
                f"{list(told[other])} on learner {other}. All learners of a set pass that set."
            )


def require_same(world: World, doing: str, tensors: list[str]) -> None:
    """Raise ModelMismatchError on every learner if descriptions of tensors differ between learners."""
    found = _first_difference(world, doing, tensors)
    if found is not None:
        first, other, mine, theirs = found
        raise ModelMismatchError(
            f"{doing}: " + _difference(mine, theirs, f"learner {other}", f"learner {first}")
        )


def _first_difference(
    world: World, doing: str, facts: list[str]
) -> tuple[int, int, list[str], list[str]] | None:
    """Find two learners whose `facts` differ.

    Every learner sends a digest of its facts. Only if digests differ, two learners send the facts themselves:
    the first learner, and the first one whose digest differs from it.

    Returns:
        The ranks of these two learners and their facts; None if the facts are equal on all learners.
    """
    digests = world.collectives.gather(doing, _digest(facts))
    by_rank = dict(zip(world.collectives.ranks, digests, strict=True))
    first = min(by_rank)
    other = min((rank for rank in by_rank if by_rank[rank] != by_rank[first]), default=None)
    if other is None:
        return None
    told = world.collectives.gather(doing, facts if world.rank in (first, other) else None)
    by_rank = dict(zip(world.collectives.ranks, told, strict=True))
    if first not in by_rank or other not in by_rank:
        # one of these two learners failed after it had sent its digest: compare the surviving learners
        return _first_difference(world, doing, facts)
    return first, other, by_rank[first], by_rank[other]


def common(world: World, doing: str, tensors: list[str]) -> list[str]:
    """Return the descriptions of tensors that all learners have, in one order; log other names, each once."""
    if len(set(world.collectives.gather(doing, _digest(tensors)))) == 1:
        return tensors
    told = [set(facts) for facts in world.collectives.gather(doing, tensors)]
    kept = set.intersection(*told)
    names = {fact.split(" ")[0] for fact in set.union(*told) - kept} - _logged
    if names and world.rank == world.collectives.ranks[0]:
        log.warning(
            "%s: buffers (%s) keep their own values, as shapes differ. Make caches persistent=False.",
            doing,
            ", ".join(map(repr, sorted(names)[:3])),
        )
    _logged.update(names)
    return sorted(kept)


def require_same_inside(world: World, doing: str, named: list[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelMismatchError on every learner of the super learner if tensors differ between two."""
    told, ranks = allgather_object(world.inner, described(named)), world.groups[world.super_rank]
    for inner_rank, other in enumerate(told):
        if other != told[0]:
            first, who = (f"learner {ranks[i]}" for i in (0, inner_rank))
            raise ModelMismatchError(f"{doing}: " + _difference(told[0], other, who, first))


def described(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    return [f"{name} {averaged_dtype(t)}{list(t.shape)}{sharding(t)}" for name, t in named]


def _digest(tensors: list[str]) -> bytes:
    """Return the SHA-256 digest of the descriptions, 32 bytes."""
    return hashlib.sha256("\n".join(tensors).encode()).digest()


def _difference(mine: list[str], other: list[str], who: str, first: str) -> str:
    """Return a message that names the first tensor in which two models differ, and the two learners."""
    for i, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a != b:
            return (
                f"models differ at tensor {i}: {first} has {a}, {who} has {b}. Build the same "
                "model with the same names on every learner."
            )
    i = min(len(mine), len(other))
    longer, extra = (first, mine[i]) if len(mine) > len(other) else (who, other[i])
    return (
        f"models differ: {first} averages {len(mine)} tensors, {who} {len(other)}; {extra} is "
        f"only on {longer}. Build the same model on every learner."
    )
