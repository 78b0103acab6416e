"""Finds a forgotten broadcast of the model: compares checksums of the parameters before the first step.

Inside a super learner such models would stay apart for good, as its learners apply equal gradients and
corrections; so the first step raises. Super learners approach each other, from a worse start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.errors import ModelMismatchError
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.mates import Mates
from hvd_adpsgd.training.parameters import AveragingSpec

__all__ = ["FirstModels"]

log = logging.getLogger("hvd_adpsgd")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# operations after which super learners may have one model; asked about at most once per optimizer
_MEET = {"average_model", "broadcast", "broadcast_object", "broadcast_parameters", "admit"}


class FirstModels:
    """Compares the parameters of one optimizer on the learners. Made by all learners together.

    Args:
        world: the World of this learner.
        spec: the tensors of the optimizer.
        mates: the other learners of the super learner.
    """

    def __init__(self, world: World, spec: AveragingSpec, mates: Mates):
        self._world, self._mates = world, mates
        # parts of a sharded model differ
        self._tensors = [] if spec.is_sharded else [tensor for _, tensor in spec.trained]
        self._as_wrapped = _checksum(self._tensors) if world.is_leader else 0
        told = world.collectives.gather("averaging", self._as_wrapped)
        self._may_differ = len({checksum for checksum in told if checksum}) > 1
        self._met = usage.calls(_MEET)

    def before_first_gradient(self) -> None:
        """Record the model, for the other learners of the super learner."""
        if self._tensors:
            self._mates.starts_from(_checksum(self._tensors))

    def after_first_gradients(self, step: int) -> None:
        """Raise if a learner of the super learner steps from another model.

        Raises:
            ModelMismatchError: on the learners with another model than some learner.
        """
        others = self._mates.other_models()
        if others:
            own = self._world.groups[self._world.super_rank]
            raise ModelMismatchError(
                f"step {step}: the parameters of learner {self._world.rank} differ from those of learner "
                f"{own[others[0]]} of the same super learner, which would keep two models. Call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step."
            )

    def before_first_step(self) -> None:
        """Warn if super learners started apart, and nothing has changed the parameters since."""
        if not self._may_differ or not self._world.is_leader or self._world.super_rank != 1:
            return
        if usage.calls(_MEET) == self._met and _checksum(self._tensors) == self._as_wrapped:
            log.warning(
                "super learners start from different models: nothing has been broadcast. Call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step."
            )


@torch.no_grad()
def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of the tensors' bits, not 0; computed on their devices."""
    total = 1
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        total = (1_000_003 * total + int(bits.sum(dtype=torch.int64))) % (2**63 - 25)
    return total or 1
