"""The time of training steps by part: counters, this learner's timeline file, marks for torch's profiler."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.metrics import EVENT_NAMES, Counters
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.consistency import unanimous
from hvd_adpsgd.watching.trace import Timeline, learner_path

_shared_timeline: Timeline | None = None
_NO_MARK: AbstractContextManager[Any] = contextlib.nullcontext()


def mark(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows its block to torch's profiler as hvd_adpsgd.NAME.

    record_function takes microseconds also when no profiler runs on this thread; then it is left out.
    """
    if not torch.autograd._profiler_enabled():
        return _NO_MARK
    return record_function(f"hvd_adpsgd.{name}")


class StepRecord:
    """Counters and timeline entries for the parts of one optimizer's steps. Made by all learners together.

    Args:
        world: the World of this learner.
    """

    def __init__(self, world: World):
        self._world = world
        self.counters = Counters(time.monotonic)
        self.timeline = _open_timeline(world)

    def part(self, name: str, step: int) -> AbstractContextManager[None]:
        """Return a context manager that counts the time of its block as part `name` of step number `step`."""
        return _Part(self, name, step)

    def count(self, name: str, step: int, began: float) -> None:
        """Count the time since `began` as part `name` of step number `step`."""
        ended = time.monotonic()
        self.counters.add(name, ended - began)
        if self.timeline is not None:
            self.timeline.complete(name, "trainer", began, ended, step=step)

    def end_step(self, engine: Engine) -> None:
        """Count the step that has ended, and write the engine's new events into the timeline."""
        self.counters.end_step()
        self.events(engine)
        usage.end_step(self._world.rank == self._world.collectives.ranks[0])

    def events(self, engine: Engine) -> None:
        """Write the engine's events since the last call into the timeline."""
        if self.timeline is None:
            return
        for kind, peer, began, ended, nbytes, step in engine.take_events():
            self.timeline.complete(
                EVENT_NAMES[kind], "engine", began, ended, peer=peer, bytes=nbytes, step=step
            )


class _Part:
    """The block of StepRecord.part: no generator, which takes three more calls in each of them."""

    __slots__ = ("_began", "_mark", "_name", "_record", "_step")

    def __init__(self, record: StepRecord, name: str, step: int):
        self._record, self._name, self._step = record, name, step
        self._mark = mark(name)

    def __enter__(self) -> None:
        self._began = time.monotonic()
        self._mark.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mark.__exit__(*error)
        self._record.count(self._name, self._step, self._began)


def _open_timeline(world: World) -> Timeline | None:
    """Return this learner's file of HVD_ADPSGD_TIMELINE, opened once per job; None if not set."""
    global _shared_timeline
    path = world.config.timeline
    if path is None or _shared_timeline is not None:
        return _shared_timeline
    unix_s = time.time() - time.monotonic()  # only the wall clock is comparable between hosts
    joining = world.collectives.joining
    label = f"learner {world.rank} (super learner {world.super_rank}, {world.hostname})"

    def open_it() -> Timeline:
        return Timeline(
            learner_path(path, world.rank),
            rank=world.rank,
            zero_s=unix_s,
            label=label,
            # a joining learner appends to the file of the failed learner of its rank
            continues=joining,
        )

    _shared_timeline = unanimous(world, "timeline", open_it)
    world.teardown.at_shutdown(_close_timeline)
    world.departure.at_leave(_shared_timeline.flush)
    return _shared_timeline


def _close_timeline() -> None:
    global _shared_timeline
    timeline, _shared_timeline = _shared_timeline, None
    if timeline is not None:
        timeline.close()
