"""Synchronous SGD: the baseline, as plain Horovod does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_adpsgd.strategies.plan import Averaged, Plan, Strategy


@dataclass(frozen=True)
class Synchronous(Strategy):
    """Gradients of all learners are averaged in each step, as in plain Horovod; no models are exchanged.

    All models are equal at all times. As a lock-step round this is mixing with T = 11^T/n.
    """

    name: ClassVar[str] = "synchronous"
    averages: ClassVar[Averaged] = "nothing"

    def _plan(self, super_rank: int, super_size: int) -> Plan:
        return Plan.nobody()
