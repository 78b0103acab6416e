"""Delay by one: the mean of all models is computed while the next gradient is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_adpsgd.strategies.plan import DURING, Plan, Rounds, Strategy


@dataclass(frozen=True)
class DelayByOne(Strategy):
    """Average all models in every step, while the next gradient is computed.

    With w_l the model and g_l the gradient of super learner l:

        w_l' = mean(w) - lr g_l(w_l)

    Each super learner computes gradients at its own model, so models differ by the update of one step.
    Every step waits for the slowest super learner. With one super learner this is the plain optimizer.

    Source: Zhang et al., arXiv:2002.01119 and arXiv:2110.11199 (delay by one). Their text allows
        another reading too, DelayedGradients.
    """

    name: ClassVar[str] = "delay_by_one"

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        return Plan.nobody(Rounds(order=DURING))
