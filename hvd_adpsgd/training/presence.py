"""The averagings of this process: registered with shutdown, SIGTERM and collectives until they stop."""

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
    """Return the running averagings, oldest first; with `also_stopping` also those that are being stopped."""
    return [averaging for averaging in _live if also_stopping or not averaging.stopped]


def live_on_all() -> list[Averaging]:
    """Return the running averagings whose optimizers the script still holds, for operations of all learners.

    A wrapped optimizer is part of a reference cycle. If the script drops it, its averaging would stay in the
    list until the garbage collector runs, at a different moment on each learner; so this runs the collector.
    A weakness: learners that do not all hold the same optimizers get different lists.
    """
    if _live:
        gc.collect()
        stop_dropped()
    return live()


def drop(averaging: Averaging) -> None:
    """Queue the averaging of a garbage-collected optimizer for `stop_dropped`, which stops it later.

    The garbage collector may call this on any thread, one that holds a lock or that `Averaging.stop` waits
    for, so the averaging cannot be stopped here.
    """
    if not averaging.stopped:
        _dropped.append(averaging)
        averaging.retire("the optimizer was dropped")


def stop_dropped() -> None:
    """Stop the averagings whose optimizer was garbage collected; called on a thread of the script."""
    # pop() may find the list empty: another thread runs this, too
    with contextlib.suppress(IndexError):
        while True:
            _dropped.pop().stop()


def register(averaging: Averaging) -> None:
    """Register an averaging, until it stops, for calls at shutdown, on SIGTERM and around collectives."""
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
    """Remove `item` from a list that may lack it, as another thread may have removed it."""
    with contextlib.suppress(ValueError):
        items.remove(item)
