"""The timeline that all learners of a job write together."""

from __future__ import annotations

import time

from hvd_adpsgd.engine.metrics import Timeline
from hvd_adpsgd.runtime.collectives import allgather_object
from hvd_adpsgd.runtime.world import World
from hvd_adpsgd.torch.consistency import unanimous

__all__ = ["open_timeline"]

_shared_timeline: Timeline | None = None


def open_timeline(world: World) -> Timeline | None:
    """The timeline of HVD_ADPSGD_TIMELINE, opened once per job; None without it."""
    global _shared_timeline
    path = world.config.timeline
    if path is None or _shared_timeline is not None:
        return _shared_timeline
    offset = time.time() - time.monotonic()  # hosts share the wall clock only
    starts = world.collectives.run("timeline", lambda comm: allgather_object(comm, time.time()))
    label = f"learner {world.rank} (super learner {world.super_rank}, {world.hostname})"

    def open_it(create: bool) -> Timeline:
        return Timeline(
            path,
            rank=world.rank,
            clock=time.monotonic,
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
