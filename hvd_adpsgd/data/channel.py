"""Exchanges messages of a process's samplers."""

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hvd_adpsgd.data.sharding import Sharding, View
from hvd_adpsgd.errors import LearnerFailedError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World

_TOPIC = "data"


class Channel:
    """The messages of one learner's samplers, numbered in the order in which scripts begin with them."""

    def __init__(self, world: World) -> None:
        self.pid = os.getpid()  # a forked child has no thread
        self._world, self._collectives = world, world.collectives
        self._shardings: list[Sharding] = []
        self._meetings = len(world.collectives.newcomers)
        # received messages, by number of the sampler, which may not have begun
        self._received: dict[int, list[tuple[int, Any, Any]]] = defaultdict(list)

    def open(self, identity: Any, size: Callable[[int], int], *of_sampler: Any) -> Sharding:
        """Return the Sharding of one more sampler, whose data `identity` names; the arguments: see there."""
        world = worlds.current()
        parts = None if world.collectives.is_newcomer else world.membership.founders
        of_job = world.rank, world.groups, parts, self._collectives.topics.wake
        sharding = Sharding(*of_job, size, *of_sampler)
        sharding.identity = identity
        self._shardings.append(sharding)
        return sharding

    @property
    def is_open(self) -> bool:
        """Whether a sampler is in an epoch."""
        return any(sharding.is_open for sharding in self._shardings)

    def close(self) -> None:
        """Report what was consumed, and exchange no more messages."""
        for sharding in self._shardings:
            sharding.close()
        self._collectives.topics.remove(_TOPIC)

    def talk(self, living: set[int], heard: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Hand messages to the samplers, and return theirs."""
        if worlds.is_initialized():  # not while shutdown() runs
            self._world = worlds.current()
        own = self._world.super_rank
        if not living.issuperset(self._world.groups[own]):
            what = f"a learner of super learner {own} has failed while a sampler waited for it"
            self.fail(LearnerFailedError(f"{what}. Save the model, and exit."))
        view = self._view(living)
        if view.is_anew:
            self._received.clear()
        for rank, (number, identity, message) in heard:
            self._received[number].append((rank, identity, message))
        out: list[tuple[int, Any]] = []
        for number, sharding in enumerate(self._shardings):
            received = self._received.pop(number, [])
            for rank, identity, _ in received:
                if identity != sharding.identity:
                    sharding.mismatch = (
                        f"sampler {number} is of {identity} on learner {rank}, of {sharding.identity} on "
                        f"learner {self._world.rank}. Make samplers in the same order, alike on all learners."
                    )
            said = sharding.talk(view, [(rank, message) for rank, _, message in received])
            mine = number, sharding.identity
            out += [(rank, (*mine, message)) for rank, message in said if rank in living]
        return out

    def _view(self, living: set[int]) -> View:
        world, new = self._world, self._collectives.newcomers[self._meetings :]
        self._meetings += len(new)
        own = frozenset({world.super_rank})
        alive, joined = (
            frozenset(i for i, group in enumerate(world.groups) if ranks.issuperset(group))
            for ranks in (living, frozenset().union(*new))
        )
        return View(world.groups, alive | own, joined - own, bool(new))

    def fail(self, error: Exception) -> None:
        """Let the samplers raise an error."""
        for sharding in self._shardings:
            sharding.error = error


def channel_of(world: World) -> Channel:
    """Return the Channel of this process; the first call makes it, until shutdown()."""
    topics = world.collectives.topics
    if _TOPIC not in topics.by_name:
        topics.by_name[_TOPIC] = Channel(world)
        world.teardown.at_shutdown(topics.by_name[_TOPIC].close)
        topics.wake()
    channel: Channel = topics.by_name[_TOPIC]
    return channel
