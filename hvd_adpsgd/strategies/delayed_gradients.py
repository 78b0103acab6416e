"""Delayed gradients: the mean of all gradients, applied one step later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvd_adpsgd.strategies.plan import DURING, Averaged, Plan, Rounds, Strategy

_LATE = "its gradients would be used one step late"
_INSTEAD = "or use delay_by_one"


@dataclass(frozen=True)
class DelayedGradients(Strategy):
    """Every step k uses the mean gradient of the step before: w' = w - lr mean(g of step k - 1).

    That mean is computed while the next gradient is computed. All models are equal; the first step changes no
    parameter. Every step waits for the slowest super learner.

    Source: Zhang et al., arXiv:2002.01119 and arXiv:2110.11199 (delay by one), whose text allows
        this reading beside DelayByOne.
    """

    name: ClassVar[str] = "delayed_gradients"
    averages: ClassVar[Averaged] = "gradients"
    refuses: ClassVar[Mapping[str, str]] = {
        "buffers=": f"buffers have no gradients to average. Leave buffers out, {_INSTEAD}.",
        "op=Adasum": f"Adasum combines steps, not gradients. Use op=Average, {_INSTEAD}.",
        "step(closure)": f"{_LATE}. Call backward() and then step(), {_INSTEAD}.",
        "a skipped step()": f"{_LATE}, and cannot be taken back. Step every time (no GradScaler) "
        f"and end where a step fails, {_INSTEAD}.",
        "a sparse gradient": "only dense ones are averaged. Use sparse=False in the embedding, "
        f"{_INSTEAD}.",
    }

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        return Plan.nobody(Rounds(order=DURING, still=True), rule=self)
