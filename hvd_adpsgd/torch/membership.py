"""Failed ranks, the coordinator, what collectives do after a failure, callbacks on membership changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World

__all__ = [
    "are_told",
    "failed_ranks",
    "forget",
    "is_coordinator",
    "on_failure",
    "on_membership_change",
    "tell_membership",
]

Callback = TypeVar("Callback", bound=Callable[[tuple[int, ...]], object])

_CHOICES = ("continue", "raise")


def is_coordinator() -> bool:
    """Whether this learner is the first surviving learner, which should save checkpoints and print.

    Use `if hvd.is_coordinator():` in place of `if hvd.rank() == 0:`. When a learner of the coordinator's
    super learner fails, the first surviving learner becomes coordinator. The call takes microseconds and does
    not block, so for about 0.1 s after a failure there may be no coordinator.
    """
    world = worlds.current()
    ended = world.collectives.ended()
    gone = ended.union(world.membership.failed_ranks(ended))
    # if no super learner is complete, the first surviving learner
    living = [r for r in range(world.size) if r not in gone] or sorted(
        set(range(world.size)) - ended
    )
    return world.rank == living[0]


def failed_ranks() -> tuple[int, ...]:
    """Return the ranks of all learners of failed super learners, ascending.

    Failures that this learner does not know yet are not included; the call does not block.
    """
    world = worlds.current()
    return world.membership.failed_ranks(world.collectives.ended())


@contextlib.contextmanager
def on_failure(what: str) -> Iterator[None]:
    """Set what operations over all learners do after a failure; all learners enter the block together.

    With "continue" operations run over the surviving learners, and a mean is the mean of fewer models. With
    "raise" operations raise PeerFailedError on all surviving learners until the failed ones are replaced. No
    operation hangs in either case. Outside a block HVD_ADPSGD_ON_FAILURE applies.

    Args:
        what: "continue" or "raise".

    Raises:
        ConfigError: for another word.
    """
    if what not in _CHOICES:
        allowed = " and ".join(map(repr, _CHOICES))
        raise ConfigError(f"on_failure({what!r}): allowed are {allowed}. Pass one of these.")
    with worlds.current().collectives.instead(what):
        yield


_callbacks: list[Callable[[tuple[int, ...]], object]] = []
_told: tuple[int, ...] | None = None  # ranks at the last hvd.admit; None before the first call


def on_membership_change(callback: Callback) -> Callback:
    """Register `callback(ranks)` for changes of the job's learners, until shutdown(); for samplers, say.

        @hvd.on_membership_change
        def shard(ranks):
            sampler.rank, sampler.num_replicas = ranks.index(hvd.rank()), len(ranks)
            sampler.num_samples = math.ceil(len(data) / len(ranks))  # else it raises AssertionError
            sampler.total_size = sampler.num_samples * len(ranks)

    hvd.admit calls it, between two steps, on all learners: when learners have joined, failed or left since
    the last call of hvd.admit, and on the learners that join.

    Args:
        callback: called with the ranks of all present learners, ascending. hvd.admit raises its exceptions.

    Returns:
        `callback`, so that this function can be a decorator.
    """
    _callbacks.append(callback)
    return callback


def are_told() -> bool:
    """Whether a callback wants to know of changes."""
    return bool(_callbacks)


def tell_membership(world: World, joined: bool) -> None:
    """Call this learner's callbacks if the learners of the job have changed; all learners call this together.

    Args:
        world: the World of this learner.
        joined: whether this learner has just joined.
    """
    global _told
    before = tuple(range(world.size)) if _told is None else _told
    _told = world.collectives.ranks
    if joined or _told != before:
        for callback in list(_callbacks):
            callback(_told)


def forget() -> None:
    """Forget all callbacks: another init() begins another job."""
    global _told
    _told = None
    _callbacks.clear()
