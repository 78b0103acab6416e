"""Failed ranks, the coordinator, and what collectives do after a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World

__all__ = [
    "failed_ranks",
    "is_coordinator",
    "on_failure",
    "on_membership_change",
    "tell_membership",
]

Callback = TypeVar("Callback", bound=Callable[[tuple[int, ...]], object])

_CHOICES = ("continue", "raise")


def is_coordinator() -> bool:
    """Whether this learner is the first surviving learner, which saves and prints.

    Use `if hvd.is_coordinator():` in place of `if hvd.rank() == 0:`. When a learner of the coordinator's
    super learner fails, the first surviving learner takes over. Takes microseconds and does not block,
    so for some 0.1 s after a failure no learner may be the coordinator.
    """
    world = worlds.current()
    ended = world.collectives.ended()
    gone = ended.union(world.membership.failed_ranks(ended))
    # without a whole super learner, the first learner that lives
    living = [r for r in range(world.size) if r not in gone] or sorted(
        set(range(world.size)) - ended
    )
    return world.rank == living[0]


def failed_ranks() -> tuple[int, ...]:
    """Ranks of all learners of failed super learners, ascending.

    As known to this learner now; does not block.
    """
    world = worlds.current()
    return world.membership.failed_ranks(world.collectives.ended())


@contextlib.contextmanager
def on_failure(what: str) -> Iterator[None]:
    """Set what operations over all learners do after a failure; all learners enter the block together.

    With "continue" they run over the surviving learners, and a mean is that of fewer models. With "raise"
    they raise PeerFailedError on all surviving learners until the failed ones are replaced. Neither hangs.
    By default HVD_ADPSGD_ON_FAILURE applies.

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
_told: tuple[int, ...] | None = None  # what callbacks were told last


def on_membership_change(callback: Callback) -> Callback:
    """Call `callback(ranks)` when the learners of the job have changed; for samplers.

        @hvd.on_membership_change
        def shard(ranks):
            sampler.rank, sampler.num_replicas = ranks.index(hvd.rank()), len(ranks)

    It is called in hvd.admit, between two steps, on all learners alike: when some have joined, have failed or
    have left since the last call of hvd.admit, and on those that join.

    Args:
        callback: receives the ranks of all learners that are there, ascending. hvd.admit raises what it does.

    Returns:
        `callback`, so that this serves as a decorator.
    """
    _callbacks.append(callback)
    return callback


def tell_membership(world: World, joined: bool) -> None:
    """Tell the callbacks of this learner, if there is something new; all learners call this together.

    Args:
        world: of this learner.
        joined: this learner has just joined.
    """
    global _told
    if _told is None:
        world.teardown.at_shutdown(_forget)
    before = tuple(range(world.size)) if _told is None else _told
    _told = world.collectives.ranks
    if joined or _told != before:
        for callback in list(_callbacks):
            callback(_told)


def _forget() -> None:
    global _told
    _told = None
    _callbacks.clear()
