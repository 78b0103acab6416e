"""torch.distributed's process group of this super learner, for DistributedDataParallel and the script."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.engine.interfaces import (
    LOOPBACK,
    addresses,
    choose_address,
    interface_of,
    network_name,
)
from hvd_adpsgd.inner.gpus import abort_nccl
from hvd_adpsgd.inner.torch_group import group_of, store_of
from hvd_adpsgd.launch.inner_sockets import closed_in_children
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle.shutdown import finishes_within

__all__ = [
    "abort_group",
    "address_inside",
    "are_inside",
    "forget_group",
    "has_aborted",
    "is_inside",
    "super_learner_group",
]

_LONGEST_S = 5.0  # for an aborted group to end
_INTERFACE = "GLOO_SOCKET_IFNAME"

_groups: weakref.WeakKeyDictionary[World, Any] = weakref.WeakKeyDictionary()
_aborted: weakref.WeakSet[World] = weakref.WeakSet()
_default: Any = None  # torch's default group, if this library has made it


def address_inside(world: World) -> str:
    """Return this host's address that the other learners of the super learner reach; all call it together.

    Raises:
        TopologyError: if they are on several hosts that do not reach each other.
    """
    if world.inner.Get_size() == 1:
        return LOOPBACK
    networks = allgather_object(world.inner, (network_name(), addresses()))
    return choose_address(world.config.nics, network_name(), networks)


def super_learner_group(world: World) -> Any:
    """Return the group; the super learner's learners call this together the first time.

    If the script has not initialized torch.distributed, the group is made torch's default group, and
    shutdown() destroys that.
    """
    global _default
    if world not in _groups:
        _destroy()  # that of a super learner which has been merged with the others
        is_ours = not dist.is_initialized()
        gather = functools.partial(allgather_object, world.inner)
        address = address_inside(world)
        with closed_in_children(), _on_interface(interface_of(address)):
            rank, size = world.inner.Get_rank(), world.inner.Get_size()
            store = store_of(rank, address, gather)
            _groups[world] = group_of(rank, size, store, gather)
        if is_ours:
            _default = dist.group.WORLD
            world.teardown.at_shutdown(_destroy)
    return _groups[world]


@contextlib.contextmanager
def _on_interface(name: str) -> Iterator[None]:
    """Context manager in which Gloo listens on this interface, unless the environment names another one."""
    if not name or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _destroy() -> None:
    """Destroy torch's default group if this library has made it."""
    global _default
    if _default is not None and dist.is_initialized() and dist.group.WORLD is _default:
        if _aborted:  # NCCL's destructor waits for the learner that has ended
            finishes_within(dist.distributed_c10d._abort_process_group, _LONGEST_S)
        else:
            dist.destroy_process_group()
    _default = None


def abort_group(world: World) -> None:
    """End unfinished operations of the group on GPUs, as a learner has ended; `has_aborted` says so first."""
    group = _groups.get(world)
    if group is not None and "nccl" in dist.get_backend_config(group):
        _aborted.add(world)
        abort_nccl(group._get_backend(torch.device("cuda")))


def has_aborted(world: World) -> bool:
    """Whether operations of the group may have left unfinished results on GPUs."""
    return world in _aborted


def forget_group(world: World) -> None:
    """Let `super_learner_group` make another group: the super learner trains on with fewer learners."""
    if _groups.pop(world, None) is not None:
        _destroy()
    _aborted.discard(world)


def is_inside(world: World, group: Any) -> bool:
    """Whether a process group has the learners of this super learner."""
    return group is _groups.get(world) or are_inside(world, dist.get_process_group_ranks(group))


def are_inside(world: World, ranks: Sequence[int]) -> bool:
    """Whether these ranks of torch.distributed are the learners of this super learner, each once."""
    own = _groups.get(world)
    if own is not None and sorted(ranks) == sorted(dist.get_process_group_ranks(own)):
        return True
    same_numbers = dist.get_world_size() == world.size and dist.get_rank() == world.rank
    return same_numbers and tuple(sorted(ranks)) == world.groups[world.super_rank]
