"""Random pairs: AD-PSGD on the complete graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.strategies.plan import NOBODY, Plan, Strategy, checked_seed
from hvd_adpsgd.theory import mixing, topology

__all__ = ["RandomPairs"]

RANDOM_PAIRS_ROUNDS = 4096


@dataclass(frozen=True)
class RandomPairs(Strategy):
    """One uniformly random peer per ask, weight 1/2: both take the mean of the pair.

    Each super learner asks from a table of its own, drawn from (seed, outer rank). In lock step
    a round is a random perfect matching, drawn from (seed, round); with n odd one sits out.

    Args:
        seed: 0 <= seed < 2**32, the same on every learner.

    Raises:
        ConfigError: if the seed is out of range.

    Source: Lian et al., AD-PSGD, arXiv:1710.06952.
    """

    seed: int = 0
    name: ClassVar[str] = "random_pairs"
    is_gossip: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_seed(self.name, self.seed))

    def pair_weight(self, n: int) -> float:
        """The mean of a pair."""
        return 1 / 2

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        peers = topology.random_partners(super_size, super_rank, self.seed, RANDOM_PAIRS_ROUNDS)
        return Plan(peers[:, np.newaxis], 1 / 2)

    def mixing_matrix(self, n: int, round: int) -> npt.NDArray[np.float64]:
        """The matrix of this round's perfect matching."""
        return mixing.matching_matrix(topology.perfect_matching(n, self.seed, round), 1 / 2)

    def round_peers(self, n: int, i: int, round: int) -> tuple[int, int]:
        """The peer of this round's perfect matching; the lower rank asks."""
        topology.require_rank(n, i)
        peer = topology.perfect_matching(n, self.seed, round)[i]
        if peer is None:
            return NOBODY, NOBODY
        return (peer, NOBODY) if i < peer else (NOBODY, peer)
