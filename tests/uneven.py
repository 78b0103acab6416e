"""Jobs with one slow learner against the ideal of their own run."""

from collections.abc import Iterable, Mapping
from typing import Any


def time_over_ideal(learners: Iterable[Mapping[str, Any]]) -> float:
    """Return a job's time, with its means and checkpoints, over that of all its steps at the summed speeds.

    Each learner says `step_s`, the times of its steps from forward to the end of optimizer.step, and `span`,
    when its training began and ended. A busy machine slows down both.
    """
    steps = [facts["step_s"] for facts in learners]
    ideal = sum(map(len, steps)) / sum(len(step_s) / sum(step_s) for step_s in steps)
    begins, ends = zip(*(facts["span"] for facts in learners), strict=True)
    ratio: float = (max(ends) - min(begins)) / ideal
    print(f"time over ideal: {ratio:.3f}")
    return ratio
