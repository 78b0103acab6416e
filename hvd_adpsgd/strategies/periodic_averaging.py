"""Periodic model averaging, optionally with block momentum (BMUF)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_adpsgd.strategies.plan import AFTER, Plan, Rounds, Strategy
from hvd_adpsgd.strategies.validation import flag, integer, number


@dataclass(frozen=True)
class PeriodicAveraging(Strategy):
    """Model averaging: after every `period` steps the exact mean of all models; all super learners wait.

    With block momentum (BMUF) the update is different. For block t of `period` steps, which all super
    learners start from the model s(t):

        G(t) = mean(w) - s(t);   D(t) = eta D(t-1) + zeta G(t);   w(t) = w(t-1) + D(t)
        s(t+1) = w(t), with nesterov w(t) + eta D(t)

    The usual choice for n super learners is eta = 1 - 1/n, zeta = 1. eta = 0, zeta = 1 is plain model
    averaging. All super learners must start from the same model (broadcast_parameters).

    Args:
        period: steps between two averages, >= 1.
        block_momentum: eta in [0, 1).
        block_rate: zeta, in (0, 10).
        nesterov: whether a block starts from w(t) + eta D(t) instead of w(t).
        warm_up: steps at the beginning without averaging, >= 0, because models that change fast average
            badly. The first block ends at the first multiple of `period` after the warm-up, and its block
            momentum includes the whole update since the start.

    Raises:
        ConfigError: for a value out of range.

    Source: Su and Chen, arXiv:1507.01239 (model averaging); Chen and Huo, ICASSP 2016 (BMUF), with
        G relative to the start of the block, as in its implementations. The warm-up is that of Kaldi's
        parameter averaging.
    """

    period: int = integer(10)
    block_momentum: float = number(0.0, 0, 1)
    block_rate: float = number(1.0, 0, 10, low_open=True)
    nesterov: bool = flag(False)
    warm_up: int = integer(0, low=0)
    name: ClassVar[str] = "periodic_averaging"

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        plain = self.block_momentum == 0 and self.block_rate == 1
        rounds = Rounds(self.period, AFTER, warm_up=self.warm_up)
        return Plan.nobody(rounds, rule=None if plain else self)
