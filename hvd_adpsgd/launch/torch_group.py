"""torch.distributed's process group of this super learner, for DistributedDataParallel and the script."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch.distributed as dist

from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.inner.torch_group import group_of, store_of
from hvd_adpsgd.launch.over_torch import address_inside
from hvd_adpsgd.launch.world import World

__all__ = ["is_inside", "super_learner_group"]

_groups: weakref.WeakKeyDictionary[World, Any] = weakref.WeakKeyDictionary()


def super_learner_group(world: World) -> Any:
    """Return the group; the super learner's learners call this together the first time.

    If the script has not initialized torch.distributed, the group is made torch's default group, and
    shutdown() destroys that.
    """
    if world not in _groups:
        is_ours = not dist.is_initialized()
        gather = functools.partial(allgather_object, world.inner)
        store = store_of(world.inner_rank, address_inside(world), gather)
        _groups[world] = group_of(world.inner_rank, world.inner_size, store, gather)
        if is_ours:
            world.teardown.at_shutdown(_destroy)
    return _groups[world]


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_inside(world: World, group: Any) -> bool:
    """Whether a process group has the learners of this super learner."""
    if group is _groups.get(world):
        return True
    ranks = tuple(dist.get_process_group_ranks(group))
    same_numbers = dist.get_world_size() == world.size and dist.get_rank() == world.rank
    return same_numbers and ranks == world.groups[world.super_rank]
