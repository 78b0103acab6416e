"""Operations inside a super learner, as the script calls them, end with the error of its learners."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hvd_adpsgd.inner.horovod import HorovodInternalError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training.peer_watch import hear

F = TypeVar("F", bound=Callable[..., Any])


def told(operation: F) -> F:
    """Decorator: a failure of `operation` raises the error that ended this super learner, if there is one."""

    @functools.wraps(operation)
    def told(*args: Any, **kwargs: Any) -> Any:
        world = worlds.current()
        world.collectives.require_part(operation.__name__)
        try:
            return operation(*args, **kwargs)
        except (HorovodInternalError, ValueError):  # ValueError: Horovod was shut down
            hear(world)
            world.collectives.require_part(operation.__name__)
            raise

    return told  # type: ignore[return-value]
