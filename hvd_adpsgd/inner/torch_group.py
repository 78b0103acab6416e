"""A torch.distributed process group of the super learner: for DDP, FSDP2 and scripts."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvd_adpsgd.inner.gpus import cuda_backend


def store_of(
    rank: int, address: str, gather: Callable[[Any], list[Any]], seconds: float = 300.0
) -> dist.Store:
    """Return a store of the super learner, which learner 0 serves; its learners call this together.

    Args:
        rank: this learner's rank in the super learner.
        address: address of this learner's host that the others reach.
        gather: returns the values that all learners give, by rank.
        seconds: longest wait for the store.
    """
    how: dict[str, Any] = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False}
    if rank == 0:
        store = dist.TCPStore(address, 0, is_master=True, **how)
        gather((address, store.port))
        return store
    host, port = gather(None)[0]
    return dist.TCPStore(host, port, is_master=False, **how)


def group_of(
    rank: int, size: int, store: dist.Store, gather: Callable[[Any], list[Any]]
) -> dist.ProcessGroup:
    """Return torch's process group of the super learner; its learners call this together.

    Where the script has not initialized torch.distributed, the group becomes torch's default group, so that
    DistributedDataParallel(model) and fully_shard(model) work in the super learner as they are.

    Args:
        rank: this learner's rank in the super learner.
        size: number of learners of the super learner.
        store: a store of the super learner.
        gather: returns the values that all learners give, by rank.
    """
    if not dist.is_initialized():
        cuda = cuda_backend(rank, size, dist.PrefixStore("gpus", store))
        backend = f"cpu:gloo,cuda:{cuda}" if cuda else "gloo"
        its = dist.PrefixStore("default", store)
        dist.init_process_group(backend, store=its, rank=rank, world_size=size)
    ranks = gather(dist.get_rank())
    if len(ranks) == dist.get_world_size():
        found = dist.group.WORLD
    else:
        found = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(found, dist.ProcessGroup)
    return found
