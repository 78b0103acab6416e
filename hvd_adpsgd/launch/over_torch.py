"""Starts the torch backend of a super learner, over any launcher: its learners know each other already."""

import errno
import logging
import os
from functools import partial
from typing import Any

from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.errors import LaunchError
from hvd_adpsgd.inner import VARIABLE, is_fallback, over_torch
from hvd_adpsgd.inner.over_torch.refused import refuse
from hvd_adpsgd.launch.inner_sockets import closed_in_children
from hvd_adpsgd.launch.torch_group import address_inside, interrupt_group, super_learner_group
from hvd_adpsgd.launch.world import World

log = logging.getLogger("hvd_adpsgd")

_SHORTEST_S = 30.0  # as Horovod's least time-out over Gloo: see launch.gloo


def start_over_torch(world: World, process_sets: Any = None) -> None:
    """Connect the learners of this super learner by torch.distributed; they call this together.

    Raises:
        LaunchError: if they do not connect within failure_timeout_s, at least 30 s.
        TopologyError: if they are on several hosts that do not reach each other.
        MissingRequirementError: for process_sets, which Horovod has.
    """
    if process_sets:
        refuse("init(process_sets=...)")
    address = address_inside(world)
    seconds = max(_SHORTEST_S, world.config.failure_timeout_s)
    if is_fallback() and world.rank == 0:
        log.warning(
            "Horovod is not installed: torch.distributed averages gradients in super learners. Set %s=torch "
            "to leave this line out.",
            VARIABLE,
        )
    if os.environ.get("HOROVOD_TIMELINE") and world.rank == 0:
        log.warning(
            "HOROVOD_TIMELINE is set, and no file is written: torch.distributed averages gradients in super "
            "learners, in place of Horovod. Set HVD_ADPSGD_TIMELINE for this library's timeline."
        )
    try:
        with closed_in_children():
            ranks, gather = world.groups[world.super_rank], partial(allgather_object, world.inner)
            calls = partial(interrupt_group, world), partial(super_learner_group, world)
            its = over_torch.World(world.inner_rank, ranks, address, gather, seconds, *calls)
    except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise LaunchError(
                f"init(): learner {world.rank} cannot connect to its super learner: {error}. Raise the limit "
                "of open files (ulimit -n)."
            ) from error
        raise LaunchError(
            f"init(): the learners of super learner {world.super_rank} do not connect to learner "
            f"{world.groups[world.super_rank][0]} at {address} in {seconds:g} s: {error}. Name the network "
            "that their hosts share in HVD_ADPSGD_NICS, and look for a firewall between them."
        ) from error
    over_torch.start(its)
