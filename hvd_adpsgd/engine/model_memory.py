"""The memory in which engines average a model: as one shard, or as several, each on another learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.layout import Shard, TensorSpec
from hvd_adpsgd.engine.shard_memory import Arrivals, ShardMemory
from hvd_adpsgd.engine.turns import Mark


def memory_of(
    shards: int, chunk_nbytes: int, inner: Any, leads: bool, shows: bool = False
) -> Memory:
    """Return the memory that trainer and engine share, of a model of so many shards: see ModelMemory."""
    if shards == 1:
        return ShardMemory(chunk_nbytes, inner, leads, shows)
    return ModelMemory(chunk_nbytes, inner, leads, shows, shards)


class ModelMemory:
    """The memory of a model that is cut into shards, one ShardMemory for each.

    Learner i of the super learner has the engine's copy (mirror) of shard i. A learner with a shard publishes
    the shard's corrections and copies its part of the parameters to the mirror; all learners add the
    corrections of all shards to their parameters.

    Args:
        chunk_nbytes: largest size of a chunk in bytes.
        inner: communicator of the super learner (mpi4py), None for a learner alone.
        leads: whether this learner has a mirror, which its engine averages.
        shows: see ShardMemory; for each shard the value on the learner that has its mirror counts.
        shards: number of shards; if more than one, at most the number of learners.

    Attributes:
        shards: the memory of each shard; `own` is this learner's (without one: shard 0, no mirror).
    """

    def __init__(
        self, chunk_nbytes: int, inner: Any, leads: bool, shows: bool = False, shards: int = 1
    ):
        mine = inner.Get_rank() if shards > 1 else 0
        self.shards = [
            ShardMemory(chunk_nbytes, inner, leads and number == mine, shows, Shard(number, shards))
            for number in range(shards)
        ]
        self._counted = [False] * shards  # which shards' exchanges take_arrivals counts, if any
        self.own = self.shards[mine if mine < shards else 0]

    def take_arrivals(self) -> Arrivals:
        """Return what has been applied since the last call: the mean of shards, of those with rare chunks."""
        taken = [shard.take_arrivals() for shard in self.shards]
        counted = [each for each, i in zip(taken, self._counted, strict=True) if i] or taken
        found = [each.exchanges for each in counted if each.exchanges]
        exchanges = sum(found) / len(found) if found else 0.0
        return Arrivals(exchanges, sum(each.pace for each in counted) / len(counted))

    def extend(self, tensors: Sequence[TensorSpec]) -> None:
        """Average `tensors` too: add a part of these tensors to each shard."""
        for shard in self.shards:
            shard.extend(tensors)
        self._counted = [shard.has_rare for shard in self.shards]

    def forget(self, tensors: Sequence[int]) -> None:
        for shard in self.shards:
            shard.forget(tensors)

    def publish(self, step: int | None = None) -> None:
        for shard in self.shards:
            shard.publish(step)

    def all_met(self, has_joined: Callable[[int], bool] = lambda rank: False) -> None:
        for shard in self.shards:
            shard.all_met(has_joined)

    def absorb(
        self,
        addresses: NDArray[np.uintp],
        step: int,
        threads: int = 1,
        whole: bool = True,
        mark: Mark | None = None,
    ) -> tuple[bool, bool]:
        """Add to the parameters the corrections that exchanges have computed, of all shards.

        Returns:
            Whether every parameter that was looked at is finite, and whether a correction was added, as
            ShardMemory.absorb; equal on all learners.
        """
        found = [
            shard.absorb(addresses, step, threads, whole, mark if shard.leads else None)
            for shard in self.shards
        ]
        return all(finite for finite, _ in found), any(corrected for _, corrected in found)


Memory = ShardMemory | ModelMemory
