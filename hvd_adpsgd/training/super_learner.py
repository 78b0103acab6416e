"""Converts failures inside a super learner to LearnerFailedError, which is also a HorovodInternalError."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from horovod.torch import HorovodInternalError

from hvd_adpsgd.errors import AdpsgdError, LearnerFailedError, PeerFailedError
from hvd_adpsgd.lifecycle import preemption

if TYPE_CHECKING:
    from hvd_adpsgd.launch.world import World
    from hvd_adpsgd.training.averaging import Averaging

__all__ = ["horovods", "inner_failures", "inside_super_learner", "wrapping_failures"]


@contextlib.contextmanager
def inside_super_learner(averaging: Averaging) -> Iterator[None]:
    """Inside, operations need all learners of the super learner.

    If one of them has failed, the super learner leaves: its engine stops, and its peers count it as
    failed.

    Raises:
        LearnerFailedError: if a learner of this super learner has ended.
    """
    try:
        yield
    except HorovodInternalError as error:
        preemption.block_if_leaving()  # a learner that was sent SIGTERM has ended first
        failed = averaging.world.failed_inside(averaging.spec.config.deadline_s)
        if not failed and "shut down" not in str(error):
            raise
        raise _broken(averaging, failed) from None


def inner_failures(averaging: Averaging) -> contextlib.AbstractContextManager[None]:
    """Inside, the learners of the super learner meet over MPI.

    Raises:
        LearnerFailedError: if a learner of this super learner has ended.
    """
    seconds = averaging.spec.config.deadline_s
    return _if_a_learner_failed(averaging.world, seconds, lambda failed: _broken(averaging, failed))


def wrapping_failures(world: World, seconds: float) -> contextlib.AbstractContextManager[None]:
    """As inner_failures, where there is no engine yet.

    Args:
        world: of this learner.
        seconds: longest wait for MPI to report which learner has failed.
    """
    return _if_a_learner_failed(world, seconds, lambda failed: _leaves(world, "wrapping", failed))


@contextlib.contextmanager
def _if_a_learner_failed(
    world: World, seconds: float, error: Callable[[set[int]], AdpsgdError]
) -> Iterator[None]:
    """Raise `error` of the failed learners in place of a PeerFailedError, if this super learner has any."""
    try:
        yield
    except PeerFailedError:
        preemption.block_if_leaving()
        failed = world.failed_inside(seconds)
        if not failed:
            raise
        raise error(failed) from None


def _broken(averaging: Averaging, failed: set[int]) -> AdpsgdError:
    error = _leaves(averaging.world, f"step {averaging.step}", failed)
    averaging.stop("a learner of this super learner failed")
    return error


def _leaves(world: World, where: str, failed: set[int]) -> AdpsgdError:
    """The error of a super learner that is not whole: it takes no part in what the others do from now on."""
    who = f"learner {', '.join(map(str, sorted(failed)))}" if failed else "another learner"
    message = (
        f"{where}, learner {world.rank} of super learner {world.super_rank}: {who} of it has failed, so "
        "this super learner leaves, and the others train on without it. Start the job again from a "
        "checkpoint to have it back."
    )
    world.membership.fail([world.rank])
    world.collectives.leave(message)
    return horovods(LearnerFailedError)(message)


def horovods(error: type[AdpsgdError]) -> type[AdpsgdError]:
    """The error as one of Horovod's as well, so that code that catches HorovodInternalError still works."""
    plain = {"__module__": error.__module__, "__reduce__": lambda self: (error, self.args)}
    return type(error.__name__, (error, HorovodInternalError), plain)
