"""Finds models that differ inside a super learner, by the sums of their parameters.

A forgotten broadcast of the model is found before the first step (FirstModels). Inside a super learner such
models would stay apart for good, as its learners apply equal gradients and corrections; so the third step
raises. Super learners approach each other, from a worse start.

The parameters are those with which the optimizer makes its first step: before, a script may change them for
a gradient and restore them (SAM, weight noise). Each learner has written its sum when all have averaged the
next gradients. A model may also be broadcast after the first step, so it is compared again if it differs.

Sums of n independent numbers of size s differ by s sqrt(2n), which is about the norm of the model. What
rounding leaves of a change that a script has taken back is 10^7 times smaller.

Later a model drifts apart if the learners step with equal gradients, but not alike: with learning rates of
each learner's own (ReduceLROnPlateau with its own loss), or a step that one learner skips. Nothing brings
such models together again, and means are those of the leaders' models: they are compared where a mean is
taken (`warn_of_drift`).
"""

import logging
import math
from collections.abc import Iterable, Mapping

import torch

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.errors import ModelMismatchError
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.mates import Mates
from hvd_adpsgd.training.parameters import AveragingSpec

log = logging.getLogger("hvd_adpsgd")

APART = 1e-3  # models differ if their sums differ by this share of their norm
# operations after which super learners may have one model
_MEET = {"average_model", "broadcast", "broadcast_object", "broadcast_parameters", "admit"}
_MEET |= {"allgather", "allgather_object", "broadcast_async"}
_has_stepped = [False]  # whether an optimizer of this process has
_has_warned = [False]


class FirstModels:
    """Compares the parameters of one optimizer on the learners. Made by all learners together.

    Args:
        world: the World of this learner.
        spec: the tensors of the optimizer.
        mates: the other learners of the super learner.

    Attributes:
        is_over: whether nothing is compared in later steps.
    """

    def __init__(self, world: World, spec: AveragingSpec, mates: Mates):
        self._world, self._mates = world, mates
        # parts of a sharded model differ
        self._tensors = [] if spec.is_sharded else [tensor for _, tensor in spec.trained]
        self._as_wrapped = _sum(self._tensors) if world.is_leader else None
        told = world.collectives.gather("averaging", self._as_wrapped)
        sums = [its for its in told if its is not None]
        differ = bool(sums) and max(sums) - min(sums) > self._least_difference()
        # later optimizers of a script are of models that have trained, each in its super learner
        self._may_differ = differ and not _has_stepped[0]
        self._first_set: int | None = None
        self._tries = 2
        self.is_over = False

    def skip(self) -> None:
        """Compare nothing."""
        self._tensors = []

    def before_update(self) -> None:
        """Record the model with which the first step is made, for the other learners of the super learner."""
        _has_stepped[0] = True
        self.is_over = not self._tensors or self._world.inner_size == 1
        if self._first_set is None and self._tensors and self._world.inner_size > 1:
            self._first_set = self._mates.sets
            self._mates.starts_from(_sum(self._tensors))

    def after_gradients(self, step: int) -> None:
        """Raise if a learner of the super learner has made its first step from another model.

        Raises:
            ModelMismatchError: on the learners with another model than some learner.
        """
        if self._first_set is None or self._mates.sets <= self._first_set or not self._tensors:
            return
        self._first_set, self._tries = None, self._tries - 1
        others = self._mates.other_models(self._least_difference())
        if not others or not self._tries:
            self._tensors = []
        if others and not self._tries:
            own = self._world.groups[self._world.super_rank]
            raise ModelMismatchError(
                f"step {step}: learner {self._world.rank} made its first steps with other parameters than "
                f"learner {own[others[0]]} of the same super learner, which would keep two models. Call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step; after it, "
                "change parameters equally on all learners, and list them in one order."
            )

    def before_first_step(self) -> None:
        """Warn if super learners started apart, and nothing has changed the parameters since."""
        if not self._may_differ or not self._world.is_leader or self._world.super_rank != 1:
            return
        if not usage.calls(_MEET) and _sum(self._tensors) == self._as_wrapped:
            log.warning(
                "super learners start from different models: nothing has been broadcast. Call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step."
            )

    @torch.no_grad()
    def _least_difference(self) -> float:
        squares = [float(t.detach().float().norm()) ** 2 for t in self._tensors]
        return APART * math.sqrt(sum(squares))


@torch.no_grad()
def _sum(tensors: Iterable[torch.Tensor]) -> float:
    return math.fsum(float(tensor.detach().sum(dtype=torch.float64)) for tensor in tensors)


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
