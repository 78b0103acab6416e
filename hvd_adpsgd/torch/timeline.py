"""Where the time of steps goes: counters, and the timeline that all learners of a job write together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.metrics import Counters, Timeline
from hvd_adpsgd.runtime.world import World
from hvd_adpsgd.torch.consistency import unanimous

__all__ = ["StepRecord"]

_EVENT_NAMES = ("exchange (asked)", "exchange (answered)", "merge", "parked", "mean of all")
_shared_timeline: Timeline | None = None


class StepRecord:
    """Where the time of one optimizer's steps goes. Made by all learners together.

    Args:
        world: the worlds of this learner.
    """

    def __init__(self, world: World):
        self.counters = Counters(time.monotonic)
        self.timeline = _open_timeline(world)

    @contextlib.contextmanager
    def part(self, name: str, step: int) -> Iterator[None]:
        """Count the time of the block as this part of the step."""
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self.counters.add(name, ended - began)
            if self.timeline is not None:
                self.timeline.complete(name, "trainer", began, ended, step=step)

    def end_step(self, engine: Engine) -> None:
        """The step is done; what the engine did goes into the timeline."""
        self.counters.end_step()
        self.events(engine)

    def events(self, engine: Engine) -> None:
        """Put what the engine did into the timeline."""
        if self.timeline is None:
            return
        for kind, peer, began, ended, nbytes, step in engine.take_events():
            self.timeline.complete(
                _EVENT_NAMES[kind], "engine", began, ended, peer=peer, bytes=nbytes, step=step
            )


def _open_timeline(world: World) -> Timeline | None:
    """The timeline of HVD_ADPSGD_TIMELINE, opened once per job; None without it."""
    global _shared_timeline
    path = world.config.timeline
    if path is None or _shared_timeline is not None:
        return _shared_timeline
    offset = time.time() - time.monotonic()  # hosts share the wall clock only
    starts = world.collectives.gather("timeline", time.time())
    label = f"learner {world.rank} (super learner {world.super_rank}, {world.hostname})"

    def open_it(create: bool) -> Timeline:
        return Timeline(
            path,
            rank=world.rank,
            origin_s=starts[0] - offset,
            create=create,
            label=label,
        )

    first = world.rank == 0
    created = unanimous(world, "timeline", lambda: open_it(True) if first else None)
    _shared_timeline = unanimous(world, "timeline", lambda: created or open_it(False))
    world.teardown.at_shutdown(_close_timeline)
    return _shared_timeline


def _close_timeline() -> None:
    global _shared_timeline
    timeline, _shared_timeline = _shared_timeline, None
    if timeline is not None:
        timeline.close()
