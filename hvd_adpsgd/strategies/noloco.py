"""NoLoCo: many local steps, then an update of a slow model with momentum, averaged in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvd_adpsgd.strategies.plan import AFTER, Plan, Rounds, Strategy
from hvd_adpsgd.strategies.random_pairs import RandomPairs
from hvd_adpsgd.strategies.validation import integer, number, seed

NOLOCO_ROUNDS = 1024


@dataclass(frozen=True)
class NoLoCo(Strategy):
    """After every `period` steps, random disjoint pairs of super learners average; none waits for all.

    w is the model that is trained, p the slow model, m its momentum, bar the mean of a pair:

        m' = mu m + eta bar(w - p) + eta (bar(p) - p);   p' = p + m';   w' = p'

    The last term of m' keeps the slow models together. With an odd number of super learners, one is without a
    pair each time.

    Args:
        period: steps between two averages, >= 1.
        rate: eta, in (0, 10).
        momentum: mu in [0, 1).
        seed: seed of the random pairs, the same on every learner.

    Raises:
        ConfigError: for a value out of range.

    Source: Kolehmainen et al., NoLoCo, 2025, law and defaults as in their released code.
    """

    period: int = integer(50)
    rate: float = number(0.7, 0, 10, low_open=True)
    momentum: float = number(0.5, 0, 1)
    seed: int = seed()
    name: ClassVar[str] = "noloco"

    def pair_weight(self, n: int) -> float:
        """Return 1/2: both sides take the mean of the pair."""
        return 1 / 2

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        rows = [self.round_peers(super_size, super_rank, r) for r in range(NOLOCO_ROUNDS)]
        rounds = Rounds(self.period, AFTER, np.array(rows, dtype=np.int32))
        return Plan.nobody(rounds, 1 / 2, self)

    def round_peers(self, n: int, i: int, round: int) -> tuple[int, int]:
        """The peer that i asks, and the peer that asks i, in the round's matching: the lower rank asks."""
        return RandomPairs(self.seed).round_peers(n, i, round)
