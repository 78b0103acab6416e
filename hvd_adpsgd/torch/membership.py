"""Failed ranks, the coordinator, what collectives do after a failure."""

import contextlib
from collections.abc import Iterator

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch import world as worlds

_CHOICES = ("continue", "raise")


def is_coordinator() -> bool:
    """Whether this learner is the first surviving learner, which should save checkpoints and print.

    Use `if hvd.is_coordinator():` in place of `if hvd.rank() == 0:`. When a learner of the coordinator's
    super learner fails, the first surviving learner becomes coordinator. The call takes microseconds and does
    not block, so for about 0.1 s after a failure there may be no coordinator.
    """
    world = worlds.current()
    ended = world.collectives.ended()
    gone = ended.union(world.failed_ranks())
    # if no super learner is complete, the first surviving learner
    everyone = set(range(world.size))
    return world.rank == min(everyone - gone or everyone - ended)


def failed_ranks() -> tuple[int, ...]:
    """Return the ranks of all learners of failed super learners, ascending.

    Failures that this learner does not know yet are not included; the call does not block.
    """
    return worlds.current().failed_ranks()


@contextlib.contextmanager
def on_failure(what: str) -> Iterator[None]:
    """Set what operations over all learners do after a failure; all learners enter the block together.

    With "continue" operations run over the surviving learners, and a mean is the mean of fewer models. With
    "raise" operations raise PeerFailedError on all surviving learners until the failed ones are replaced. No
    operation hangs in either case. Outside a block HVD_ADPSGD_ON_FAILURE applies.

    Args:
        what: "continue" or "raise".

    Raises:
        ConfigError: for another word.
    """
    if what not in _CHOICES:
        allowed = " and ".join(map(repr, _CHOICES))
        raise ConfigError(f"on_failure({what!r}): allowed are {allowed}. Pass one of these.")
    with worlds.current().collectives.instead(what):
        yield
