"""`admit`: super learners that replace failed ones, and new ones, join a job that runs."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.errors import AdpsgdError, ConfigError, PeerFailedError
from hvd_adpsgd.joining import joining, meeting
from hvd_adpsgd.joining.meeting import MEETING_S, Gather, Merged
from hvd_adpsgd.joining.newcomers import (
    Invitation,
    Knock,
    Newcomer,
    Reception,
    open_own_door,
    reception,
)
from hvd_adpsgd.joining.replacements import is_minority, lost, starters
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle.shutdown import exit_state
from hvd_adpsgd.torch.membership import on_failure, tell_membership
from hvd_adpsgd.training.averaging import live
from hvd_adpsgd.training.join_state import JoinState, pack, shares, terms, unpack
from hvd_adpsgd.training.model_average import mean_model
from hvd_adpsgd.training.pausing import averaging_paused, resume

__all__ = ["admit", "replace_failed"]

log = logging.getLogger("hvd_adpsgd")

DOING = "admit"
GIVERS = 4  # super learners that send a newcomer the model, at most
ATTEMPTS = 3  # failed starts, after which a super learner is not replaced

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def admit(
    model: torch.nn.Module,
    optimizer: Optimizers,
    state: Any = None,
    *,
    patience_s: float = 120.0,
) -> Any:
    """Replace failed super learners, and let new ones in; all learners call this, once per epoch.

        epoch = hvd.admit(model, optimizer, state=0)
        while epoch < epochs:
            train(...)
            epoch = hvd.admit(model, optimizer, state=epoch + 1)

    The first call after a failure starts a super learner with the command line of this one, and returns
    at once. It joins in the first later call that finds it ready. It runs the script from the top, with the
    ranks of the failed one, up to its own first call of this function. That call returns `state`, and sets
    the exact mean of the models of all others and the optimizer state of one of them. Before it, operations
    over all learners (broadcast_parameters, ...) run in the new super learner alone.

    Super learners that were not there at the start join in the same way: see HVD_ADPSGD_JOIN in
    docs/failures.md. size() and super_size() grow.

    Waits for the slowest super learner, as average_model does, also where nobody comes. Call it between
    steps. One super learner joins per call. If it cannot be started or fails before it joins, training
    continues, the log states the reason, and another one is started: three attempts in all.

    A call starts one super learner per host at most, in the slots of failed learners of that host; those of a
    lost host need HVD_ADPSGD_SPARE_SLOTS. Learners that may be the smaller side of a cut network start none.

    Args:
        model: the same module on every learner. The models of those that are there are not changed.
        optimizer: the wrapped optimizer, or several.
        state: a picklable value for a joining learner, such as the epoch. Each call packs it.
        patience_s: seconds from the start of a super learner until it must call this function.

    Returns:
        `state`; on a joining learner that of the others.

    Raises:
        ConfigError: on all learners, if `state` of one cannot be pickled.
        PeerFailedError: if a learner of this super learner has failed, or, on a joining learner, all others.
        SystemExit: on a joining learner, with status 0, if the job ends before it joins.
    """
    world = worlds.current()
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if world.collectives.joining:
        state = _arrive(world, model, optimizers)
        tell_membership(worlds.current(), joined=True)
        return state
    if world.is_plain:
        return state
    with on_failure("continue"):
        packed, problem = _packed(state)
        chosen = _survey(world, patience_s, problem)
        if chosen is not None:
            _admit(world, chosen, model, optimizers, packed)
    tell_membership(worlds.current(), joined=False)
    return state


replace_failed = admit  # its former name


# ---- on learners of the job --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Coming:
    """What a learner tells of one of its newcomers.

    Attributes:
        number, state, knock: as of Newcomer.
        rank: of the learner.
    """

    number: int | None
    state: str
    knock: Knock | None
    rank: int


_failures: dict[int, int] = {}  # by super_rank
_said: set[str] = set()  # warnings
_left: set[int] = set()  # super learners that have left, and are not replaced yet
_joined: set[int] = set()  # in the call before: whether they live is not known yet


def _packed(state: Any) -> tuple[bytes, str]:
    """The state for a joining learner, and why it has none: known before a learner depends on it."""
    try:
        return pack(state), ""
    except Exception as error:  # pickle's, of many kinds, and those of the state's classes
        return b"", f"{type(error).__name__}: {error}"


def _survey(world: World, patience_s: float, problem: str) -> _Coming | None:
    """Start what is missing, give numbers to those that knock; the newcomer that is ready, if any."""
    here = reception(world)
    mine = list(here.newcomers)
    states = [newcomer.state() for newcomer in mine]
    own = [_Coming(n.number, s, n.knock, world.rank) for n, s in zip(mine, states, strict=True)]
    told = world.collectives.gather(DOING, (own, problem and f"on learner {world.rank}: {problem}"))
    _require_whole(world)
    for _, where in told:
        if where:
            raise ConfigError(
                f"{DOING}(state=...) cannot be pickled for a joining learner, {where}. Pass numbers, texts, "
                "tensors, and dicts and lists of these, as scheduler.state_dict()."
            )
    _judge_joined(world)
    coming = [one for each, _ in told for one in each if one.rank in world.collectives.ranks]
    for newcomer, state in zip(mine, states, strict=True):
        if state == "failed":
            _give_up(here, newcomer)
    awaited = {
        one.number: one.rank
        for one in coming
        if one.number is not None and one.state in ("starting", "ready")
    }
    _start_one(here, world, awaited, patience_s)
    _give_number(world, mine, coming, set(awaited), patience_s)
    ready = [one for one in coming if one.state == "ready"]
    return min(ready, key=lambda one: (one.number, one.rank)) if ready else None


def _judge_joined(world: World) -> None:
    """One that has failed directly after it joined counts as a failed start; one that lives begins anew."""
    failed = set(lost(world.groups, world.collectives.ranks))
    for number in _joined:
        if number in failed:
            more = _count_failure(number)
            if world.rank == min(world.collectives.ranks):
                log.error("super learner %d failed directly after it had joined%s.", number, more)
        else:
            _failures.pop(number, None)
    _joined.clear()


def _count_failure(number: int) -> str:
    """Count it; what the log says of further attempts."""
    _failures[number] = _failures.get(number, 0) + 1
    if _failures[number] < ATTEMPTS:
        return ""
    return f"; no more after {ATTEMPTS} attempts"


def _require_whole(world: World) -> None:
    missing = sorted(set(world.groups[world.super_rank]) - set(world.collectives.ranks))
    if missing:
        raise PeerFailedError(
            f"{DOING}: learners {missing} of this super learner {world.super_rank} have failed, and it "
            "cannot continue without them. Its peers start another one in its place."
        )


def _start_one(here: Reception, world: World, awaited: dict[int, int], patience_s: float) -> None:
    """Start the first replacement that this learner is to start; each host has one learner that does."""
    living = world.collectives.ranks
    gone = lost(world.groups, living)
    _left.intersection_update(gone)
    _left.update(i for i in gone if world.membership.have_left(world.groups[i]))
    missing = [i for i in gone if i not in awaited]
    if not missing:
        return
    if is_minority(world.placements, world.groups, living, _left):
        _say_once(
            world,
            f"super learners {missing} are not replaced: the network may be cut, and the {len(living)} "
            "learners here are not the larger side, which may train on.",
        )
        return
    known = {i: rank for i, rank in awaited.items() if i < len(world.groups)}
    plan = starters(world.placements, world.groups, living, known, world.config.spare_slots)
    for number in missing:
        if number not in plan:
            _say_once(
                world,
                f"super learner {number} is not replaced: its host is lost, and no other one has slots for "
                f"{len(world.groups[number])} more learners (HVD_ADPSGD_SPARE_SLOTS="
                f"{world.config.spare_slots}).",
            )
    for number, rank in plan.items():
        if rank == world.rank and _failures.get(number, 0) < ATTEMPTS:
            log.warning("super learner %d is gone; starting another one in its place.", number)
            here.start(world, number, terms(), patience_s)
            return


def _say_once(world: World, line: str) -> None:
    """A warning of the first surviving learner."""
    if world.rank == min(world.collectives.ranks) and line not in _said:
        _said.add(line)
        log.warning("%s", line)


def _give_number(
    world: World,
    mine: list[Newcomer],
    coming: list[_Coming],
    awaited: set[int],
    patience_s: float,
) -> None:
    """Invite the first that knocks, if no other one is on its way to be a new super learner."""
    knocking = [one for one in coming if one.state == "knocking"]
    number = len(world.groups)
    if not knocking or number in awaited or knocking[0].rank != world.rank:
        return
    newcomer = next(n for n in mine if n.number is None)
    ends = time.monotonic() + patience_s
    newcomer.expect(Invitation.of(world, number, newcomer.knock, world.rank), terms(), ends)
    newcomer.invite()


def _give_up(here: Reception, newcomer: Newcomer) -> None:
    here.remove(newcomer)
    newcomer.dismiss(why=newcomer.problem)
    number = newcomer.number
    if number is None:
        return
    log.error(
        "super learner %d has not joined: %s. Training continues%s.",
        number,
        newcomer.problem,
        _count_failure(number),
    )


def _admit(
    world: World,
    chosen: _Coming,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: bytes,
) -> None:
    """Meet the newcomer, and give it the state; go on without it if it fails."""
    here, newcomer = reception(world), None
    if chosen.rank == world.rank:
        newcomer = next(n for n in here.newcomers if n.number == chosen.number and n.knock)
    assert chosen.number is not None and chosen.knock is not None
    invitation = Invitation.of(world, chosen.number, chosen.knock, chosen.rank)
    givers = _givers(world, chosen.rank)
    share = shares(model, len(givers))[givers.index(world.rank)] if world.rank in givers else ()
    with averaging_paused():
        values = mean_model(model, share)
        data = _state_for(newcomer, optimizers, state)
        merged = _met(world, invitation, givers, newcomer)
        if merged is None:
            if newcomer is not None:
                newcomer.problem = newcomer.problem or "it failed, or did not come, when all met"
                _give_up(here, newcomer)
            return
        _joined.add(chosen.number)
        if newcomer is not None:
            here.remove(newcomer)
    if world.rank in givers:
        gift = merged.gifts[givers.index(world.rank)]
        assert gift is not None
        arrays = [values[i].contiguous().numpy() for i in share]
        meeting.give(gift, data, arrays, chosen.number)
    del values
    _trim()
    if newcomer is not None:
        log.warning(
            "super learner %d has joined, with the mean of the others' models.", chosen.number
        )


def _state_for(
    newcomer: Newcomer | None, optimizers: list[torch.optim.Optimizer], state: bytes
) -> memoryview | bytes:
    """What the learner that talks with the newcomer sends it; packed before anything switches."""
    if newcomer is None:
        return b""
    try:
        return pack(JoinState(optimizers, state))
    except Exception as error:  # pickle's, of many kinds
        newcomer.problem = f"the state of the optimizer cannot be pickled ({error})"
        return b""


def _givers(world: World, first: int) -> tuple[int, ...]:
    """Ranks of leaders that send the newcomer its model, each a part: one has its state, others are few."""
    living = set(world.collectives.ranks)
    leaders = [group[0] for group in world.groups if living >= set(group) and group[0] != first]
    return (first, *leaders[: GIVERS - 1])


def _trim() -> None:
    """Return free memory to the system: glibc keeps what the threads of each merge have used."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _met(
    world: World, invitation: Invitation, givers: tuple[int, ...], newcomer: Newcomer | None
) -> Merged | None:
    """The meeting, on learners of the job; None on all of them if it failed on one."""
    ranks = tuple(sorted({*world.collectives.ranks, *invitation.groups[invitation.super_rank]}))
    before = world.collectives.ranks
    ends = time.monotonic() + MEETING_S
    gather = meeting.gather_with(world, len(invitation.placements), newcomer, ends)
    if newcomer is not None and not newcomer.problem:
        newcomer.tell((invitation, ranks, givers))
    prepared = _prepare(world, invitation, ranks, givers, gather, ends)
    # all agree before one switches: alone, a learner would wait on connections that its peers have dropped
    met = all(world.collectives.gather(DOING, prepared is not None))
    if not met or world.collectives.ranks != before or prepared is None:
        _drop(prepared)
        return None
    if newcomer is not None:
        newcomer.tell(True)
    _switch(world, *prepared)
    return prepared[0]


def _prepare(
    world: World,
    invitation: Invitation,
    ranks: tuple[int, ...],
    givers: tuple[int, ...],
    gather: Gather,
    ends: float,
) -> tuple[Merged, list[Engine]] | None:
    """New connections and engines; None if this learner has none, after as many gathers as on the others."""
    merged, engines = None, []
    try:
        merged = meeting.meet(world, invitation, ranks, givers, gather, ends)
        for averaging in live():
            engines.append(averaging.make_engine_for(invitation, merged))
    except AdpsgdError as error:
        log.info("a newcomer could not be met: %s", error)
        for engine in engines:
            engine.stop()
            engine.release(keeps_memory=True)
        if merged is not None:
            merged.hub.close()
            merged = None
    try:
        answers = gather(merged is not None)
        if not all(answers[rank] for rank in ranks):
            raise meeting.NotMetError("it failed on another learner")
    except AdpsgdError as error:
        log.info("a newcomer could not be met: %s", error)
        if merged is not None:
            _drop((merged, engines))
        return None
    return (merged, engines) if merged is not None else None


def _drop(prepared: tuple[Merged, list[Engine]] | None) -> None:
    if prepared is not None:
        for engine in prepared[1]:
            engine.stop()
            engine.release(keeps_memory=True)
        prepared[0].hub.close()


def _switch(world: World, merged: Merged, engines: list[Engine]) -> None:
    """Go on with the new connections; the old ones end when all have done so."""
    old = exit_state.hub
    grown = merged.adopt(world)
    for averaging, engine in zip(live(), engines, strict=True):
        averaging.replace_engine(engine)
        averaging.move_to(grown)
    grown.collectives.gather(DOING, None)
    merged.end_by(None)
    if old is not None:
        old.close()


# ---- on a newcomer ------------------------------------------------------------------------------------


def _arrive(world: World, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Join the others. Returns their state."""
    newcomer = joining.this_learner()
    for averaging in live():
        averaging.prepare_memory()
    invitation, ranks, givers = newcomer.ready(world, terms())
    ends = time.monotonic() + 2 * MEETING_S  # the others give up first
    gather = meeting.gather_as_newcomer(
        world, len(invitation.placements), newcomer.conversation, ends
    )
    prepared = _prepare(world, invitation, ranks, givers, gather, ends)
    if not newcomer.is_in(world) or prepared is None:
        _drop(prepared)
        raise PeerFailedError(
            f"super learner {world.super_rank} was to join, but the others did not meet it: one of them "
            f"failed, or did not come within {MEETING_S:g} s. They continue training."
        )
    _switch(world, *prepared)
    merged = prepared[0]
    told = _receive(merged, model)
    told.give(optimizers)
    for averaging in live():
        resume(averaging)
    joining.watch_job(worlds.current())
    open_own_door(worlds.current(), merged.hub.address, newcomer.secret)
    return unpack(told.state)


@torch.no_grad()
def _receive(merged: Merged, model: torch.nn.Module) -> JoinState:
    """Overwrite the model with what each giver sends, and return what the first one sends with it."""
    tensors, told = [*model.parameters(), *model.buffers()], []
    for gift, share in zip(merged.gifts, shares(model, len(merged.gifts)), strict=True):
        assert gift is not None
        state, values = meeting.receive(gift)
        told.append(state)
        for i, value in zip(share, values, strict=True):
            tensors[i].data.copy_(torch.from_numpy(value))
    made: JoinState = unpack(told[0])
    return made
