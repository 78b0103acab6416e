"""The tensors of one super learner in shards, each averaged by another one of its learners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.layout import Layout, Shard, TensorSpec
from hvd_adpsgd.engine.model_memory import Landing, ModelMemory
from hvd_adpsgd.engine.neighbours import ShownModel
from hvd_adpsgd.engine.store import Store

__all__ = ["ModelShards", "make_memory"]


class ModelShards:
    """As ModelMemory, cut in shards: learner i of the super learner has the mirror of shard i.

    Every learner publishes its own shard and copies its part of the parameters to the mirror, and applies the
    corrections of all shards. What is said of the mirror, of chunks and of the layout means its own shard.

    Args:
        chunk_nbytes: largest chunk.
        inner: communicator of the super learner; of two learners or more.
        count: of shards, at most as many as there are learners: those behind have none.
        shows: see ModelMemory; that of a shard's learner counts.
    """

    def __init__(self, chunk_nbytes: int, inner: Any, count: int, shows: bool = False):
        mine = inner.Get_rank()
        self.shards = [
            ModelMemory(chunk_nbytes, inner, mine == number, shows, Shard(number, count))
            for number in range(count)
        ]
        self._own = self.shards[mine] if mine < count else None

    @property
    def leads(self) -> bool:
        """Whether this learner has a shard."""
        return self._own is not None

    @property
    def own(self) -> ModelMemory:
        """The shard of this learner; of one without a shard the first one, of which it has no mirror."""
        return self._own or self.shards[0]

    # ---- of the own shard ----------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        return self.own.layout

    @property
    def store(self) -> Store:
        return self.own.store

    @property
    def shown(self) -> ShownModel | None:
        return self.own.shown

    @property
    def landing(self) -> Landing | None:
        return self.own.landing

    def hide(self) -> None:
        self.own.hide()

    def wants(self, step: int, due: bool, rate: float) -> bool:
        return self.own.wants(step, due, rate)

    # ---- of all, alike ---------------------------------------------------------------------------

    @property
    def inner(self) -> Any:
        return self.shards[0].inner

    @inner.setter
    def inner(self, inner: Any) -> None:
        for shard in self.shards:
            shard.inner = inner

    @property
    def published(self) -> bool:
        return self.shards[0].published

    @property
    def readable(self) -> bool:
        return self.shards[0].readable

    def extend(self, tensors: Sequence[TensorSpec]) -> None:
        """Each shard gets its part of them."""
        for shard in self.shards:
            shard.extend(tensors)

    def forget(self, tensors: Sequence[int]) -> None:
        for shard in self.shards:
            shard.forget(tensors)

    def publish(self) -> None:
        for shard in self.shards:
            shard.publish()

    def all_met(self, has_joined: Callable[[int], bool] = lambda rank: False) -> None:
        for shard in self.shards:
            shard.all_met(has_joined)

    def absorb(
        self, addresses: NDArray[np.uintp], step: int, threads: int = 1
    ) -> tuple[bool, bool]:
        """As of ModelMemory. Every learner looks at all parameters: all of them find the same ones."""
        found = [shard.absorb(addresses, step, threads) for shard in self.shards]
        return all(finite for finite, _ in found), any(corrected for _, corrected in found)


def make_memory(
    chunk_nbytes: int, inner: Any, leads: bool, shows: bool = False, shards: int = 1
) -> ModelMemory | ModelShards:
    """The memory of a super learner; all of its learners make it together.

    Args:
        chunk_nbytes: as of ModelMemory.
        inner: as of ModelMemory.
        shows: as of ModelMemory.
        leads: whether this learner has a mirror: the leader, or one with a shard.
        shards: how many; 1: the leader averages all of the model.
    """
    if shards == 1:
        return ModelMemory(chunk_nbytes, inner, leads, shows)
    return ModelShards(chunk_nbytes, inner, shards, shows)
