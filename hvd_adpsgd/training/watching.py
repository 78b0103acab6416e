"""What is watched of training: the counters of the averaging that runs, and the thread that reports them."""

import functools
import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.consistency import unanimous
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.reports import bits_of, share_of
from hvd_adpsgd.watching.sampler import Sample
from hvd_adpsgd.watching.scalars import logged
from hvd_adpsgd.watching.watcher import Watcher

_LEFT_OUT = 8  # exchanges in a row that leave out a chunk, before the chunk is reported
_running: list[Watcher] = []


def start(world: World) -> None:
    """Monitor the run until shutdown, unless option report_s is 0. All learners call this together.

    Raises:
        ConfigError: if the record cannot be written, or for a bad address of the metrics.
        MissingRequirementError: if prometheus_client is not installed.
    """
    if world.config.report_s <= 0:
        return
    may_raise = world.config.record is not None or world.config.metrics_address is not None
    if not may_raise or world.collectives.joining:
        watcher = _made(world)
    else:  # if one learner raised alone, the others would wait for it
        watcher = unanimous(world, "record", lambda: _made(world))
    if watcher is not None:
        _running.append(watcher)
        watcher.start()
        world.teardown.at_shutdown(lambda: _stop(watcher))
        world.departure.at_leave(watcher.note_leaving)


def running() -> list[Watcher]:
    """Return the watchers of this process: one on a leader, none on other learners."""
    return list(_running)


def _made(world: World) -> Watcher | None:
    if not world.is_leader:
        return None
    source = Source()
    watcher = Watcher(world, source.observe)
    source.at_stop = watcher.look
    return watcher


def _stop(watcher: Watcher) -> None:
    _running.remove(watcher)
    watcher.stop()


class Source:
    """Observes the averaging of the first optimizer, or none before the first one is wrapped.

    Attributes:
        at_stop: called with the observed averaging when it stops.
    """

    def __init__(self) -> None:
        self.at_stop: Callable[[Averaging], object] = lambda averaging: None
        # returns the averaging that is reported on, None once it has stopped; None before the first one
        self._watched: Callable[[], Averaging | None] | None = None

    def observe(self, stopping: Averaging | None) -> tuple[Sample, Any] | None:
        """Return counters and engine of the averaging; None once it has stopped and no other one runs.

        Args:
            stopping: an averaging that stops next, which is observed for the last time.
        """
        # also of an optimizer that was dropped, until its averaging stops: peers take silence for a hang
        watched = self._watched() if self._watched is not None else None
        running = live() or [one for one in live(also_stopping=True) if one is watched]
        averaging = stopping or next(iter(running), None)
        if averaging is None:  # after the last report of the watched one, nothing is reported
            return None if self._watched is not None else (_sample(None, None), None)
        if stopping is not None and stopping is not watched:
            return None  # another one is watched by now
        if stopping is not None:  # its engine ends next: nothing may read it from now on
            self._watched = lambda: None
        elif averaging is not watched:
            self._watched = weakref.ref(averaging)
            averaging.at_stop.append(functools.partial(self.at_stop, averaging))
        return _sample(averaging, averaging.engine.counters()), averaging.engine


def _sample(averaging: Averaging | None, counters: Mapping[str, Any] | None) -> Sample:
    """Return the counters of an Averaging, or of a script without wrapped optimizer, and logged scalars."""
    parts = {"global_operations": usage.totals()["global_operations_s"]}
    if averaging is None:  # nothing counts steps, but the script may log a scalar named "step"
        scalars = logged()
        step = scalars.get("step", 0.0)
        counted = int(step) if math.isfinite(step) else 0
        return Sample(time.monotonic(), counted, parts, None, {"scalars": scalars}, waits=True)
    rounds = averaging.plan.in_step
    return Sample(
        monotonic_s=time.monotonic(),
        step=averaging.step,
        parts_s={**averaging.record.counters.sums, **parts},
        engine=counters,
        values={
            "due_steps": rounds.period if rounds else 1 / averaging.spec.config.exchanges_per_step,
            "left_out": len(averaging.engine.memory.own.store.left_out(_LEFT_OUT)),
            "nonfinite_steps": averaging.nonfinite_steps,
            "share": share_of(averaging),
            "bits": bits_of(averaging),
            "scalars": logged(),
        },
        steps=sum(one.step for one in live()),
        waits=usage.is_waiting() or any(map(_rests, live() or [averaging])),
    )


def _rests(averaging: Averaging) -> bool:
    """Whether a trainer makes no step as it waits for others, asked for a pause, or dropped the optimizer."""
    is_away = averaging.super_learner.mates.is_away  # it is in join(), its local peers make steps
    asked = averaging.pauses or averaging.holds_mean or averaging.stopped
    return bool(asked or averaging.waits_for_peers or is_away)
