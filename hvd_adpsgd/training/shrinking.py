"""How a super learner trains on without a learner that has ended (HVD_ADPSGD_SHRINK=1, an experiment)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hvd_adpsgd.errors import LaunchError, WorldError
from hvd_adpsgd.launch.over_torch import shrink_over_torch
from hvd_adpsgd.launch.world import World

__all__ = ["require_whole", "shrink"]

log = logging.getLogger("hvd_adpsgd")


@torch.no_grad()
def shrink(self: Any) -> None:
    """Drop the gradients that a mate's end has broken, and connect anew without that mate.

    All remaining learners of the super learner call this for the same set: see training/survivors. The next
    step() of the optimizer makes no step, unless new gradients are computed before.

    Args:
        self: the wrapped optimizer.

    Raises:
        LearnerFailedError: if that fails: then the super learner leaves, as without the option.
    """
    averaging = self._averaging
    inner, world, number = (
        averaging.super_learner,
        averaging.world,
        averaging.super_learner.mates.sets,
    )
    survivors = inner.survivors
    ranks = world.groups[world.super_rank]
    # raises where a mate waits for this learner somewhere else
    averaging.order.await_mates(lambda: survivors.out().issuperset(inner.mates.late()))
    with inner.reducing(), inner.meeting("in the super learner"):
        lost = survivors.agree(number)
        try:
            shrink_over_torch(world, lost)
        except LaunchError as error:
            raise inner.fails({ranks[i] for i in lost}) from error
    averaging.drop_set(lost)
    _drop_gradients(self)
    world.membership.lose(ranks[i] for i in lost)
    log.log(
        logging.WARNING if world.is_leader else logging.INFO,
        "step %d: learners %s of super learner %d have ended, and it trains on without them and without this "
        "step's gradients. Start the job again from a checkpoint to have them back.",
        averaging.step,
        [ranks[i] for i in lost],
        world.super_rank,
    )


def _drop_gradients(self: Any) -> None:
    """Forget the gradients of the broken set; zeros take their place, the same on all remaining learners.

    A GradScaler, for instance, finds the same in them everywhere.
    """
    self._handles.clear()
    self._synchronized, self._should_synchronize = False, True
    for parameter in self._allreduce_delay:
        self._allreduce_delay[parameter] = self.backward_passes_per_step
        if parameter.grad is not None:
            parameter.grad.zero_()
    self._group_counts = dict.fromkeys(self._group_counts, 0)
    self._gradients.skip()


def require_whole(world: World, doing: str) -> None:
    """Raise WorldError if this super learner trains on without some of its learners; `doing` needs all."""
    left = world.inner.Get_size()
    if left < world.inner_size:
        raise WorldError(
            f"{doing}: super learner {world.super_rank} has {left} of its {world.inner_size} learners left "
            "(HVD_ADPSGD_SHRINK), and this needs all of them. Start the job again from a checkpoint."
        )
