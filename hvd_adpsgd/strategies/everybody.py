"""The exact mean of all super learners: once in a while, or delayed by one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies.plan import AFTER, DURING, Plan, Rounds, Strategy, require_strategy
from hvd_adpsgd.strategies.random_pairs import RandomPairs
from hvd_adpsgd.strategies.update_rules import BlockMomentum, DelayGradients
from hvd_adpsgd.strategies.validation import require_flag, require_number, require_whole
from hvd_adpsgd.theory import mixing, topology

__all__ = ["DelayByOne", "GossipPGA", "PeriodicAveraging"]


@dataclass(frozen=True)
class DelayByOne(Strategy):
    """The mean of all, computed while the next gradient is.

    Two readings of delay by one, for super learner l at step k, g_l its gradient:

        "a":  w_l' = mean(w) - lr g_l(w_l)          each starts from its own model of the step before
        "b":  w'   = w - lr mean(g of step k - 1)   all models are equal; the first step moves nothing

    Every step waits for the slowest super learner. "a" leaves the models apart by the update of one
    step. With one super learner, "a" is the plain optimizer.

    Args:
        reading: "a" or "b", the same on every learner.

    Raises:
        ConfigError: if it is neither.

    Source: Zhang et al., arXiv:2002.01119 and arXiv:2110.11199 (delay by one). Their abstracts do
        not say which reading is theirs.
    """

    reading: str = "a"
    name: ClassVar[str] = "delay_by_one"
    weight: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.reading not in ("a", "b"):
            raise ConfigError(
                f"bad reading for {self.name}: got {self.reading!r}, allowed is 'a' or 'b'. Use 'a' to "
                "average models, 'b' to average gradients."
            )

    def plan(self, super_rank: int, super_size: int) -> Plan:
        """A mean of all during every step."""
        topology.require_rank(super_size, super_rank)
        rule = DelayGradients() if self.reading == "b" else None
        return Plan.nobody(Rounds(order=DURING), rule=rule)

    def mixing_matrix(self, n: int, round: int) -> npt.NDArray[np.float64]:
        """The exact mean."""
        return mixing.uniform_matrix(n)


@dataclass(frozen=True)
class PeriodicAveraging(Strategy):
    """Model averaging: the exact mean of all after every `period` steps; all wait for it.

    With block momentum (BMUF) the mean is not taken as it is. For block t of `period` steps, s(t)
    the model that all started it from:

        G(t) = mean(w) - s(t);   D(t) = eta D(t-1) + zeta G(t);   w(t) = w(t-1) + D(t)
        s(t+1) = w(t), with nesterov w(t) + eta D(t)

    The usual choice is eta = 1 - 1/n, zeta = 1. eta = 0, zeta = 1 is plain model averaging. All must
    start from the same model (broadcast_parameters).

    Args:
        period: steps, >= 1.
        block_momentum: eta in [0, 1).
        block_rate: zeta > 0.
        nesterov: whether a block starts ahead.
        warm_up: steps at the beginning after which nobody averages, >= 0: models that still move fast
            average badly. The first block ends at the first multiple of `period` beyond it; block
            momentum carries all of its way on.

    Raises:
        ConfigError: for a value out of range.

    Source: Su and Chen, arXiv:1507.01239 (model averaging); Chen and Huo, ICASSP 2016 (BMUF), with
        G taken against the start of the block, as its implementations do. No averaging at the beginning
        as in Kaldi's parameter averaging.
    """

    period: int = 10
    block_momentum: float = 0.0
    block_rate: float = 1.0
    nesterov: bool = False
    warm_up: int = 0
    name: ClassVar[str] = "periodic_averaging"
    weight: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        require_whole(self.name, "period", self.period)
        require_whole(self.name, "warm_up", self.warm_up, low=0)
        momentum = require_number(self.name, "block_momentum", self.block_momentum, 0, 1)
        rate = require_number(self.name, "block_rate", self.block_rate, 0, 10, low_open=True)
        require_flag(self.name, "nesterov", self.nesterov)
        object.__setattr__(self, "nesterov", bool(self.nesterov))
        object.__setattr__(self, "block_momentum", momentum)  # 0 and 0.0 are one spec
        object.__setattr__(self, "block_rate", rate)

    def plan(self, super_rank: int, super_size: int) -> Plan:
        """A mean of all after every `period` steps."""
        topology.require_rank(super_size, super_rank)
        plain = self.block_momentum == 0 and self.block_rate == 1
        rule = BlockMomentum(self.block_momentum, self.block_rate, self.nesterov)
        return Plan.nobody(
            Rounds(self.period, AFTER, warm_up=self.warm_up), rule=None if plain else rule
        )

    def mixing_matrix(self, n: int, round: int) -> npt.NDArray[np.float64]:
        """The exact mean."""
        return mixing.uniform_matrix(n)


@dataclass(frozen=True)
class GossipPGA(Strategy):
    """Gossip, and the exact mean of all after every `period` steps, for which all wait.

    Args:
        period: steps, >= 1.
        base: the gossip: RandomPairs, FixedRing or RandomRing.

    Raises:
        ConfigError: for a bad number, or another strategy.

    Source: Chen et al., Gossip-PGA, arXiv:2105.09080.
    """

    period: int = 50
    base: Strategy = field(default_factory=RandomPairs)
    name: ClassVar[str] = "gossip_pga"

    def __post_init__(self) -> None:
        require_whole(self.name, "period", self.period)
        require_gossip(self.name, self.base)

    @property
    def weight(self) -> float:  # type: ignore[override]
        """That of the gossip."""
        return self.base.weight

    def plan(self, super_rank: int, super_size: int) -> Plan:
        """The gossip's, and a mean of all after every `period` steps."""
        gossip = self.base.plan(super_rank, super_size)
        return Plan(gossip.schedule, gossip.weight, Rounds(self.period, AFTER), gossip.rule)

    def mixing_matrix(self, n: int, round: int) -> npt.NDArray[np.float64]:
        """The gossip's; every `period`-th round is the exact mean."""
        if (round + 1) % self.period == 0:
            return mixing.uniform_matrix(n)
        return self.base.mixing_matrix(n, round)


def require_gossip(name: str, base: Strategy) -> None:
    """Raise ConfigError unless `base` runs freely in pairs."""
    require_strategy(name, base)
    plan = base.plan(0, 4)
    if plan.width == 0 or plan.in_step is not None or plan.rule is not None:
        raise ConfigError(
            f"{name} is on top of gossip, not of {base.name!r}, which is no plain "
            "gossip. Use it of random_pairs, fixed_ring or random_ring."
        )
