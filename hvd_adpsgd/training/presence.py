"""The Averaging of each optimizer in this process: registered with shutdown, SIGTERM and collectives."""

import contextlib
import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.averaging import Averaging

log = logging.getLogger("hvd_adpsgd")

_live: list[Averaging] = []
_dropped: list[Averaging] = []


def live(also_stopping: bool = False) -> list[Averaging]:
    """Return each optimizer's running Averaging, oldest first; `also_stopping` adds those being stopped."""
    return [averaging for averaging in _live if also_stopping or not averaging.stopped]


def stop_unreferenced() -> None:
    """Stop the averaging of optimizers that the script has dropped.

    An optimizer may be part of a reference cycle of the script's. If the script drops it, its averaging runs
    on until the garbage collector finds the cycle, at a different moment on each learner; so this runs the
    collector, which takes tenths of a second.
    """
    gc.collect()
    stop_dropped()


@contextlib.contextmanager
def held(world: World, doing: str, by_job: bool = False) -> Iterator[list[Averaging]]:
    """Yield the Averaging of each optimizer that all learners of this super learner hold, oldest first.

    For operations over all learners, all of which enter the `with` block together. An averaging ends in a
    super learner with the first of its learners that drops the optimizer: it is stopped here, too. Inside the
    block no optimizer is freed.

    Args:
        world: the World of this learner.
        doing: name of the operation, for messages.
        by_job: whether all learners of the job must hold an optimizer, not only those of the super learner.
    """
    # where learners differ, the garbage of some may not have been collected
    for stop in (stop_dropped, stop_unreferenced):
        optimizers: list[Any] = []
        stop()
        own = live()
        optimizers = [averaging.optimizer() for averaging in own]  # keeps the optimizers alive
        held_by = world.collectives.gather(doing, (world.super_rank, [a.number for a in own]))
        if all(numbers == held_by[0][1] for _, numbers in held_by):
            break
    concerned = [
        set(numbers) for super_rank, numbers in held_by if by_job or super_rank == world.super_rank
    ]
    common = set.intersection(*concerned)
    for averaging in own:
        if averaging.number not in common:
            stop_as_dropped(averaging, doing)
    yield [averaging for averaging in own if averaging.number in common]
    del optimizers


def stop_as_dropped(averaging: Averaging, doing: str) -> None:
    """Stop the Averaging of an optimizer that another learner has dropped; `doing` names the operation."""
    log.warning(
        "%s: another learner has dropped its optimizer of %s, so this one stops averaging, too. Drop an "
        "optimizer on all learners, or on none.",
        doing,
        first_name(averaging),
    )
    averaging.super_learner.mates.closes()
    averaging.stop("another learner dropped its optimizer")


def first_name(averaging: Averaging) -> str:
    """Return the name of the first parameter that the optimizer trains, for messages."""
    return next(iter(averaging.spec.trained), ("no parameters", None))[0]


def new_number(world: World) -> int:
    """Return a number for the next optimizer's Averaging, equal on all learners, which call this together."""
    told = world.collectives.gather("averaging", [averaging.number for averaging in _live])
    return max(itertools.chain(*told), default=-1) + 1


def order_as(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Order the running averagings as their optimizers in this list; all others follow, by age.

    The job's learners may have wrapped their optimizers in another order than a joining learner.
    """
    places = {id(optimizer): place for place, optimizer in enumerate(optimizers)}
    _live.sort(key=lambda averaging: places.get(id(averaging.optimizer()), len(places)))


def renumber() -> None:
    """Number the Averaging of each optimizer in `live`'s order: a joining learner has numbered from 0."""
    for number, averaging in enumerate(live()):
        averaging.number = number


def drop(averaging: Averaging) -> None:
    """Queue the Averaging of a garbage-collected optimizer for `stop_dropped`, which stops it later.

    The garbage collector may call this on any thread, one that holds a lock or that `Averaging.stop` waits
    for, so the averaging cannot be stopped here.
    """
    if not averaging.stopped:
        averaging.super_learner.mates.closes()
        _dropped.append(averaging)
        averaging.retire("the optimizer was dropped")


def stop_dropped() -> None:
    """Stop the averaging of garbage-collected optimizers; called on a thread of the script."""
    # pop() may find the list empty: another thread runs this, too
    with contextlib.suppress(IndexError):
        while True:
            _dropped.pop().stop()


def register(averaging: Averaging) -> None:
    """Register an Averaging, until it stops, for calls at shutdown, on SIGTERM and around collectives."""
    world, inner, engines = averaging.world, averaging.super_learner, averaging.engines
    entries: list[tuple[list[Any], Callable[..., Any]]] = [
        (world.membership.sources, engines.peer_news),
        (world.collectives.asked, inner.mates.asks),
        (world.collectives.steps, inner.averaged_sets),
    ]
    if averaging.plan.in_step is not None:
        entries.append((world.collectives.before, averaging.catch_up))
        entries.append((world.collectives.steps, inner.made))

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
