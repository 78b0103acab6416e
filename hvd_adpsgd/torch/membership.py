"""Who still lives, who does what rank 0 did, and what operations over all do without the lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.runtime import world as worlds

__all__ = ["is_first", "lost_learners", "on_loss"]

_CHOICES = ("go_on", "raise")


def is_first() -> bool:
    """Whether this learner is the first that lives: who saves and prints now.

    `if hvd.is_first():` does what `if hvd.rank() == 0:` does, and passes on when that learner is
    lost, or another one of its super learner. Costs microseconds and waits for nobody; so for
    a moment after a loss (some 0.1 s) nobody may be the first.
    """
    world = worlds.current()
    lost = set(world.lost())
    return world.rank == next((r for r in range(world.size) if r not in lost), world.rank)


def lost_learners() -> tuple[int, ...]:
    """Ranks of the learners that are lost, with the others of their super learners; ascending.

    As far as this learner knows now; waits for nobody.
    """
    return worlds.current().lost()


@contextlib.contextmanager
def on_loss(what: str) -> Iterator[None]:
    """Inside, operations over all learners do this when some are lost; all learners enter it.

    With "go_on" they are completed over the living (a mean is then that of fewer). With "raise"
    all that live get a PeerLostError, as long as somebody is missing. Either way nobody hangs.
    HVD_ADPSGD_ON_LOSS says what is done elsewhere.

    Args:
        what: "go_on" or "raise".

    Raises:
        ConfigError: for another word.
    """
    if what not in _CHOICES:
        raise ConfigError(f"on_loss({what!r}): allowed are {' and '.join(map(repr, _CHOICES))}.")
    world = worlds.current()
    before, world.on_loss = world.on_loss, what
    try:
        yield
    finally:
        world.on_loss = before
