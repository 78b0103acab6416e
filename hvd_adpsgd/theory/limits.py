"""Expected speed of a run: throughput with a straggler, and the cost of averaging.

Closed forms in float64, for comparison with a measurement; nothing here runs inside training.
"""

from __future__ import annotations

import math

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.theory.topology import require_size

__all__ = ["allreduce_share", "averaging_speedup", "straggler_throughput"]


def straggler_throughput(n: int, slowdown: float, waits: bool = False) -> float:
    """Gradients per unit of time of n super learners, of which one is s times slower and all others make 1.

    n - 1 + 1/s if no super learner waits for another one; n / s if all wait for all.

    Args:
        n: number of super learners.
        slowdown: s >= 1, how many times slower the straggler is; may be infinite (it stopped).
        waits: whether super learners wait for each other.

    Raises:
        TopologyError: if n < 1 or s < 1.

    Source: ideal model of the straggler experiments of AD-PSGD, arXiv:1710.06952.
    """
    require_size(n)
    if not slowdown >= 1:
        raise TopologyError(
            f"no such straggler: got slowdown = {slowdown}, needed is >= 1. "
            "Pass how many times slower the super learner is."
        )
    return n / slowdown if waits else n - 1 + 1 / slowdown


def averaging_speedup(n: int, period: int, step_s: float, allreduce_s: float) -> float:
    """How many times faster n learners process the data if they average every `period` steps.

    S(n) = n K t / (K t + t_allreduce(n)).

    Args:
        n: number of learners.
        period: K >= 1, local steps between two averages.
        step_s: t > 0, seconds of a local step.
        allreduce_s: seconds of one average over n learners, >= 0.

    Raises:
        TopologyError: if n < 1.
        ConfigError: if an argument is out of its range.

    Source: the model behind the speed-ups of Su and Chen, arXiv:1507.01239, who give no such formula.
    """
    require_size(n)
    if not (period >= 1 and 0 < step_s < math.inf and 0 <= allreduce_s < math.inf):
        raise ConfigError(
            f"bad argument: averaging_speedup got period = {period}, step_s = {step_s}, allreduce_s = "
            f"{allreduce_s}, allowed is period >= 1, step_s > 0, allreduce_s >= 0, all finite. Pass "
            "measured seconds."
        )
    return n * period * step_s / (period * step_s + allreduce_s)


def allreduce_share(n: int, speedup: float) -> float:
    """The cost of averaging that a measured speed-up implies: t_allreduce / (K t) = n/S - 1.

    Args:
        n: number of learners.
        speedup: S in (0, n].

    Raises:
        TopologyError: if n < 1.
        ConfigError: if the speed-up is not in (0, n].

    Source: `averaging_speedup`, solved for the all-reduce.
    """
    require_size(n)
    if not 0 < speedup <= n:
        raise ConfigError(
            f"bad argument: allreduce_share got speedup = {speedup} of n = {n}, allowed is > 0 and <= n. "
            "A speed-up above n has another cause than this model knows."
        )
    return n / speedup - 1
