"""The time of training steps by part: counters, this learner's timeline file, marks for torch's profiler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.metrics import EVENT_NAMES, PARTS
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.consistency import unanimous
from hvd_adpsgd.watching.trace import Timeline, learner_path

_shared_timeline: Timeline | None = None


class Counters:
    """Where the trainer's time goes: seconds by part of a step, sums and moving averages.

    The parts are those of `PARTS`; the rest of a step is the user's forward and backward. Time counts
    from the first `end_step`, without set-up and the first, slow step.

    Args:
        clock: returns seconds, like time.monotonic.
        decay: factor in [0, 1) by which the weight of a past step in the moving averages shrinks per step.
    """

    def __init__(self, clock: Callable[[], float], decay: float = 0.98) -> None:
        self.clock = clock
        self.decay = decay
        self.steps = 0
        self.seconds = 0.0
        self.sums = dict.fromkeys(PARTS, 0.0)
        self.averages = dict.fromkeys((*PARTS, "step"), math.nan)
        self._this_step = dict.fromkeys(PARTS, 0.0)
        self._last_end: float | None = None

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to one part of the current step."""
        self._this_step[part] += seconds

    def end_step(self) -> None:
        """End the current step: update sums and moving averages, and begin the next step."""
        now = self.clock()
        passed = {**self._this_step}
        if self._last_end is not None:
            passed["step"] = now - self._last_end
            self.seconds += now - self._last_end
        self._last_end = now
        self.steps += 1
        for name, seconds in passed.items():
            old = self.averages[name]
            self.averages[name] = (
                seconds if math.isnan(old) else old + (1 - self.decay) * (seconds - old)
            )
        for part, seconds in self._this_step.items():
            self.sums[part] += seconds
            self._this_step[part] = 0.0

    @property
    def steps_per_s(self) -> float:
        """Steps per second over all steps but the first; NaN before the second step."""
        return (self.steps - 1) / self.seconds if self.seconds > 0 else math.nan

    def to_dict(self) -> dict[str, float]:
        """Return all counters in a dict: steps, seconds, steps_per_s, step_ema_s, <part>_s, <part>_ema_s."""
        numbers: dict[str, float] = {
            "steps": self.steps,
            "seconds": self.seconds,
            "steps_per_s": self.steps_per_s,
            "step_ema_s": self.averages["step"],
        }
        for part in PARTS:
            numbers[f"{part}_s"] = self.sums[part]
            numbers[f"{part}_ema_s"] = self.averages[part]
        return numbers


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

    def end_step(self, engine: Engine) -> None:
        """Count the step that has ended, and write the engine's new events into the timeline."""
        self.counters.end_step()
        if self.timeline is not None:
            self.events(engine)
        if usage.tally.callers:
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

    def __enter__(self) -> None:
        # record_function takes microseconds also when no profiler runs on this thread
        self._mark = None
        if torch.autograd._profiler_enabled():
            self._mark = record_function(f"hvd_adpsgd.{self._name}")
            self._mark.__enter__()
        self._began = time.monotonic()

    def __exit__(self, *error: Any) -> None:
        ended = time.monotonic()
        if self._mark is not None:
            self._mark.__exit__(*error)
        record = self._record
        record.counters.add(self._name, ended - self._began)
        if record.timeline is not None:
            record.timeline.complete(self._name, "trainer", self._began, ended, step=self._step)


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
