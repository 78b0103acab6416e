"""Starts the torch backend of a super learner, over any launcher: its learners know each other already."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

from hvd_adpsgd.collectives.of_communicator import allgather_object
from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import ConfigError, LaunchError
from hvd_adpsgd.inner import VARIABLE, is_fallback, over_torch
from hvd_adpsgd.inner.over_torch.refused import refuse
from hvd_adpsgd.launch.inner_sockets import break_recorded, closed_in_children
from hvd_adpsgd.launch.torch_group import (
    abort_group,
    address_inside,
    forget_group,
    super_learner_group,
)
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle.shutdown import finishes_within

__all__ = ["require_shrinkable", "shrink_over_torch", "start_over_torch"]

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
    seconds = _longest_s(world)
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
            its = over_torch.World(
                world.inner.Get_rank(),
                world.inner.Get_size(),
                address,
                functools.partial(allgather_object, world.inner),
                seconds,
                functools.partial(_interrupt, world),
                functools.partial(super_learner_group, world),
            )
    except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        raise LaunchError(
            f"init(): the learners of super learner {world.super_rank} do not connect to learner "
            f"{world.groups[world.super_rank][0]} at {address} in {seconds:g} s: {error}. Name the network "
            "that their hosts share in HVD_ADPSGD_NICS, and look for a firewall between them."
        ) from error
    over_torch.start(its)


def _interrupt(world: World) -> None:
    """End operations of torch that wait for a learner which has ended, in this library's groups."""
    break_recorded()
    abort_group(world)


def _longest_s(world: World) -> float:
    return max(_SHORTEST_S, world.config.failure_timeout_s)


def shrink_over_torch(world: World, lost: Sequence[int]) -> None:
    """Connect this super learner anew without learners that have ended; the others call this together.

    All connections are made as at the start. torch's `_reconfigure` (2.14) would keep the object of a group,
    which nothing refers to here, and would replace neither store nor links.

    Args:
        world: the World of this learner; `world.inner` loses the learners, too.
        lost: inner ranks of the learners that have ended.

    Raises:
        LaunchError: if the old connections do not end, or no new ones are made, within failure_timeout_s, at
            least 30 s each.
        PeerFailedError: if one more learner ends meanwhile.
    """
    # no new connection before the old threads have ended: they break all connections
    if not finishes_within(over_torch.shutdown, _longest_s(world)):
        raise LaunchError(
            f"super learner {world.super_rank}: the connections of its learners did not end in "
            f"{_longest_s(world):g} s. Start the job again."
        )
    world.inner.leave_out(lost)
    forget_group(world)
    start_over_torch(world)


def require_shrinkable(config: Config, inner: str, is_over_mpi: bool, is_plain: bool) -> None:
    """Raise ConfigError if HVD_ADPSGD_SHRINK=1 does not fit the job.

    Args:
        config: the options.
        inner: what averages gradients inside super learners: see inner.backend.
        is_over_mpi: whether MPI joins the processes.
        is_plain: whether the job is plain Horovod, of one super learner.
    """
    if not config.shrink:
        return
    if inner != "torch":
        problem, cure = f"{VARIABLE} is {inner}", f"set {VARIABLE}=torch"
    elif config.shard is not None:
        problem, cure = f"HVD_ADPSGD_SHARD is {config.shard}", "leave HVD_ADPSGD_SHARD out"
    elif is_plain:
        problem, cure = "there is one super learner", "make several (HVD_ADPSGD_SUPER_LEARNER_SIZE)"
    elif is_over_mpi:
        problem, cure = (
            "MPI joins the processes",
            "start them without MPI (horovodrun --gloo, srun)",
        )
    else:
        return
    raise ConfigError(
        f"init(): HVD_ADPSGD_SHRINK=1, and {problem}: a super learner could not train on without one of its "
        f"learners. Leave HVD_ADPSGD_SHRINK out, or {cure}."
    )
