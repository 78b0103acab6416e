"""Unequal links of a simulated cluster: pairs of super learners between which chunks take longer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slowness = npt.NDArray[np.float64]


def of_pairs(n: int, share: float, factor: float, seed: int) -> Slowness:
    """Return how many times as long chunks take between super learners: `factor` for a share of the pairs.

    Args:
        n: number of super learners.
        share: of the pairs, which are drawn from `seed`; both directions of a pair are alike.
        factor: how many times as long as on the other links, >= 1.
        seed: of the draw.

    Returns:
        Shape (n, n), symmetric.
    """
    slowness = np.ones((n, n))
    pairs = np.column_stack(np.triu_indices(n, 1))
    drawn = np.random.default_rng(seed).permutation(len(pairs))[: round(share * len(pairs))]
    for i, j in pairs[drawn]:
        slowness[i, j] = slowness[j, i] = factor
    return slowness


def of_racks(n: int, racks: int, factor: float) -> Slowness:
    """Return how many times as long chunks take between super learners: `factor` between racks.

    Racks have super learners with consecutive numbers, and equally many or one less.
    """
    rack = np.arange(n) * racks // n
    return np.where(rack[:, None] == rack, 1.0, factor)


def of_ring(slowness: Slowness) -> float:
    """Return the slowness of a ring all-reduce in the order of ranks: that of its slowest link."""
    n = len(slowness)
    return max(float(slowness[i, (i + 1) % n]) for i in range(n))
