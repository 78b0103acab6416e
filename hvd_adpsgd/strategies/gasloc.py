"""GASLoC: gossip of local steps, with an outer step of each super learner; none waits for another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hvd_adpsgd.strategies.plan import Plan, Strategy, require_gossip
from hvd_adpsgd.strategies.random_pairs import RandomPairs
from hvd_adpsgd.strategies.validation import integer, number


@dataclass(frozen=True)
class GASLoC(Strategy):
    """Gossip, and after every `period` local steps an outer step with momentum, each super learner its own.

    A block is `period` steps. With theta the model at the start of a block, g what the optimizer has added to
    it in the block, and c what exchanges have added, the block ends with

        u = theta + eta g + c;   theta' = u + gamma (u - u of the block before).

    With eta = 1 and gamma = 0 it is plain gossip. If the exchanges of a block are the mean of all, it is
    DiLoCo: Nesterov momentum gamma on the mean of eta g. The published law averages u once per block, in
    lock step; here exchanges take place at any time, at the pace of `exchanges_per_step`. For as
    few bytes as in the paper set that to 1 / period.

    The mean of all models is that of outer steps alone where both sides of each exchange have ended equally
    many blocks since: gamma, gamma^2, ... times what it moved a model by follow at the ends of its blocks.
    What a script sets the model to in a block counts as a local update; what hvd.average_model does, as c
    without momentum.

    Args:
        period: local steps in a block, >= 1.
        rate: eta, in (0, 10).
        momentum: gamma in [0, 1).
        base: the gossip strategy: RandomPairs, FixedRing or RandomRing.

    Raises:
        ConfigError: for a value out of range, or another base.

    Source: Cagnasso, Belilovsky, Oyallon, arXiv:2606.11081.
    """

    period: int = integer(20)
    rate: float = number(0.7, 0, 10, low_open=True)
    momentum: float = number(0.5, 0, 1)
    base: Strategy = field(default_factory=RandomPairs)
    name: ClassVar[str] = "gasloc"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_gossip(self.name, self.base)

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        gossip = self.base.plan(super_rank, super_size)
        return Plan(gossip.schedule, gossip.weight, rule=self)
