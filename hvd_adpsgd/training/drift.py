"""Finds a model that drifts apart inside a super learner: its learners step with equal gradients, not alike.

So do learning rates of each learner's own (ReduceLROnPlateau with its own loss), or a step that one learner
skips. Nothing brings such models together again, and means are those of the leaders' models: they are
compared where a mean is taken, by the sums of their parameters (see first_models).
"""

import logging
from collections.abc import Mapping

import torch

from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.first_models import APART

log = logging.getLogger("hvd_adpsgd")

_has_warned = [False]


def warn_of_drift(
    world: World,
    doing: str,
    named: Mapping[str, torch.Tensor],
    sums: Mapping[int, Mapping[str, float]],
) -> None:
    """Log a warning on a leader, once, if a learner of its super learner holds another model.

    Args:
        world: the World of this learner.
        doing: name of the operation, for messages.
        named: by name, the leader's tensors that its super learner should hold alike.
        sums: by the learners' ranks, and by name, the sums of the tensors that a learner compares.
    """
    if not world.is_leader or _has_warned[0]:
        return
    own = sums[world.rank]
    for rank in world.groups[world.super_rank]:
        for name, its in sums.get(rank, {}).items():
            apart = abs(its - own.get(name, its))
            if apart and apart > APART * float(named[name].norm()):
                _has_warned[0] = True
                log.warning(
                    "%s: learner %d holds another %r than learner %d of the same super learner, whose model "
                    "is averaged. Make the same steps, with the same learning rate, on both: pass "
                    "ReduceLROnPlateau a loss reduced by hvd.allreduce(loss, process_set=hvd.super_learner).",
                    doing,
                    rank,
                    name,
                    world.rank,
                )
                return
