"""Callbacks of the script on changes of the job's learners."""

from collections.abc import Callable
from typing import TypeVar

from hvd_adpsgd.launch.world import World

Callback = TypeVar("Callback", bound=Callable[[tuple[int, ...]], object])

_callbacks: list[Callable[[tuple[int, ...]], object]] = []
_last_ranks: tuple[int, ...] | None = None  # at the last hvd.admit; None before the first call


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


def are_registered() -> bool:
    """Whether the script has registered a callback."""
    return bool(_callbacks)


def call_if_changed(world: World, joined: bool) -> None:
    """Call this learner's callbacks if the learners of the job have changed; all learners call this together.

    Args:
        world: the World of this learner.
        joined: whether this learner has just joined.
    """
    global _last_ranks
    before = tuple(range(world.size)) if _last_ranks is None else _last_ranks
    _last_ranks = world.collectives.ranks
    if joined or _last_ranks != before:
        for callback in list(_callbacks):
            callback(_last_ranks)


def forget() -> None:
    """Forget all callbacks: another init() begins another job."""
    global _last_ranks
    _last_ranks = None
    _callbacks.clear()
