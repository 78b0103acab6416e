"""The learners of one super learner; turns the failure of one of them into a LearnerFailedError."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from hvd_adpsgd.collectives import of_communicator
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.failures import mpi_failures
from hvd_adpsgd.errors import (
    AdpsgdError,
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
from hvd_adpsgd.training.gradients import Replacements
from hvd_adpsgd.training.mates import Mates

_LOOK_S = 0.05  # pause between two looks for failed learners


class SuperLearner:
    """The learners that step together with one optimizer. Made by all of them together.

    If one of them fails, the super learner leaves the job: its engine stops, its peers count it as failed.

    Args:
        world: the World of this learner.
        config: the options of the optimizer.
        step: returns the number of steps made.
        stop: stops the averaging; called with the reason.

    Attributes:
        world, step: see the arguments.
        mates: how far the other learners are in gradients and operations.
        replacements: compares, between the learners, the gradients that the script set in place of averages.
        waits: whether this learner waits for gradients of the others.
        broken: the error that further steps raise, if another thread has found that none can be made.
        find_cause: sets `broken` if another learner has detected an error that ends this super learner.
    """

    def __init__(
        self, world: World, config: Config, step: Callable[[], int], stop: Callable[[str], None]
    ):
        self.world, self.step = world, step
        self._look, self._failed = time.monotonic() + _LOOK_S, False
        self._deadline_s, self._quorum, self._stop = config.deadline_s, config.quorum, stop
        self.waits = False
        self.broken: AdpsgdError | None = None
        self.find_cause: Callable[[], object] = lambda: None
        with meeting_of(world, "averaging", "wrapping"):
            self.mates = Mates(world.inner, world.inner_rank)
            self.replacements = Replacements(world.inner, world.inner_rank)

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
            failed = self.world.failed_inside(self._deadline_s)
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

    @contextlib.contextmanager
    def meeting(self, doing: str) -> Iterator[None]:
        """Context manager around MPI collectives in the super learner; `doing` names them in messages.

        Raises:
            LearnerFailedError: if a learner of this super learner has ended.
        """
        with _if_a_learner_failed(self.world, self._deadline_s, self._broken), mpi_failures(doing):
            yield

    def barrier(self) -> None:
        """Wait until all learners of the super learner have entered this barrier."""
        with self.meeting("in the super learner"):
            of_communicator.barrier(self.world.inner)

    def _broken(self, failed: set[int]) -> AdpsgdError:
        error = leaves(self.world, f"step {self.step()}", failed)
        self._stop("a learner of this super learner failed")
        return error

    def ended_early(self, peers: Sequence[int]) -> AdpsgdError:
        """Let the super learner leave, as local peers (inner ranks) have ended; return the error to raise."""
        steps = self.mates.submitted_by(peers[0])
        error = leaves_early(self.world, f"step {self.step()}", peers[0], f" after {steps} steps")
        self._stop("a learner of this super learner has ended its training")
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
        return self._quorum is not None and self.world.membership.is_minority

    def require_quorum(self) -> None:
        """Raise QuorumLostError, after a step's all-reduce, if this super learner is in a minority.

        Raises:
            QuorumLostError: on all learners of the super learner, with HVD_ADPSGD_QUORUM=majority.
        """
        alone = self.world.inner_size == 1
        if self._is_minority if alone else self.mates.lack_quorum:
            raise QuorumLostError(
                f"step {self.step()}, super learner {self.world.super_rank}: half or more of the "
                "super learners have failed, or a cut network hides them, and HVD_ADPSGD_QUORUM is majority. "
                "The model is that before this step: save a checkpoint and exit. Start the job again from "
                "the newest one."
            )


@contextlib.contextmanager
def meeting_of(world: World, doing: str, where: str) -> Iterator[None]:
    """As `SuperLearner.meeting`, where there may be no wrapped optimizer; `where` is for messages, too."""
    seconds = world.config.deadline_s  # until MPI reports which learner has failed
    broken = _if_a_learner_failed(world, seconds, lambda failed: leaves(world, where, failed))
    with broken, mpi_failures(doing):
        yield


@contextlib.contextmanager
def _if_a_learner_failed(
    world: World, seconds: float, error: Callable[[set[int]], AdpsgdError]
) -> Iterator[None]:
    """Raise `error(ranks)` in place of a PeerFailedError if learners of this super learner have failed."""
    try:
        yield
    except PeerFailedError:
        preemption.block_if_leaving()
        failed = world.failed_inside(seconds)
        if not failed:
            raise
        raise error(failed) from None


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
