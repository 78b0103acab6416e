"""Random pairs: AD-PSGD on the complete graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvd_adpsgd.strategies.plan import NOBODY, Plan, Strategy
from hvd_adpsgd.strategies.validation import preference, seed
from hvd_adpsgd.theory import topology

RANDOM_PAIRS_ROUNDS = 4096


@dataclass(frozen=True)
class RandomPairs(Strategy):
    """Gossip: each super learner asks one uniformly random peer at a time, and both take the pair's mean.

    Each super learner has its own table of peers to ask, drawn from (seed, outer rank). A lock-step round is
    a random perfect matching, drawn from (seed, round); with n odd one super learner has no peer in it.

    Args:
        seed: 0 <= seed < 2**32, the same on every learner.
        prefer_fast: probability, 0 to 0.95, of asking the fastest of three peers that are drawn, by the pace
            of earlier exchanges, in place of the next one; for unequal links.

    Raises:
        ConfigError: if the seed or prefer_fast is out of range.

    Source: Lian et al., AD-PSGD, arXiv:1710.06952.
    """

    seed: int = seed()
    prefer_fast: float = preference()
    name: ClassVar[str] = "random_pairs"
    is_gossip: ClassVar[bool] = True

    def pair_weight(self, n: int) -> float:
        """Return 1/2: both sides take the mean of the pair."""
        return 1 / 2

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        peers = topology.random_partners(super_size, super_rank, self.seed, RANDOM_PAIRS_ROUNDS)
        return Plan(peers[:, np.newaxis], 1 / 2, prefer_fast=self.prefer_fast)

    def round_peers(self, n: int, i: int, round: int) -> tuple[int, int]:
        """The peer that i asks, and the peer that asks i, in the round's matching: the lower rank asks."""
        peer = topology.perfect_matching(n, self.seed, round)[i]
        if peer is None:
            return NOBODY, NOBODY
        return (peer, NOBODY) if i < peer else (NOBODY, peer)
