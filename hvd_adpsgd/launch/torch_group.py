"""torch.distributed's process group of this super learner, for DistributedDataParallel and the script."""

import functools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.engine.interfaces import (
    LOOPBACK,
    addresses,
    choose_address,
    interface_of,
    network_name,
)
from hvd_adpsgd.inner.gpus import abort_nccl, nccl_of
from hvd_adpsgd.inner.torch_group import group_of, store_of
from hvd_adpsgd.launch.inner_sockets import break_recorded, closed_in_children
from hvd_adpsgd.launch.processes import variables
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.lifecycle.shutdown import finishes_within

_LONGEST_S = 5.0  # longest wait for the end of torch's default group
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass
class _Made:
    """A super learner's group.

    Attributes:
        group: torch's process group.
        nccl: its backend for CUDA tensors, if that is NCCL.
        aborted: whether operations of `nccl` were ended, unfinished.
    """

    group: Any
    nccl: Any
    aborted: bool = False


# by the super learner's membership, which outlives the World of a learner when others join the job
_made: weakref.WeakKeyDictionary[Membership, _Made] = weakref.WeakKeyDictionary()
_default: _Made | None = None  # that of torch's default group, if this library has made it
_has_ended = False  # whether there was such a group, which models may still hold


def address_inside(world: World) -> str:
    """Return this host's address that the other learners of the super learner reach; all call it together.

    Raises:
        TopologyError: if they are on several hosts that do not reach each other.
    """
    if world.inner_size == 1:
        return LOOPBACK
    networks = allgather_object(world.inner, (network_name(), addresses()))
    return choose_address(world.config.nics, network_name(), networks)


def super_learner_group(world: World) -> Any:
    """Return the group; the super learner's learners call this together the first time.

    If the script has not initialized torch.distributed, the group is made torch's default group, and
    shutdown() destroys that.
    """
    global _default
    made = _made.get(world.membership)
    if made is None or not is_known(made.group):  # the script may have destroyed it
        _end_default()  # that of a super learner which has been merged with the others
        is_ours = not dist.is_initialized()
        gather = functools.partial(allgather_object, world.inner)
        address = address_inside(world)
        name = os.environ.get(_INTERFACE) or interface_of(address)  # where Gloo listens
        with closed_in_children(), variables({_INTERFACE: name} if name else {}):
            store = store_of(world.inner_rank, address, gather)
            group = group_of(world.inner_rank, world.inner_size, store, gather)
        made = _made[world.membership] = _Made(group, nccl_of(group))
        if is_ours:
            _default = made
            world.teardown.at_shutdown(_end_default)
    return made.group


def has_ended_group() -> bool:
    """Whether this library has ended a default group of torch in this process."""
    return _has_ended


def is_known(group: Any) -> bool:
    """Whether torch knows the group, which destroy_process_group() ends."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def _end_default() -> None:
    """End torch's default group if this library has made it. It takes twice _LONGEST_S at most.

    NCCL waits as it ends for operations that a failed learner has not entered.
    """
    global _default, _has_ended
    made, _default = _default, None
    _has_ended = _has_ended or made is not None
    if made is None or not dist.is_initialized() or dist.group.WORLD is not made.group:
        return
    if made.aborted or not finishes_within(dist.destroy_process_group, _LONGEST_S):
        finishes_within(dist.distributed_c10d._abort_process_group, _LONGEST_S)


def abort_group(world: World) -> None:
    """End unfinished operations of the group on GPUs, as a learner has failed. Idempotent; returns at once.

    `has_aborted` is True before they end: an aborted operation leaves part of a sum, and its end looks like
    that of a complete one.
    """
    made = _made.get(world.membership)
    if made is not None and made.nccl is not None and not made.aborted:
        made.aborted = True
        abort_nccl(made.nccl)


def interrupt_group(world: World) -> None:
    """End operations of torch that wait for a local peer: of this library's groups, not of a script's own.

    Gloo's get an error, as their connections break: its abort() ends none. NCCL's are aborted.
    """
    break_recorded()
    abort_group(world)


def begun_inside(world: World) -> dict[str, int]:
    """Return how many operations this learner has begun in each of torch's groups of its super learner.

    By the name of the group, which is the same on all of its learners. A group that the script has made of
    these learners counts, too.
    """
    names = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
    return {
        name: sum(map(_begun, _backends(group)))
        for group, name in list(names.items())
        if are_inside(world, dist.get_process_group_ranks(group))
    }


def _backends(group: Any) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]


def _begun(backend: Any) -> int:
    try:
        return int(backend._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not number its operations
        return 0


def has_aborted(world: World) -> bool:
    """Whether operations of the group may have left unfinished results on GPUs."""
    made = _made.get(world.membership)
    return made is not None and made.aborted


def is_inside(world: World, group: Any) -> bool:
    """Whether a process group has the learners of this super learner."""
    made = _made.get(world.membership)
    return (made is not None and group is made.group) or are_inside(
        world, dist.get_process_group_ranks(group)
    )


def are_inside(world: World, ranks: Sequence[int]) -> bool:
    """Whether these ranks of torch.distributed are the learners of this super learner, each once."""
    made = _made.get(world.membership)
    if made is not None and sorted(ranks) == sorted(dist.get_process_group_ranks(made.group)):
        return True
    same_numbers = dist.get_world_size() == world.size and dist.get_rank() == world.rank
    return same_numbers and tuple(sorted(ranks)) == world.groups[world.super_rank]
