"""Gossip in rounds that steps wait for: the synchronous form of the decentralized strategies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies.plan import AFTER, DURING, Plan, Rounds, Strategy, require_gossip
from hvd_adpsgd.strategies.ring import FixedRing

ROUNDS_OF_PEERS = 1024


@dataclass(frozen=True)
class SynchronousGossip(Strategy):
    """One round of gossip per step, as in the papers' synchronous analysis (D-PSGD).

        "awc":  W' = W T_k - lr g(W)        the round runs while the gradient is computed
        "atc":  W' = (W - lr g(W)) T_k      the step waits for the round

    Each super learner waits for its peers of the round, so a slow super learner slows its neighbours.
    Trajectories are reproducible. "awc" is less stable: on a quadratic of curvature h it needs
    lr h < 1 + (smallest eigenvalue of T), "atc" lr h < 2.

    Args:
        order: "awc" or "atc".
        base: the gossip strategy that gives the mixing matrices T_k: FixedRing, RandomRing or RandomPairs
            (perfect matchings).

    Raises:
        ConfigError: for another order or base.

    Source: Lian et al., D-PSGD, arXiv:1705.09056.
    """

    order: str = DURING
    base: Strategy = field(default_factory=FixedRing)
    name: ClassVar[str] = "synchronous_gossip"

    def __post_init__(self) -> None:
        if self.order not in (DURING, AFTER):
            raise ConfigError(
                f"bad order for {self.name}: got {self.order!r}, allowed is {DURING!r} (adapt while "
                f"combining) or {AFTER!r} (adapt, then combine). Use one of these."
            )
        require_gossip(self.name, self.base)

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        rows = [self.base.round_peers(super_size, super_rank, r) for r in range(ROUNDS_OF_PEERS)]
        table = np.array(rows, dtype=np.int32)
        return Plan.nobody(Rounds(1, self.order, table), self.pair_weight(super_size))

    def round_peers(self, n: int, i: int, round: int) -> tuple[int, int]:
        """The peer that i asks, and the peer that asks i, by the base strategy; rounds repeat after 1024."""
        return self.base.round_peers(n, i, round % ROUNDS_OF_PEERS)
