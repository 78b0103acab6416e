"""The super learner of this process: start, shutdown, ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hvd_adpsgd.inner.over_torch.link import connect
from hvd_adpsgd.inner.over_torch.names import global_process_set
from hvd_adpsgd.inner.over_torch.negotiation import Negotiation
from hvd_adpsgd.inner.over_torch.pending import Handles
from hvd_adpsgd.inner.over_torch.transfers import Transfers
from hvd_adpsgd.inner.torch_group import group_of, store_of

__all__ = ["World", "current", "is_initialized", "rank", "shutdown", "size", "start"]


class World:
    """What a learner holds of its super learner.

    Args:
        rank, size: this learner's, in the super learner.
        address: address of this host that the other learners reach.
        gather: returns the values that all learners give, by rank.
    """

    def __init__(self, rank: int, size: int, address: str, gather: Callable[[Any], list[Any]]):
        self.rank, self.size, self.handles = rank, size, Handles()
        links = connect(rank, size, address, gather) if size > 1 else {}
        self._gather = gather
        self._store = store_of(rank, address, gather) if size > 1 else dist.HashStore()
        self.negotiation = Negotiation(
            rank, size, links, Transfers(rank, size, self._store, address)
        )
        self._counts: dict[str, int] = {}

    def group(self) -> dist.ProcessGroup:
        """Return a process group of the super learner for the script: see group_of."""
        return group_of(self.rank, self.size, self._store, self._gather)

    def name(self, kind: str, given: str | None) -> str:
        """Return the name of an operation: the given one, else a number that grows alike on all learners."""
        if given is not None:
            return f"{kind}.{given}"
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}.noname.{self._counts[kind]}"


_current: World | None = None


def start(rank: int, size: int, address: str, gather: Callable[[Any], list[Any]]) -> None:
    """Connect the learners of a super learner, which call this together; see World."""
    global _current
    _current = World(rank, size, address, gather)
    global_process_set.ranks, global_process_set.process_set_id = list(range(size)), 0


def shutdown() -> None:
    """Disconnect the super learner; its other learners' pending operations raise. Idempotent."""
    global _current
    world, _current = _current, None
    global_process_set.process_set_id = None
    if world is not None:
        world.negotiation.stop()


def current() -> World:
    """Return the super learner of this process.

    Raises:
        ValueError: before start() and after shutdown(), as Horovod raises it.
    """
    if _current is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _current


def is_initialized() -> bool:
    """Whether start() was called, and shutdown() was not called since."""
    return _current is not None


def rank() -> int:
    """Return this learner's rank in its super learner."""
    return current().rank


def size() -> int:
    """Return the number of learners of the super learner."""
    return current().size
