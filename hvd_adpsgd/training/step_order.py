"""Steps and operations in the same order on all learners; waits that would never end are refused.

A step waits for gradients of the other learners of the super learner, and, with strategies in step, for steps
of other super learners. An operation over all learners waits for all of them. Where one learner waits in a
step for another one that waits in an operation for the first, both raise CollectiveMismatchError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from hvd_adpsgd.errors import CollectiveMismatchError
from hvd_adpsgd.training.super_learner import SuperLearner, horovods

__all__ = ["StepOrder"]

# a wait for gradients of a mate: before it looks what that mate does, between two looks, between two polls
_LATE_S, _AGAIN_S, _PAUSE_S = 1.0, 0.1, 1e-3


class StepOrder:
    """The steps of one optimizer, beside the operations over all learners.

    Args:
        super_learner: whose learners step with the optimizer.
        in_step: super learners wait for steps of each other.
        retire: called with the reason when no more steps are made.

    Attributes:
        begun: the step whose round was begun last.
    """

    def __init__(self, super_learner: SuperLearner, in_step: bool, retire: Callable[[str], None]):
        self.begun = 0
        self._super_learner, self._in_step, self._retire = super_learner, in_step, retire
        self._thread = threading.get_ident()

    def entered(self) -> None:
        """Note that the calling thread makes the steps."""
        self._thread = threading.get_ident()

    def averaged_sets(self) -> tuple[int, int]:
        """See Collectives.steps; of sets of gradients, which may differ from steps."""
        return self._thread, self._super_learner.mates.sets

    def made(self) -> tuple[int, int]:
        """The thread that makes the steps, and how many were made; see Collectives.steps."""
        return self._thread, self._super_learner.step()

    def await_mates(self, are_averaged: Callable[[], bool]) -> None:
        """Wait until every learner of the super learner has submitted its gradients.

        Args:
            are_averaged: whether Horovod has finished with them, also in failure.

        Raises:
            CollectiveMismatchError: if one never does.
        """
        mates, look = self._super_learner.mates, time.monotonic() + _LATE_S
        while (late := mates.late()) and not are_averaged():
            if time.monotonic() > look:
                self._require_mates(late)
                look = time.monotonic() + _AGAIN_S
            time.sleep(_PAUSE_S)

    def _require_mates(self, late: list[int]) -> None:
        """Raise CollectiveMismatchError if one of these mates, by inner rank, never submits its gradients."""
        mates, world, step = (
            self._super_learner.mates,
            self._super_learner.world,
            self._super_learner.step(),
        )
        ranks = world.groups[world.super_rank]
        for mate in mates.have_closed(late):
            raise horovods(CollectiveMismatchError)(
                f"step {step}, learner {world.rank}: learner {ranks[mate]}, of the same super "
                "learner, makes no more steps with this optimizer: it has closed it, or has left after an "
                "error (see there). Make the same number of steps on all learners of a super learner, then "
                "close."
            )
        try:
            world.collectives.require_step(
                self.averaged_sets, mates.sets, [ranks[mate] for mate in late]
            )
        except CollectiveMismatchError as error:
            if self._in_step:  # the round of this step would wait for that mate
                self._leave(error)
            raise horovods(CollectiveMismatchError)(*error.args) from None

    def require_step(self, peers: Collection[int] | None) -> None:
        """While a round waits for these super learners, None for all: see Collectives.require_step."""
        world = self._super_learner.world
        numbers = range(len(world.groups)) if peers is None else peers
        leaders = [world.groups[peer][0] for peer in numbers]
        try:
            world.collectives.require_step(self.made, self.begun, leaders)
        except CollectiveMismatchError as error:
            if world.inner_size > 1:  # its mates wait for this step
                self._leave(error)
            raise horovods(CollectiveMismatchError)(*error.args) from None

    def _leave(self, error: CollectiveMismatchError) -> None:
        """Make no more steps, and take part in no more operations."""
        self._super_learner.mates.closes()
        self._retire("a step and an operation waited for each other")
        self._super_learner.world.collectives.leave(str(error))
