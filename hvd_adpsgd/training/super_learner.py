"""The learners of one super learner; turns waits for them that cannot end into errors.

A step waits for gradients of the other learners of the super learner, and, with strategies in step, for steps
of other super learners. An operation over all learners waits for all of them. Where one learner waits in a
step for another one that waits in an operation for the first, both raise CollectiveMismatchError. Where a
learner has failed, the others raise LearnerFailedError.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hvd_adpsgd.collectives import of_communicator
from hvd_adpsgd.collectives.collectives import Made
from hvd_adpsgd.engine.failures import mpi_failures
from hvd_adpsgd.errors import (
    AdpsgdError,
    CollectiveMismatchError,
    LearnerFailedError,
    NotInitializedError,
    PeerFailedError,
    QuorumLostError,
    WorldError,
)
from hvd_adpsgd.inner.horovod import HorovodInternalError
from hvd_adpsgd.launch.torch_group import abort_group
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle import preemption
from hvd_adpsgd.polling import polls
from hvd_adpsgd.training.mates import Mates

_LOOK_S = 0.05  # pause between two looks for failed learners
# Seconds in a wait for a local peer: until the first check whether it waits in an operation, and between two.
_LATE_S, _AGAIN_S = 1.0, 0.1
_FAILED = "a learner of this super learner failed"


class Steps(Protocol):
    """The steps of one optimizer, such as those of an Averaging: their number, and how they end.

    Attributes:
        number: number of the optimizer's Averaging, equal on all learners.
        step: number of steps made.
    """

    number: int
    step: int

    def retire(self, why: str) -> None: ...

    def stop(self, why: str) -> None: ...


class SuperLearner:
    """The learners that step together with one optimizer. Made by all of them together.

    If one of them fails, the super learner leaves the job: its engine stops, its peers count it as failed.

    Args:
        world: the World of this learner.
        steps: those that the learners make together.
        in_step: whether super learners wait for steps of each other.

    Attributes:
        world, steps: see the arguments.
        mates: how far the other learners are in gradients and operations.
        begun: number of the step whose round was begun last.
        thread: the thread that makes the steps.
        waits: whether this learner waits for gradients of the others.
        broken: the error that further steps raise, if another thread has found that none can be made.
        find_cause: sets `broken` if another learner has detected an error that ends this super learner.
    """

    def __init__(self, world: World, steps: Steps, in_step: bool = False):
        self.world, self.steps, self._in_step = world, steps, in_step
        self._look, self._failed = time.monotonic() + _LOOK_S, False
        self.begun, self.thread = 0, threading.get_ident()
        self.waits = False
        self.broken: AdpsgdError | None = None
        self.find_cause: Callable[[], object] = lambda: None
        with meeting_of(world, "averaging", "wrapping"):
            self.mates = Mates(world.inner, world.inner_rank)

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Context manager around Horovod's all-reduces: raises LearnerFailedError when a mate has failed.

        Raises:
            LearnerFailedError: if a learner of this super learner has ended.
            CollectiveMismatchError: if learners of this super learner wait for each other.
        """
        try:
            yield
        except ValueError:  # Horovod was shut down
            self.require_whole()
            raise
        except HorovodInternalError as error:
            self.require_whole()
            # on SIGTERM the mate ended first: block until this one ends, too
            preemption.block_if_leaving()
            ended = self.mates.have_closed(self.mates.late())
            is_over = "shut down" in str(error)
            if ended and is_over:
                raise self.ended_early(ended) from None
            failed = self.world.failed_inside(self.world.config.deadline_s)
            if not failed and not is_over:
                raise
            raise self._broken(failed) from None

    def require_whole(self) -> None:
        """Raise the error that ended this super learner, if one of its learners has detected one."""
        self.find_cause()
        if self.broken is not None:
            raise self.broken

    def has_failed(self) -> bool:
        """Whether a learner of this super learner has ended; looks at most 20 times a second."""
        if time.monotonic() > self._look:
            self._look = time.monotonic() + _LOOK_S
            self._failed = bool(self.world.failed_inside(0))
        return self._failed

    def require_alive(self) -> None:
        """Raise HorovodInternalError if a learner has ended; `reducing` makes it a LearnerFailedError."""
        if self._failed:
            raise HorovodInternalError("a learner of the super learner has ended")

    def meeting(self, doing: str) -> AbstractContextManager[None]:
        """Return a context manager as `meeting_of`, which stops the averaging before it raises."""
        return meeting_of(self.world, doing, f"step {self.steps.step}", self.steps.stop)

    def barrier(self) -> None:
        """Wait until all learners of the super learner have entered this barrier."""
        with self.meeting("in the super learner"):
            of_communicator.barrier(self.world.inner)

    def _broken(self, failed: set[int]) -> AdpsgdError:
        error = leaves(self.world, f"step {self.steps.step}", failed)
        self.steps.stop(_FAILED)
        return error

    def ended_early(self, peers: Sequence[int]) -> AdpsgdError:
        """Let the super learner leave, as local peers (inner ranks) have ended; return the error to raise."""
        steps = self.mates.submitted_by(peers[0])
        error = leaves_early(
            self.world, f"step {self.steps.step}", peers[0], f" after {steps} steps"
        )
        self.steps.stop("a learner of this super learner has ended its training")
        return error

    def require_joined(self, also_before: bool = False) -> None:
        """Raise if this learner may not step: after a join() that raised, or before its first hvd.admit.

        Args:
            also_before: whether a super learner that has not joined the job yet passes this check.
        """
        if self.mates.is_away:
            raise WorldError(
                "join() was not completed on this learner, because it raised: the other learners of its "
                "super learner do not wait for its gradients any more. Save the model, and start the job "
                "again."
            )
        if self.world.collectives.joining and not also_before:
            raise NotInitializedError(
                "this super learner has not joined the job yet: call hvd.admit(model, optimizer) before "
                "the first step."
            )

    def note_quorum(self) -> None:
        """Record a lost quorum in `mates`, for all learners, before a gradient of the step is submitted."""
        if self._is_minority:
            self.mates.loses_quorum()

    @property
    def _is_minority(self) -> bool:
        return self.world.config.quorum is not None and self.world.membership.is_minority

    def require_quorum(self) -> None:
        """Raise QuorumLostError, after a step's all-reduce, if this super learner is in a minority.

        Raises:
            QuorumLostError: on all learners of the super learner, with HVD_ADPSGD_QUORUM=majority.
        """
        alone = self.world.inner_size == 1
        if self._is_minority if alone else self.mates.lack_quorum:
            raise QuorumLostError(
                f"step {self.steps.step}, super learner {self.world.super_rank}: half or more of the "
                "super learners have failed, or a cut network hides them, and HVD_ADPSGD_QUORUM is majority. "
                "The model is that before this step: save a checkpoint and exit. Start the job again from "
                "the newest one."
            )

    def averaged_sets(self) -> Made:
        """Return the number of averaged sets of gradients, also of those whose step() was skipped.

        An entry of `Collectives.steps`.
        """
        return Made((self.steps.number, "sets"), self.thread, self.mates.sets)

    def made(self) -> Made:
        """Return the number of steps; an entry of `Collectives.steps`."""
        return Made((self.steps.number, "steps"), self.thread, self.steps.step)

    def await_mates(self, are_averaged: Callable[[], bool]) -> None:
        """Wait until every learner of the super learner has submitted its gradients.

        Args:
            are_averaged: tells whether Horovod has finished with the gradients, with or without an error.

        Raises:
            CollectiveMismatchError: if a learner of the super learner never submits its gradients.
            LearnerFailedError: if it has entered shutdown().
        """
        look = time.monotonic() + _LATE_S
        try:
            for _ in polls():
                if not (late := self.mates.late()) or are_averaged():
                    break
                self.waits = True
                if time.monotonic() > look:
                    self._require_mates(late)
                    look = time.monotonic() + _AGAIN_S
        except ValueError:  # Horovod was shut down
            self.require_whole()
            raise
        finally:
            self.waits = False

    def _require_mates(self, late: list[int]) -> None:
        """Raise CollectiveMismatchError if a learner in `late` (inner ranks) never submits its gradients."""
        mates, world = self.mates, self.world
        self.require_whole()
        ranks = world.groups[world.super_rank]
        if ended := mates.have_ended(late):
            raise self.ended_early(ended)
        for mate in mates.have_closed(late):
            raise horovods(CollectiveMismatchError)(
                f"step {self.steps.step}, learner {world.rank}: learner {ranks[mate]}, of the same super "
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
                self._withdraw(error)
            raise horovods(CollectiveMismatchError)(*error.args) from None

    def require_step(self, peers: Collection[int] | None) -> None:
        """Raise CollectiveMismatchError if a peer of the round waits in an operation for this learner.

        Called again and again while the round waits; see Collectives.require_step.

        Args:
            peers: super_ranks of the super learners that the round waits for; None for all.
        """
        world = self.world
        numbers = range(len(world.groups)) if peers is None else peers
        leaders = [world.groups[peer][0] for peer in numbers]
        try:
            world.collectives.require_step(self.made().of, self.begun, leaders)
        except CollectiveMismatchError as error:
            if world.inner_size > 1:  # the other learners of the super learner wait for this step
                self._withdraw(error)
            raise horovods(CollectiveMismatchError)(*error.args) from None

    def _withdraw(self, error: CollectiveMismatchError) -> None:
        """Let this learner make no more steps, and take part in no more operations over all learners."""
        self.mates.closes()
        self.steps.retire("a step and an operation waited for each other")
        self.world.collectives.leave(error)


@contextlib.contextmanager
def meeting_of(
    world: World, doing: str, where: str, stop: Callable[[str], object] = bool
) -> Iterator[None]:
    """Context manager around MPI collectives in the super learner; `doing` and `where` are for messages.

    Raises:
        LearnerFailedError: if a learner of this super learner has ended, after a call of `stop(reason)`.
    """
    try:
        with mpi_failures(doing):
            yield
    except PeerFailedError:
        preemption.block_if_leaving()
        # MPI reports within that time which learner has failed
        if not (failed := world.failed_inside(world.config.deadline_s)):
            raise
        error = leaves(world, where, failed)
        stop(_FAILED)
        raise error from None


def leaves(world: World, where: str, failed: set[int]) -> AdpsgdError:
    """Let this super learner, of which a learner has failed, leave the job; return the error to raise."""
    who = f"learner {', '.join(map(str, sorted(failed)))}" if failed else "another learner"
    rest = "no other trains" if world.membership.is_alone else "the others train on without it"
    message = (
        f"{where}, learner {world.rank} of super learner {world.super_rank}: {who} of it has failed, so "
        f"this super learner leaves, and {rest}. Start the job again from a "
        "checkpoint to have it back, unless its script calls hvd.admit, which replaces it."
    )
    return _leave(world, message)


def leaves_early(world: World, where: str, peer: int, after: str = "") -> AdpsgdError:
    """Let this super learner leave the job, as a local peer does not wait for it; return the error to raise.

    Args:
        world: the World of this learner.
        where: what is under way, for messages.
        peer: inner rank of a learner whose script has ended, or that has called shutdown().
        after: how far that learner has come, for messages.
    """
    message = (
        f"{where}, learner {world.rank}: learner {world.groups[world.super_rank][peer]}, of the same super "
        f"learner, has ended its training{after} (its script has ended or failed, or it called "
        "hvd.shutdown()), and this one waits for it, so the super learner leaves. Make the same number of "
        "steps on all learners of a super learner; or call hvd.join() after the last step, if this library "
        "averages the gradients."
    )
    return _leave(world, message)


def _leave(world: World, message: str) -> AdpsgdError:
    abort_group(world)  # else this process would wait for its GPU as it ends
    world.membership.fail([world.rank])
    error = horovods(LearnerFailedError)(message)
    world.collectives.leave(error)
    return error


def horovods(error: type[AdpsgdError]) -> type[AdpsgdError]:
    """Return a subclass of `error` that code which catches HorovodInternalError catches, too."""
    plain = {"__module__": error.__module__, "__reduce__": lambda self: (error, self.args)}
    return type(error.__name__, (error, HorovodInternalError), plain)
