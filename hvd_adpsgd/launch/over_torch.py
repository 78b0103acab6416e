"""Starts the torch backend of a super learner, over any launcher: its learners know each other already."""

from __future__ import annotations

import functools
import logging

from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.engine.interfaces import LOOPBACK, addresses, choose_address, network_name
from hvd_adpsgd.errors import LaunchError
from hvd_adpsgd.inner import is_fallback, over_torch
from hvd_adpsgd.launch.inner_sockets import closed_in_children
from hvd_adpsgd.launch.world import World

__all__ = ["address_inside", "start_over_torch"]

log = logging.getLogger("hvd_adpsgd")


def address_inside(world: World) -> str:
    """Return this host's address that the other learners of the super learner reach; all call it together.

    Raises:
        TopologyError: if they are on several hosts that do not reach each other.
    """
    if world.inner_size == 1:
        return LOOPBACK
    networks = allgather_object(world.inner, (network_name(), addresses()))
    return choose_address(world.config.nics, network_name(), networks)


def start_over_torch(world: World) -> None:
    """Connect the learners of this super learner by torch.distributed; they call this together.

    Raises:
        LaunchError: if they do not connect within a minute.
        TopologyError: if they are on several hosts that do not reach each other.
    """
    gather = functools.partial(allgather_object, world.inner)
    address = address_inside(world)
    if is_fallback() and world.rank == 0:
        log.info("Horovod is not installed: torch.distributed averages gradients in super learners")
    try:
        with closed_in_children():
            over_torch.start(world.inner_rank, world.inner_size, address, gather)
    except OSError as error:
        raise LaunchError(
            f"init(): the learners of super learner {world.super_rank} do not connect to learner "
            f"{world.groups[world.super_rank][0]} at {address}: {error}. Name the network that their "
            "hosts share in HVD_ADPSGD_NICS, and look for a firewall between them."
        ) from error
