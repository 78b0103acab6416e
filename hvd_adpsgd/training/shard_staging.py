"""Parameters on devices, and a model that may be cut in shards: one Staging each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_adpsgd.engine.model_memory import ModelMemory
from hvd_adpsgd.engine.model_shards import ModelShards
from hvd_adpsgd.training.staging import PIECE_NBYTES, Staging

__all__ = ["ShardStaging"]


class ShardStaging:
    """As Staging. A learner copies down its own shard, and applies the corrections of all shards.

    Its own shard is the last one: whether parameters are finite is looked at once, with all corrections
    applied.

    Args:
        count: of shards; 1: the model is whole.
        own: the shard of this learner, or any.
    """

    def __init__(self, count: int, own: int):
        others = [number for number in range(count) if number != own]
        self._numbers = (*others, own)
        self._stagings = [
            Staging(piece_nbytes=PIECE_NBYTES // count, checks=number == own)
            for number in self._numbers
        ]

    def bind(self, memory: ModelMemory | ModelShards, tensors: Sequence[torch.Tensor]) -> None:
        for number, staging in zip(self._numbers, self._stagings, strict=True):
            staging.bind(memory.shards[number], tensors)

    def absorb(
        self, step: int, wants: bool, offer: Callable[[int, bool], None] | None = None
    ) -> None:
        *others, own = self._stagings
        for staging in others:
            staging.absorb(step, False)
        own.absorb(step, wants, offer)

    def nonfinite(self, before: int | None = None) -> list[int]:
        return self._stagings[-1].nonfinite(before)

    def before_update(self) -> None:
        for staging in self._stagings:
            staging.before_update()

    def settle(self) -> None:
        for staging in self._stagings:
            staging.settle()

    def release(self) -> None:
        for staging in self._stagings:
            staging.release()

    def close(self) -> None:
        for staging in self._stagings:
            staging.close()
