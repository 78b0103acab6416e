"""What needs every learner of the super learner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from horovod.torch import HorovodInternalError

from hvd_adpsgd.errors import LearnerFailedError

if TYPE_CHECKING:
    from hvd_adpsgd.torch.averaging import Averaging

__all__ = ["in_node"]


@contextlib.contextmanager
def in_node(averaging: Averaging) -> Iterator[None]:
    """What is done inside needs all learners of the super learner.

    Without one of them it leaves: its engine serves nobody any longer, and the others count it as
    failed.

    Raises:
        LearnerFailedError: if a learner of this super learner has ended.
    """
    try:
        yield
    except HorovodInternalError as error:
        failed = averaging.world.failed_in_node(averaging.spec.config.deadline_s)
        if not failed and "shut down" not in str(error):
            raise
        raise _broken(averaging, failed) from None


def _broken(averaging: Averaging, failed: set[int]) -> LearnerFailedError:
    world = averaging.world
    who = f"learner {', '.join(map(str, sorted(failed)))}" if failed else "another learner"
    message = (
        f"step {averaging.step}, learner {world.rank} of super learner {world.super_rank}: {who} of it "
        "has failed, so this super learner leaves, and the others train on without it. Start the job "
        "again from a checkpoint to have it back."
    )
    world.membership.fail([world.rank])
    averaging.stop("a learner of this super learner failed")
    return _LearnerFailedError(message)


class _LearnerFailedError(LearnerFailedError, HorovodInternalError):
    """Ours, which is Horovod's as well, so that what catches that goes on working."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LearnerFailedError, self.args


_LearnerFailedError.__name__ = _LearnerFailedError.__qualname__ = LearnerFailedError.__name__
_LearnerFailedError.__module__ = LearnerFailedError.__module__
