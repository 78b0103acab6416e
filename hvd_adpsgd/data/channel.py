"""Exchanges messages of a process's samplers: on a thread, and in operations over all learners that wait."""

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hvd_adpsgd.data.sharding import Sharding, View
from hvd_adpsgd.errors import LearnerFailedError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World

_TOPIC = "data"
_OPEN_S, _IDLE_S = 0.02, 0.2  # between two exchanges while a sampler is in an epoch, and else


class Channel:
    """The messages of one learner's samplers, numbered in the order in which scripts begin with them."""

    def __init__(self, world: World) -> None:
        self.pid = os.getpid()  # a forked child has no thread
        self._world, self._collectives = world, world.collectives
        self._shardings: list[Sharding] = []
        self._meetings = len(world.collectives.newcomers)
        # received messages, by number of the sampler, which may not have begun
        self._received: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        self._woken, self._ends = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True, name="hvd_adpsgd.data")

    def start(self) -> None:
        """Exchange messages until shutdown()."""
        self._collectives.talks[_TOPIC] = self.talk
        self._world.teardown.at_shutdown(self.close)
        self._thread.start()

    def open(self, size: Callable[[int], int], *of_sampler: Any) -> Sharding:
        """Return the Sharding of one more sampler; the arguments: see there."""
        world = worlds.current()
        parts = None if world.collectives.is_newcomer else world.membership.founders
        of_job = world.rank, world.groups, parts, self._woken.set
        sharding = Sharding(*of_job, size, *of_sampler)
        self._shardings.append(sharding)
        return sharding

    def close(self) -> None:
        """Report what was consumed, and end the thread."""
        for sharding in self._shardings:
            sharding.close()
        self._ends = True
        self._woken.set()
        self._thread.join()
        with contextlib.suppress(Exception):  # nobody may be there any more
            self._collectives.serve()
        self._collectives.talks.pop(_TOPIC, None)
        _channels.pop(self._collectives, None)

    def talk(self, living: set[int], heard: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Hand messages to the samplers, and return theirs, see Collectives.serve."""
        if worlds.is_initialized():  # else in shutdown()
            self._world = worlds.current()
        own = self._world.super_rank
        if not living.issuperset(self._world.groups[own]):
            what = f"a learner of super learner {own} has failed while a sampler waited for it"
            self._fail(LearnerFailedError(f"{what}. Save the model, and exit."))
        view = self._view(living)
        if view.is_anew:
            self._received.clear()
        for rank, (number, message) in heard:
            self._received[number].append((rank, message))
        out: list[tuple[int, Any]] = []
        for number, sharding in enumerate(self._shardings):
            said = sharding.talk(view, self._received.pop(number, []))
            out += [(rank, (number, message)) for rank, message in said if rank in living]
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

    def _fail(self, error: Exception) -> None:
        for sharding in self._shardings:
            sharding.error = error

    def _run(self) -> None:
        try:
            while not self._ends:
                is_open = any(sharding.is_open for sharding in self._shardings)
                self._woken.wait(_OPEN_S if is_open else _IDLE_S)
                self._woken.clear()
                self._collectives.serve()
        except Exception as error:  # raised by the samplers
            self._fail(error)


_channels: dict[Any, Channel] = {}  # by Collectives


def channel_of(world: World) -> Channel:
    """Return the Channel of this process; the first call starts it."""
    if world.collectives not in _channels:
        _channels[world.collectives] = Channel(world)
        _channels[world.collectives].start()
    return _channels[world.collectives]
