"""Gossip on a ring, fixed or permuted anew for each round: ADPSGD with left and right neighbour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvd_adpsgd.strategies.plan import NOBODY, Plan, Strategy
from hvd_adpsgd.strategies.validation import preference, seed
from hvd_adpsgd.theory import topology

RANDOM_RING_ROUNDS = 1024


@dataclass(frozen=True)
class FixedRing(Strategy):
    """Gossip with the left and right neighbour on the ring 0, 1, ..., n-1 of super learners, weight 1/3 each.

    A ring of two has a single edge and takes weight 1/2: the pair's mean. With n = 3 a lock-step
    round is the exact mean of all.

    Source: Zhang et al., arXiv:1907.05701, arXiv:2002.01119 (fixed local averaging).
    """

    name: ClassVar[str] = "fixed_ring"
    is_gossip: ClassVar[bool] = True

    def pair_weight(self, n: int) -> float:
        """Return 1/3, or 1/2 for the single edge of a ring of two."""
        return 1 / 2 if n == 2 else 1 / 3

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        row = topology.ring_neighbours(super_size, super_rank)
        return Plan(np.array([row], dtype=np.int32), self.pair_weight(super_size))

    def round_peers(self, n: int, i: int, round: int) -> tuple[int, int]:
        """The peer that i asks, its right neighbour on the ring, and the peer that asks i, its left one."""
        return _asked_and_asker(topology.ring_neighbours(n, i), i)


@dataclass(frozen=True)
class RandomRing(Strategy):
    """Gossip with the two neighbours on a ring that is permuted anew for each round, weight 1/3 each.

    All super learners draw the permutation of row r from (seed, r), so that i is a neighbour of its
    neighbours; the table repeats after 1024 rows. Two super learners take weight 1/2, as on the fixed ring.

    Args:
        seed: 0 <= seed < 2**32, the same on every learner.
        prefer_fast: probability, 0 to 0.95, of asking the fastest of three peers that are drawn, by the pace
            of earlier exchanges, in place of the next one; for unequal links.

    Raises:
        ConfigError: if the seed or prefer_fast is out of range.

    Source: Zhang et al., arXiv:2002.01119, arXiv:2110.11199 (randomised local averaging, to
        enlarge the spectral gap).
    """

    seed: int = seed()
    prefer_fast: float = preference()
    name: ClassVar[str] = "random_ring"
    is_gossip: ClassVar[bool] = True

    def pair_weight(self, n: int) -> float:
        """Return 1/3, or 1/2 for two super learners, as FixedRing."""
        return FixedRing().pair_weight(n)

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        rows = [
            topology.permuted_ring_neighbours(super_size, super_rank, self.seed, round)
            for round in range(RANDOM_RING_ROUNDS)
        ]
        table = np.array(rows, dtype=np.int32)
        return Plan(table, self.pair_weight(super_size), prefer_fast=self.prefer_fast)

    def round_peers(self, n: int, i: int, round: int) -> tuple[int, int]:
        """The peer that i asks, its right neighbour on the round's ring, and the left one, which asks i."""
        return _asked_and_asker(topology.permuted_ring_neighbours(n, i, self.seed, round), i)


def _asked_and_asker(neighbours: tuple[int, ...], i: int) -> tuple[int, int]:
    """Return (right, left) of i's `neighbours` (left, right); on a ring of two the lower rank asks."""
    if len(neighbours) == 2:
        return neighbours[1], neighbours[0]
    if not neighbours:
        return NOBODY, NOBODY
    (other,) = neighbours
    return (other, NOBODY) if i < other else (NOBODY, other)
