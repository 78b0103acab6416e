"""Who still lives, who does what rank 0 did, and what operations over all do without the lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.runtime import world as worlds

__all__ = ["failed_ranks", "is_coordinator", "on_failure"]

_CHOICES = ("continue", "raise")


def is_coordinator() -> bool:
    """Whether this learner is the first that lives: who saves and prints now.

    `if hvd.is_coordinator():` does what `if hvd.rank() == 0:` does, and passes on when that learner is
    lost, or another one of its super learner. Costs microseconds and waits for nobody; so for
    a moment after a loss (some 0.1 s) nobody may be the first.
    """
    world = worlds.current()
    ended = world.collectives.ended()
    gone = ended.union(world.membership.failed_ranks(ended))
    return world.rank == next((r for r in range(world.size) if r not in gone), world.rank)


def failed_ranks() -> tuple[int, ...]:
    """Ranks of the learners that have failed, with the others of their super learners; ascending.

    As far as this learner knows now; waits for nobody.
    """
    world = worlds.current()
    return world.membership.failed_ranks(world.collectives.ended())


@contextlib.contextmanager
def on_failure(what: str) -> Iterator[None]:
    """Inside, operations over all learners do this when some have failed; all learners enter it.

    With "continue" they are completed over the living (a mean is then that of fewer). With "raise"
    all that live get a PeerFailedError, as long as somebody is missing. Either way nobody hangs.
    HVD_ADPSGD_ON_FAILURE says what is done elsewhere.

    Args:
        what: "continue" or "raise".

    Raises:
        ConfigError: for another word.
    """
    if what not in _CHOICES:
        raise ConfigError(f"on_failure({what!r}): allowed are {' and '.join(map(repr, _CHOICES))}.")
    with worlds.current().collectives.instead(what):
        yield
