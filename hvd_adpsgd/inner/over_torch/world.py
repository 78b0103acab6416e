"""The super learner of this process: start, shutdown, ranks."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hvd_adpsgd.inner.over_torch.link import connect
from hvd_adpsgd.inner.over_torch.names import global_process_set
from hvd_adpsgd.inner.over_torch.negotiation import Negotiation
from hvd_adpsgd.inner.over_torch.transfers import Transfers
from hvd_adpsgd.inner.torch_group import store_of


class World:
    """What a learner holds of its super learner. The learners of the super learner make it together.

    Args:
        rank: this learner's rank in the super learner.
        names: ranks in the job of the learners of the super learner, for messages.
        address: address of this host that the other learners reach.
        gather: returns the values that all learners give, by rank.
        seconds: longest wait for the others here, and in an operation that all have begun.
        interrupt: breaks the connections, so that no operation waits for a learner that has ended.
        group: returns the process group of the super learner that scripts use.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        address: str,
        gather: Callable[[Any], list[Any]],
        seconds: float,
        interrupt: Callable[[], object],
        group: Callable[[], dist.ProcessGroup],
    ):
        size = len(names)
        self.rank, self.size = rank, size
        connections = connect(rank, size, address, gather, seconds) if size > 1 else {}
        try:
            store = store_of(rank, address, gather, seconds) if size > 1 else dist.HashStore()
            self.transfers = Transfers(rank, size, store, address, seconds)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        self.negotiation = Negotiation(rank, names, connections, self.transfers, interrupt)
        self.group = group
        self._counts: dict[str, int] = {}
        self._counting = threading.Lock()

    def number(self, kind: str) -> str:
        """Return a name for an operation that has none: a number that grows alike on all learners."""
        with self._counting:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            return f"{kind}.noname.{self._counts[kind]}"

    def joined(self) -> None:
        """Number the operations from 0 again, on all learners, which may have counted different ones."""
        with self._counting:
            self._counts.clear()


present: World | None = None  # the super learner of this process


def start(world: World) -> None:
    """Make `world` the super learner of this process."""
    global present
    present = world
    global_process_set.ranks, global_process_set.process_set_id = list(range(world.size)), 0


def shutdown() -> None:
    """Disconnect the super learner; its other learners' pending operations raise. Idempotent."""
    global present
    world, present = present, None
    global_process_set.process_set_id = None
    if world is not None:
        world.negotiation.stop()


def current() -> World:
    """Return the super learner of this process.

    Raises:
        ValueError: before start() and after shutdown(), as Horovod raises it.
    """
    if present is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return present


def is_initialized() -> bool:
    """Whether start() was called, and shutdown() was not called since."""
    return present is not None


def rank() -> int:
    """Return this learner's rank in its super learner."""
    return current().rank


def size() -> int:
    """Return the number of learners of the super learner."""
    return current().size
