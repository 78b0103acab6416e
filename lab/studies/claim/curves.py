"""Loss curves of runs: what is read from them, and whether a goal is reached."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# 97.5 % quantiles of Student's t, by degrees of freedom
QUANTILES = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Point(NamedTuple):
    """Held-out loss of the mean model after a time and a number of samples of all learners."""

    seconds: float
    samples: float
    loss: float


def last_until(curve: Sequence[Point], seconds: float) -> Point | None:
    """Return the last point up to a time, with a tolerance of 2 %; None without one."""
    reached = [point for point in curve if point.seconds <= 1.02 * seconds]
    return reached[-1] if reached else None


def time_to(curve: Sequence[Point], loss: float) -> float | None:
    """Return the seconds after which a curve first has a loss, None if it never has.

    Between two points the loss is taken as linear in the logarithm of time. If the first point has it, the
    time of that point is returned, which is an upper bound.
    """
    for place, point in enumerate(curve):
        if point.loss <= loss:
            before = curve[place - 1] if place else point
            return _between(before.loss, point.loss, loss, before.seconds, point.seconds)
    return None


def at_samples(curve: Sequence[Point], samples: float) -> float | None:
    """Return the loss of a curve after a number of samples, None if it does not contain that number.

    Between two points the loss is taken as linear in the logarithm of samples.
    """
    known = [point for point in curve if point.samples > 0]
    for before, after in itertools.pairwise(known):
        if before.samples <= samples <= after.samples:
            if before.samples == after.samples:
                return after.loss
            part = math.log(samples / before.samples) / math.log(after.samples / before.samples)
            return before.loss + part * (after.loss - before.loss)
    return None


def _between(x0: float, x1: float, x: float, y0: float, y1: float) -> float:
    """Return y at x on the line through (x0, log y0) and (x1, log y1)."""
    if x0 == x1:
        return y1
    part = (x - x0) / (x1 - x0)
    return math.exp(math.log(y0) + part * (math.log(y1) - math.log(y0)))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of up to ten values, and half of its 95 % interval: nan without values, inf for one."""
    if len(values) < 2:
        return statistics.mean(values or [math.nan]), math.inf
    half = QUANTILES[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def told(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean of values over seeds, with a 95 % interval if there are several; or ''."""
    if not values:
        return ""
    mean, half = mean_interval(values)
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")
