"""How often a step copies a chunk without a correction from the parameters to the engine (mirror)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.config import Config
from hvd_adpsgd.strategies.plan import Plan

# Sets to 1 the bytes, one for each chunk, of the chunks that an exchange will move next.
Mark = Callable[[NDArray[np.uint8]], None]

LONGEST = 8  # steps from one copy of a chunk to the next, at most (docs/log/0132-turns.md)
LOOKS = 8  # and from one look whether it is finite to the next; a multiple of LONGEST
LARGEST_SHARE = 0.25  # of the model: if exchanges move more, each step copies all


class Moves(NamedTuple):
    """What exchanges move.

    Attributes:
        share: share of the model in an exchange.
        rate: exchanges per step for which the engine asks; it answers about as many.
    """

    share: float
    rate: float


def leaves_out(plan: Plan, config: Config) -> bool:
    """Whether steps may leave out chunks when they copy the model.

    Args:
        plan: a strategy's plan. In rounds, models are averaged as they are after the step.
        config: the options.
    """
    gossips = plan.in_step is None and plan.rule is None
    return gossips and not config.bounds_staleness and config.first_share <= LARGEST_SHARE


def steps_between_copies(moves: Moves, chunks: int) -> int:
    """Return the steps between two copies of a chunk, a power of 2 up to LONGEST: at most two exchanges'."""
    per_step = 2 * moves.rate * max(moves.share, 1 / max(1, chunks))
    steps = min(LONGEST, 1 / per_step) if per_step > 0 else LONGEST
    return 1 << int(math.log2(steps)) if steps > 1 else 1


def marked(mark: Mark | None, chunks: int) -> NDArray[np.uint8]:
    """Return for each chunk whether an exchange will move it next: 1 or 0; zeros without a `mark`."""
    marks = np.zeros(chunks, np.uint8)
    if mark is not None and chunks:
        mark(marks)
    return marks
