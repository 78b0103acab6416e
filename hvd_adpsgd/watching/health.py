"""Which super learners are hung or slow, by their reports: one definition, for alerts and tables."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from hvd_adpsgd.watching.reports import Report

SLOW = 0.5  # a super learner is slow if its speed is below this share of the median speed
HUNG_S = 40.0  # least time without a step after which a super learner is hung
START_S = 300.0  # counts as the longest pause before the first step, in which programs are compiled
MOVING_S = 10.0  # a super learner that has made a step within this time makes steps
_TIMES = 2.0  # hung after so many times the longest pause that the run has survived


def aged(report: Report, age_s: float, late_s: float) -> Report:
    """Return a report that was received `age_s` ago, as of now: with later ones missing no step is known.

    A trainer that hangs inside C code, or in its GPU, can keep its process from reporting.
    """
    return replace(report, idle_s=report.idle_s + age_s) if age_s > late_s else report


def late_after_s(every_s: float, super_size: int) -> float:
    """Return the age from which on a report counts as old, because a later one should be known.

    Reports spread by gossip, at most 16 in a message, of which a leader gets one per `every_s` on average.
    """
    return every_s * (20 + super_size / 4)


def hung_after_s(reports: Mapping[int, Report]) -> dict[int, float]:
    """Return the hung super learners of `reports` (by super_rank), each with its bound in seconds.

    Hung is a super learner that has made no step for longer than its bound, while others make steps or wait
    in a global collective. The bound is 40 s, or twice the longest pause of the last hour, if that is longer:
    of the super learner itself, and the median of those that make steps. So long steps, evaluations and
    checkpoints count as hung at most once.
    """
    hung = {}
    for i, report in reports.items():
        moving = [r for j, r in reports.items() if j != i and r.idle_s < MOVING_S]
        if not moving:
            continue
        theirs = statistics.median_low([r.longest_idle_s for r in moving])
        bound_s = max(HUNG_S, _TIMES * max(report.longest_idle_s, theirs))
        if report.idle_s >= bound_s:
            hung[i] = bound_s
    return hung


def median_speed(reports: Mapping[int, Report]) -> float:
    """Return the median of steps/s of the super learners that make steps; 0 with fewer than two of them."""
    speeds = list(_speeds(reports).values())
    return statistics.median(speeds) if len(speeds) > 1 else 0.0


def slow(reports: Mapping[int, Report]) -> set[int]:
    """Return the super learners of `reports` (by super_rank) that make steps, but slowly."""
    bound = SLOW * median_speed(reports)
    return {i for i, speed in _speeds(reports).items() if speed < bound}


def _speeds(reports: Mapping[int, Report]) -> dict[int, float]:
    """Return steps/s of the super learners that have made steps lately."""
    return {i: r.steps_per_s for i, r in reports.items() if 0 < r.steps_per_s < math.inf}
