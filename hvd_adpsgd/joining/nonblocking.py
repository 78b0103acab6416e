"""Whether learners meet in hvd.admit, if its calls do not wait for each other."""

import contextlib
import time

import torch

from hvd_adpsgd.collectives.call import Call
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.joining.callbacks import are_registered
from hvd_adpsgd.joining.candidates import join_server
from hvd_adpsgd.joining.meetings import Messages
from hvd_adpsgd.joining.replacements import lost, starters
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.inside import told
from hvd_adpsgd.training.presence import live

_LOOK_S = 1e-2  # between two looks for what the others say
_LOOKS = 5  # looks in which others wait in an operation; it is not this meeting if there are more


def meets(world: World, doing: str) -> bool:
    """Return whether all learners meet now, in operation `doing`; see joining/meetings on the waits.

    All learners of a super learner call this together, and get the same result.

    Args:
        world: the World of this learner.
        doing: name of the operation.
    """
    is_called = world.is_leader and _is_called(world, doing)
    if world.inner_size > 1:
        is_called = _as_leader(world, is_called)
    if not is_called:
        return False
    # gives way to another operation that a learner waits in, as the script calls both
    call = Call(doing, name="blocking=False", yields=True)
    with world.collectives.instead("continue"):
        return world.collectives.run(call, lambda attempt: True) is not None


def have_met(world: World) -> None:
    """Note the end of a meeting; all learners call this after the last operation of hvd.admit."""
    join_server(world).meetings.met(world.collectives.number)


def waits_anyway() -> bool:
    """Whether super learners wait for each other's steps, so that all must call admit after the same step."""
    return any(averaging.plan.in_step is not None for averaging in live())


def _is_called(world: World, doing: str) -> bool:
    here, collectives = join_server(world), world.collectives
    mine = list(here.candidates)
    states, next_one = {one.state() for one in mine}, len(world.groups)
    awaits = any(one.number == next_one for one in mine)
    failed = set(world.membership.failed_ranks())

    def talk(living: set[int], heard: Messages) -> tuple[bool, Messages]:
        awaited = awaits or here.elsewhere.get(next_one) in living
        acts = not states.isdisjoint(("ready", "failed")) or (
            "requesting" in states and not awaited
        )
        gone = set(lost(world.groups, (living - failed) | collectives.finished()))
        new = set() if gone <= here.known else gone
        if not are_registered():  # nobody but a replacement needs to know of failures
            new &= _startable(world, living - failed)
        leaders = _leaders(world, living - failed)
        # learners that have failed with a mate cannot meet, and are waited for until they end
        ending = any(failed.intersection(its) and living.intersection(its) for its in world.groups)
        first = acts or here.again or world.rank == min(leaders, default=world.rank)
        wants = bool(acts or here.again or new) and not ending
        others = leaders - {world.rank}
        return here.meetings.called(time.monotonic(), others, heard, wants, first, time.time())

    return collectives.confer(doing, talk) or _are_all_in(world, doing)


def _are_all_in(world: World, doing: str) -> bool:
    """Wait for the others as long as the Meetings tell; return whether the meeting begins."""
    state, collectives = join_server(world).meetings, world.collectives
    looks = 0  # in which another learner has waited in an operation that may be this meeting
    is_between = True

    def go_on(living: set[int], heard: Messages) -> tuple[bool, Messages]:
        nonlocal looks, is_between
        is_between = True
        looks += collectives.is_awaited
        others = _leaders(world, living.difference(world.membership.failed_ranks())) - {world.rank}
        return state.waited(time.monotonic(), others, heard, gives_way=looks > _LOOKS)

    begins = False
    while not begins and state.waits and is_between:
        time.sleep(_LOOK_S)
        is_between = False  # where another thread runs an operation, to which this one gives way
        begins = collectives.confer(doing, go_on)
    return begins


def _leaders(world: World, living: set[int]) -> set[int]:
    return {group[0] for group in world.groups if group[0] in living}


def _startable(world: World, living: set[int]) -> set[int]:
    """Return the super_ranks of lost super learners for which some host has slots."""
    its = starters(world.placements, world.groups, living, {}, world.config.spare_slots)
    return set(its)


def _as_leader(world: World, flag: bool) -> bool:
    """Return the flag of the leader, on all learners of the super learner."""
    world.collectives.asks()
    with contextlib.ExitStack() as stack:
        for averaging in live()[:1]:
            stack.enter_context(averaging.super_learner.reducing())
        leaders = told(horovod.broadcast)(
            torch.tensor([flag], dtype=torch.uint8, device="cpu"), 0, "hvd_adpsgd.admit"
        )
    return bool(leaders.item())
