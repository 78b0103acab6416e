"""Gossip-PGA: gossip with a periodic global average."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hvd_adpsgd.strategies.plan import AFTER, Plan, Rounds, Strategy, require_gossip
from hvd_adpsgd.strategies.random_pairs import RandomPairs
from hvd_adpsgd.strategies.validation import integer


@dataclass(frozen=True)
class GossipPGA(Strategy):
    """Gossip, and after every `period` steps the exact mean of all models, for which all super learners wait.

    Args:
        period: steps between two exact means, >= 1.
        base: the gossip strategy: RandomPairs, FixedRing or RandomRing.

    Raises:
        ConfigError: for a bad period, or another base.

    Source: Chen et al., Gossip-PGA, arXiv:2105.09080.
    """

    period: int = integer(50)
    base: Strategy = field(default_factory=RandomPairs)
    name: ClassVar[str] = "gossip_pga"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_gossip(self.name, self.base)

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        gossip = self.base.plan(super_rank, super_size)
        return Plan(gossip.schedule, gossip.weight, Rounds(self.period, AFTER))
