"""What else in the process calls an averaging, from its start to its stop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from hvd_adpsgd.training.averaging import Averaging

__all__ = ["drop", "live", "live_on_all", "register", "stop_dropped"]

_live: list[Averaging] = []
_dropped: list[Averaging] = []


def live(also_stopping: bool = False) -> list[Averaging]:
    """The running averagings, oldest first; also those whose stop is due or under way, if asked for."""
    return [averaging for averaging in _live if also_stopping or not averaging.stopped]


def live_on_all() -> list[Averaging]:
    """As `live`, in the same state of the script on all learners: for what they do together.

    A wrapped optimizer is part of a reference cycle. One that the script has dropped lives on until the
    garbage collector runs, which is at another moment on each learner.
    """
    if _live:
        gc.collect()
        stop_dropped()
    return live()


def drop(averaging: Averaging) -> None:
    """The optimizer was garbage collected: `stop_dropped` stops its averaging later.

    The collector runs this on any thread, which may hold any lock or be one that `stop` waits for.
    """
    if not averaging.stopped:
        _dropped.append(averaging)
        averaging.retire("the optimizer was dropped")


def stop_dropped() -> None:
    """Stop the averagings whose optimizer was garbage collected; on a thread of the script."""
    with contextlib.suppress(IndexError):  # another thread stops them, too
        while True:
            _dropped.pop().stop()


def register(averaging: Averaging) -> None:
    """Have it called at shutdown, on SIGTERM, before and in operations, until it stops."""
    world, order, engines = averaging.world, averaging.order, averaging.engines
    entries: list[tuple[list[Any], Callable[..., Any]]] = [
        (world.membership.sources, engines.peer_news),
        (world.collectives.asked, averaging.super_learner.mates.asks),
        (world.collectives.steps, order.averaged_sets),
    ]
    if averaging.plan.in_step is not None:
        entries.append((world.collectives.before, averaging.catch_up))
        entries.append((world.collectives.steps, order.made))

    def forget() -> None:
        for called, mine in entries:
            _remove(called, mine)
        world.teardown.forget(averaging.stop)
        world.departure.forget(engines.depart)
        _remove(_live, averaging)
        _remove(_dropped, averaging)

    if stop_dropped not in world.collectives.before:
        world.collectives.before.append(stop_dropped)
    for called, mine in entries:
        called.append(mine)
    world.teardown.at_shutdown(averaging.stop)
    world.departure.at_leave(engines.depart)
    averaging.at_stop.append(forget)
    _live.append(averaging)


def _remove(items: list[Any], item: Any) -> None:
    """Remove it if it is there, in one step: another thread may do the same."""
    with contextlib.suppress(ValueError):
        items.remove(item)
