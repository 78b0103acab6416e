"""The order of steps and operations over all learners; raises where two learners would wait for each other.

A step waits for gradients of the other learners of the super learner, and, with strategies in step, for steps
of other super learners. An operation over all learners waits for all of them. Where one learner waits in a
step for another one that waits in an operation for the first, both raise CollectiveMismatchError.
"""

import threading
import time
from collections.abc import Callable, Collection

from hvd_adpsgd.collectives.collectives import Made
from hvd_adpsgd.errors import CollectiveMismatchError
from hvd_adpsgd.polling import polls
from hvd_adpsgd.training.super_learner import SuperLearner, horovods

# Seconds in a wait for a mate (learner of the same super learner): until the first check whether the mate
# waits in an operation, between two such checks, and between two polls of the mate's counter.
_LATE_S, _AGAIN_S = 1.0, 0.1


class StepOrder:
    """Checks, while a step of one optimizer waits, that no learner waits in an operation for that step.

    Args:
        super_learner: the super learner whose learners step with the optimizer.
        number: returns the number of the optimizer's Averaging, equal on all learners.
        in_step: whether super learners wait for steps of each other.
        retire: called with the reason when this learner makes no more steps.

    Attributes:
        super_learner: see the arguments.
        begun: number of the step whose round was begun last.
        thread: the thread that makes this optimizer's steps.
    """

    def __init__(
        self,
        super_learner: SuperLearner,
        number: Callable[[], int],
        in_step: bool,
        retire: Callable[[str], None],
    ):
        self.begun = 0
        self._number = number
        self.super_learner, self._in_step, self._retire = super_learner, in_step, retire
        self.thread = threading.get_ident()

    def averaged_sets(self) -> Made:
        """Return the number of averaged sets of gradients, also of those whose step() was skipped.

        An entry of `Collectives.steps`.
        """
        return Made((self._number(), "sets"), self.thread, self.super_learner.mates.sets)

    def made(self) -> Made:
        """Return the number of steps; an entry of `Collectives.steps`."""
        return Made((self._number(), "steps"), self.thread, self.super_learner.step())

    def await_mates(self, are_averaged: Callable[[], bool]) -> None:
        """Wait until every learner of the super learner has submitted its gradients.

        Args:
            are_averaged: tells whether Horovod has finished with the gradients, with or without an error.

        Raises:
            CollectiveMismatchError: if a learner of the super learner never submits its gradients.
            LearnerFailedError: if it has entered shutdown().
        """
        mates, look = self.super_learner.mates, time.monotonic() + _LATE_S
        try:
            for _ in polls():
                if not (late := mates.late()) or are_averaged():
                    break
                self.super_learner.waits = True
                if time.monotonic() > look:
                    self._require_mates(late)
                    look = time.monotonic() + _AGAIN_S
        except ValueError:  # Horovod was shut down
            self.super_learner.require_whole()
            raise
        finally:
            self.super_learner.waits = False

    def _require_mates(self, late: list[int]) -> None:
        """Raise CollectiveMismatchError if a learner in `late` (inner ranks) never submits its gradients."""
        mates, world, step = (
            self.super_learner.mates,
            self.super_learner.world,
            self.super_learner.step(),
        )
        self.super_learner.require_whole()
        ranks = world.groups[world.super_rank]
        if ended := mates.have_ended(late):
            raise self.super_learner.ended_early(ended)
        for mate in mates.have_closed(late):
            raise horovods(CollectiveMismatchError)(
                f"step {step}, learner {world.rank}: learner {ranks[mate]}, of the same super "
                "learner, makes no more steps with this optimizer: it has closed it after "
                f"{mates.submitted_by(mate)} steps, or has left after an error (see its output). Make the "
                "same number of steps on all learners of a super learner, then close."
            )
        try:
            awaited = [ranks[mate] for mate in late]
            world.collectives.require_step(self.averaged_sets().of, mates.sets, awaited)
        except CollectiveMismatchError as error:
            # the round of this step needs that learner, so the round can never run
            if self._in_step:
                self._leave(error)
            raise horovods(CollectiveMismatchError)(*error.args) from None

    def require_step(self, peers: Collection[int] | None) -> None:
        """Raise CollectiveMismatchError if a peer of the round waits in an operation for this learner.

        Called again and again while the round waits; see Collectives.require_step.

        Args:
            peers: super_ranks of the super learners that the round waits for; None for all.
        """
        world = self.super_learner.world
        numbers = range(len(world.groups)) if peers is None else peers
        leaders = [world.groups[peer][0] for peer in numbers]
        try:
            world.collectives.require_step(self.made().of, self.begun, leaders)
        except CollectiveMismatchError as error:
            if world.inner_size > 1:  # the other learners of the super learner wait for this step
                self._leave(error)
            raise horovods(CollectiveMismatchError)(*error.args) from None

    def _leave(self, error: CollectiveMismatchError) -> None:
        """Let this learner make no more steps, and take part in no more operations over all learners."""
        self.super_learner.mates.closes()
        self._retire("a step and an operation waited for each other")
        self.super_learner.world.collectives.leave(error)
