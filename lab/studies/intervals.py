"""Means over seeds, with a 95 % interval by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# 97.5 % quantiles of Student's t, by degrees of freedom
QUANTILES = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of up to ten values, and half of its 95 % interval: nan without values, inf for one."""
    if len(values) < 2:
        return statistics.mean(values or [math.nan]), math.inf
    half = QUANTILES[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half
