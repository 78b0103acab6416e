"""Computes reports from the counters of a leader: rates and shares of time over the last 10 seconds."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_adpsgd.engine.metrics import consensus_distance
from hvd_adpsgd.watching.health import MOVING_S, START_S
from hvd_adpsgd.watching.reports import PARTS, Report

WINDOW_S = 10.0
_REMEMBERED_S = 3600.0


@dataclass(frozen=True)
class Sample:
    """The counters of a leader at one moment; `step`, `parts_s` and `engine` never decrease.

    Attributes:
        monotonic_s: the moment, on the clock time.monotonic.
        step: number of steps so far.
        parts_s: seconds so far by part of the step, and in operations over all learners.
        engine: the engine's counters (loop.Loop.counters); None without an engine.
        values: fields of Report that are known now.
        steps: number of steps of all optimizers together.
        waits: whether the trainer waits for other super learners, is in a pause that it has asked for, or has
            no optimizer whose steps are counted.
    """

    monotonic_s: float
    step: int
    parts_s: Mapping[str, float]
    engine: Mapping[str, Any] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    waits: bool = False


class Sampler:
    """Makes a report from each sample of the counters and the earlier ones.

    Args:
        super_size: number of super learners.
    """

    def __init__(self, super_size: int):
        self._n = super_size
        self._samples: deque[Sample] = deque()
        self._distance = math.nan
        # number of exchanges, and the time and the step at which that number was first seen
        self._exchanged: tuple[int, float, int] | None = None
        self._idle = _Idle()

    def grow(self, super_size: int) -> None:
        """Set the number of super learners, of which some have joined."""
        self._n = super_size

    def report(self, sample: Sample, time_s: float) -> Report:
        """Return the report for a sample of the counters; `time_s` is the unix time of the sample."""
        samples, idle = self._samples, self._idle
        idle.take(sample)
        if samples and _is_anew(samples[-1], sample):
            samples.clear()
            self._exchanged = None
        samples.append(sample)
        while len(samples) > 2 and samples[1].monotonic_s <= sample.monotonic_s - WINDOW_S:
            samples.popleft()
        first = samples[0]
        seconds = sample.monotonic_s - first.monotonic_s
        shares: dict[str, Any] = {
            part: _rate(sample.parts_s.get(part, 0.0) - first.parts_s.get(part, 0.0), seconds, 0.0)
            for part in PARTS
        }
        return Report(
            time_s=time_s,
            step=sample.step,
            steps_per_s=_rate(sample.step - first.step, seconds),
            idle_s=sample.monotonic_s - idle.since_s,
            longest_idle_s=idle.longest_s(),
            **sample.values,
            **shares,
            **self._of_engine(first, sample, seconds),
        )

    def _of_engine(self, first: Sample, last: Sample, seconds: float) -> dict[str, Any]:
        if first.engine is None or last.engine is None:
            return {}
        old, new = first.engine, last.engine
        exchanges = _exchanges(new)
        if self._exchanged is None or self._exchanged[0] != exchanges:
            self._exchanged = exchanges, last.monotonic_s, last.step
        _, when, step = self._exchanged
        distance = consensus_distance(old, new, self._n)
        self._distance = self._distance if math.isnan(distance) else distance
        lately = np.array(new["staleness"]) - np.array(old["staleness"])
        return {
            "exchanges": exchanges,
            "exchanges_per_s": _rate(exchanges - _exchanges(old), seconds),
            "sent_per_s": _rate(new["bytes_sent"] - old["bytes_sent"], seconds),
            "apart_s": last.monotonic_s - when,
            "apart_steps": last.step - step,
            "staleness_p50": _percentile(lately, 0.5),
            "staleness_p95": _percentile(lately, 0.95),
            "distance": self._distance,
        }


class _Idle:
    """The time that a trainer spends without a step, from its samples.

    Attributes:
        since_s: when the trainer last made a step, or waited, as far as its samples tell.
    """

    def __init__(self) -> None:
        self.since_s = 0.0
        self._last: tuple[int, float] | None = None  # steps, seconds in global collectives
        self._has_stepped = False
        # pauses that ended with a step, in the last hour: (when, seconds)
        self._pauses: deque[tuple[float, float]] = deque()

    def take(self, sample: Sample) -> None:
        now_s = sample.monotonic_s
        made = sample.steps, sample.parts_s.get("global_operations", 0.0)
        if self._last is None or sample.waits or made != self._last:
            has_stepped = self._last is not None and made[0] != self._last[0]
            if has_stepped and self._has_stepped and now_s - self.since_s > MOVING_S:
                self._pauses.append((now_s, now_s - self.since_s))
            self._has_stepped = self._has_stepped or has_stepped
            self.since_s = now_s
        self._last = made
        while self._pauses and self._pauses[0][0] < now_s - _REMEMBERED_S:
            self._pauses.popleft()

    def longest_s(self) -> float:
        """Return the longest pause in the last hour; before the first step START_S."""
        if not self._has_stepped:
            return START_S
        return max((seconds for _, seconds in self._pauses), default=0.0)


def _is_anew(before: Sample, now: Sample) -> bool:
    """Whether counters restart: an engine or optimizer began, ended or was replaced between two samples."""
    if before.engine is None or now.engine is None:
        return before.engine is not now.engine or now.step < before.step
    return now.step < before.step or _exchanges(now.engine) < _exchanges(before.engine)


def _exchanges(counters: Mapping[str, Any]) -> int:
    return int(counters["exchanges_active"] + counters["exchanges_passive"] + counters["means"])


def _rate(count: float, seconds: float, without: float = math.nan) -> float:
    return count / seconds if seconds > 0 else without


def _percentile(histogram: Sequence[int] | np.ndarray, share: float) -> int:
    """Return the percentile `share` of a histogram over 0, 1, 2, ...; 0 if the histogram is empty."""
    sums = np.cumsum(histogram)
    if not len(sums) or sums[-1] <= 0:
        return 0
    return int(np.searchsorted(sums, share * sums[-1]))
