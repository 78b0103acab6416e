"""A2CiD2: continuous local momentum that accelerates gossip on sparse graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies.plan import Plan, Strategy, require_strategy
from hvd_adpsgd.strategies.ring import FixedRing


@dataclass(frozen=True)
class A2CiD2(Strategy):
    """Gossip on a ring, accelerated by a second model per super learner that is coupled to the first.

    x is the model, xt the second model, and time t counts steps. Between events dx = eta (xt - x) dt,
    dxt = eta (x - xt) dt; a gradient moves both alike; an exchange with peer j moves x by -(x - x_j)/2 and
    xt by -alpha_tilde (x - x_j). eta and alpha_tilde follow from the ring's Laplacian (ring_constants).
    The mean of (x + xt)/2 over all super learners moves by gradients only, so hvd.average_model and
    hvd.averaging_paused first set both models to their middle (x + xt)/2. While only one side has applied an
    exchange, the mean of x may differ slightly from the mean of the middles.

    A2CiD2 helps where averaging is slow: on rings of 8 and more super learners, with momentum or different
    data shards. It does not help plain SGD on shuffled data. Exchanges take the mean of the pair (weight
    1/2). It needs memory for two more models on every learner.

    Args:
        base: FixedRing().

    Raises:
        ConfigError: for another base: on random pairs and random rings all pairs exchange, so there is
            nothing to accelerate.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023.
    """

    base: Strategy = field(default_factory=FixedRing)
    name: ClassVar[str] = "a2cid2"

    def __post_init__(self) -> None:
        require_strategy(self.name, self.base)
        if not isinstance(self.base, FixedRing):
            raise ConfigError(
                f"{self.name} accelerates gossip on sparse graphs, not {self.base.name!r}, where "
                "all pairs of super learners exchange, or none: no gain. Use it on fixed_ring, or the other "
                "strategy alone."
            )

    def pair_weight(self, n: int) -> float:
        """Return 1/2: both sides take the mean of the pair."""
        return 1 / 2

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        schedule = self.base.plan(super_rank, super_size).schedule
        return Plan(schedule, 1 / 2, rule=ring_constants(super_size))


class Constants(NamedTuple):
    """Those of A2CiD2: eta per step at one exchange per step, and alpha_tilde."""

    eta: float
    alpha_tilde: float


def ring_constants(n: int) -> Constants:
    """Return the constants of the ring of n super learners, n >= 4.

    eta = 1 / (2 sqrt(chi1 chi2)), alpha_tilde = sqrt(chi1 / chi2) / 2. chi1 = 1 / (1 - cos(2 pi / n)) is the
    inverse of the smallest eigenvalue > 0 of the Laplacian I - W; chi2 = 1 - 1/n half of the resistance of an
    edge, 2 beside n - 1 in series.

    Raises:
        ConfigError: for rings of 2 and 3, which are complete graphs: chi1 = chi2, nothing to accelerate.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023, and their code, which refuses complete graphs.
    """
    if n < 4:
        raise ConfigError(
            f"a2cid2: nothing to accelerate: on a ring of {n} every pair meets. Average without "
            "acceleration, or on a ring of 4 or more."
        )
    chi1, chi2 = 1 / (1 - math.cos(2 * math.pi / n)), 1 - 1 / n
    return Constants(0.5 / math.sqrt(chi1 * chi2), 0.5 * math.sqrt(chi1 / chi2))
