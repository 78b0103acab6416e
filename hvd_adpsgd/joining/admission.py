"""`hvd.admit`: super learners that replace failed ones, and additional ones, join a running job."""

import contextlib
import ctypes
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_adpsgd.collectives.usage import counted
from hvd_adpsgd.data import samplers
from hvd_adpsgd.errors import ConfigError, PeerFailedError
from hvd_adpsgd.joining import candidates, reconnect
from hvd_adpsgd.joining.callbacks import call_if_changed
from hvd_adpsgd.joining.candidates import (
    JoiningSuperLearner,
    JoinOffer,
    JoinRequest,
    JoinServer,
    join_server,
)
from hvd_adpsgd.joining.decision import all_switch
from hvd_adpsgd.joining.join_state import (
    JoinState,
    exchange_parts,
    has_parts,
    pack,
    shares,
    terms,
)
from hvd_adpsgd.joining.joining import arrive
from hvd_adpsgd.joining.nonblocking import have_met, meets, waits_anyway
from hvd_adpsgd.joining.reconnect import (
    DOING,
    RECONNECT_S,
    Gather,
    NewGroup,
    drop,
    prepare,
    switch,
)
from hvd_adpsgd.joining.replacements import is_minority, lost, starters
from hvd_adpsgd.launch import processes
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.processes import ATTEMPTS, LIVES_S
from hvd_adpsgd.launch.world import MOST_SUPER_LEARNERS, World
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.model_average import mean_model, mean_moments
from hvd_adpsgd.training.pause import paused
from hvd_adpsgd.training.presence import held, live, order_as
from hvd_adpsgd.training.sharded import reshard

log = logging.getLogger("hvd_adpsgd")

SENDERS = 4  # most super learners that send parts of the model to a joining super learner

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def admit(
    model: torch.nn.Module,
    optimizer: Optimizers,
    state: Any = None,
    *,
    patience_s: float = 120.0,
    blocking: bool = True,
) -> Any:
    """Replace failed super learners, and let additional ones join; all learners call this, once per epoch.

        epoch = hvd.admit(model, optimizer, state=0)
        while epoch < epochs:
            train(...)
            epoch = hvd.admit(model, optimizer, state=epoch + 1)

    The first call after a failure starts a super learner with the command line of this one, and returns
    at once. The started super learner joins in the first later call that finds it ready. It runs the script
    from the top, with the ranks of the failed one, up to its own first call of this function. That call
    returns the `state` of the other learners, and sets the model to the exact mean of all other super
    learners' models, the optimizer state to that of one of them, and the epochs of samplers to the job's.
    Before that call, operations over all learners (broadcast_parameters, ...) run in the new super learner
    alone.

    Super learners beyond those of the start join in the same way: see HVD_ADPSGD_JOIN in docs/failures.md.
    size() and super_size() grow.

    Waits for the slowest super learner, as average_model does, also if no super learner joins; with
    blocking=False only if there is something to do, and all others have just answered. Call it
    between steps. One super learner joins per call. If it cannot be started or fails before it joins,
    training continues, the log states the reason, and another one is started: three attempts in all.

    A call starts one super learner per host at most, in the slots of failed learners of that host; to replace
    the learners of a lost host, other hosts need HVD_ADPSGD_SPARE_SLOTS. Learners that may be the smaller
    side of a cut network start none.

    Args:
        model: the same module on every learner; changed on a joining learner only.
        optimizer: the wrapped optimizer, or all of them, in the same order on all learners.
        state: a picklable value for a joining learner, such as the epoch. Each call packs it.
        patience_s: seconds from the start of a super learner until it must call this function.
        blocking: the same on all learners. False: super learners may call this at different steps, and
            differ in the number of calls. They wait for each other only if a super learner is started or
            joins, and all have just answered; a leader that is stopped delays the join, and the others by two
            intervals between calls and 1 s, twice as long after each attempt, up to 8 times. Super learners
            that have run shutdown() are not replaced. No effect on strategies with rounds, whose super
            learners wait for each other anyway.

    Returns:
        `state`; on a joining learner the `state` of the other learners.

    Raises:
        ConfigError: on all learners, if the `state` of one learner cannot be pickled.
        PeerFailedError: if a learner of this super learner has failed, or, on a joining learner, all others.
        SystemExit: on a joining learner, with status 0, if the job ends before it joins.
    """
    world = worlds.current()
    here, joins = join_server(world), world.collectives.joining
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    order_as(optimizers)
    if not (blocking or joins or waits_anyway()):
        if world.is_plain:
            return state
        _trust_joined(here, world)
        _offer_alone(here, world, optimizers, patience_s)
        if not meets(world, DOING):
            return state
    reshard(model)
    if joins:
        with held(world, DOING):
            state, epochs = arrive(world, model, optimizers)
        samplers.join_at(epochs)
        world = worlds.current()
        here.known.update(lost(world.groups, world.collectives.ranks))
        here.elsewhere[len(world.groups)] = -1
        have_met(world)
        candidates.notify_launcher(world)
        call_if_changed(world, joined=True)
        return state
    if world.is_plain:
        return state
    with (
        counted(DOING),
        world.collectives.instead("continue"),
        held(world, DOING, by_job=True) as averagings,
    ):
        packed, problem = _packed((state, samplers.epochs(is_between=blocking)))
        stay = set() if blocking else world.collectives.finished()
        chosen = _survey(here, world, optimizers, patience_s, problem, stay)
        if chosen is not None:
            _admit(here, world, chosen, model, optimizers, averagings, packed)
    have_met(worlds.current())
    call_if_changed(worlds.current(), joined=False)
    return state


def listener() -> str:
    """Return the address, host:port, at which super learners can join here, for their HVD_ADPSGD_JOIN.

    Leaders of a job with HVD_ADPSGD_JOIN_SECRET_FILE have one, joining ones once they have joined. On other
    learners it is "".
    """
    return candidates.listener(worlds.current())


@dataclass(frozen=True)
class _Coming:
    """What a learner reports to all others of a joining super learner that it has started or that asked it.

    Attributes:
        number, state, request: see JoiningSuperLearner.
        rank: rank of the reporting learner.
    """

    number: int | None
    state: str
    request: JoinRequest | None
    rank: int


def _packed(state: Any) -> tuple[bytes, str]:
    """Return the packed state for a joining learner, and why it cannot be pickled, "" if it can."""
    try:
        return pack(state), ""
    except Exception as error:  # pickle and the classes of the state raise errors of many types
        return b"", f"{type(error).__name__}: {error}"


def _survey(
    here: JoinServer,
    world: World,
    optimizers: list[torch.optim.Optimizer],
    patience_s: float,
    problem: str,
    stay: set[int],
) -> _Coming | None:
    """Start missing super learners, give numbers to requesting ones; return a ready one, None without one.

    All learners call it together and return the same one.

    Args:
        here: the JoinServer of this learner.
        world: the World of this learner.
        optimizers: all that admit is given.
        patience_s: see admit.
        problem: why the state of this learner cannot be pickled; "" if it can.
        stay: ranks of learners that are not replaced, as known to this learner.
    """
    _dismiss_late(here, world)
    mine = list(here.candidates)
    states = [candidate.state() for candidate in mine]
    own = [_Coming(n.number, s, n.request, world.rank) for n, s in zip(mine, states, strict=True)]
    problem = problem and f"on learner {world.rank}: {problem}"
    told = world.collectives.gather(DOING, (own, problem, stay))
    _require_whole(world)
    stay = set().union(*(its for _, _, its in told))
    world.collectives.note_finished(stay)
    for _, where, _ in told:
        if where:
            raise ConfigError(
                f"{DOING}(state=...) cannot be pickled for a joining learner, {where}. Pass numbers, texts, "
                "tensors, and dicts and lists of these, as scheduler.state_dict()."
            )
    _judge_joined(here, world)
    coming = [one for each, _, _ in told for one in each if one.rank in world.collectives.ranks]
    for candidate, state in zip(mine, states, strict=True):
        if state == "failed":
            _give_up(here, candidate)
    awaited = {
        one.number: one.rank
        for one in coming
        if one.number is not None and one.state in ("starting", "ready")
    }
    _start_one(here, world, optimizers, awaited, patience_s, stay)
    given = _give_number(here, world, optimizers, mine, coming, set(awaited), patience_s)
    here.elsewhere = {i: rank for i, rank in (awaited | given).items() if rank != world.rank}
    ready = [one for one in coming if one.state == "ready"]
    return min(ready, key=lambda one: (one.number, one.rank)) if ready else None


def _judge_joined(here: JoinServer, world: World) -> None:
    """Count a super learner that failed directly after it joined as a failed start; else reset its count."""
    failed = set(lost(world.groups, world.collectives.ranks))
    for number in here.joined:
        if number in failed:
            more = _count_failure(here, number)
            if world.rank == min(world.collectives.ranks):
                log.error("super learner %d failed directly after it had joined%s.", number, more)
        else:
            here.failures.pop(number, None)
    here.joined.clear()


def _trust_joined(here: JoinServer, world: World) -> None:
    """Reset the failed starts of a super learner that has joined and lived for some time."""
    living = world.living()
    for number, at in list(here.joined.items()):
        if time.monotonic() - at > LIVES_S and living.issuperset(world.groups[number]):
            del here.joined[number]
            here.failures.pop(number, None)


def _count_failure(here: JoinServer, number: int) -> str:
    """Count a failed start of super learner `number`; return the end of the log line, on further attempts."""
    here.failures[number] = here.failures.get(number, 0) + 1
    if here.failures[number] < ATTEMPTS:
        return ""
    return f"; no more after {ATTEMPTS} attempts"


def _require_whole(world: World) -> None:
    missing = sorted(set(world.groups[world.super_rank]) - set(world.collectives.ranks))
    if missing:
        raise PeerFailedError(
            f"{DOING}: learners {missing} of this super learner {world.super_rank} have failed, and it "
            "cannot continue without them. Its peers start another one in its place."
        )


def _start_one(
    here: JoinServer,
    world: World,
    optimizers: list[torch.optim.Optimizer],
    awaited: dict[int, int],
    patience_s: float,
    stay: set[int],
) -> None:
    """Start one replacement of a lost super learner, if the plan assigns one to this learner."""
    here.again = False
    living = world.collectives.ranks
    gone = lost(world.groups, living)
    here.known = set(gone)
    here.left.intersection_update(gone)
    here.left.update(i for i in gone if world.membership.have_left(world.groups[i]))
    missing = [i for i in gone if i not in awaited and stay.isdisjoint(world.groups[i])]
    if not missing or processes.is_replaced_by_launcher():
        return
    if is_minority(world.placements, world.groups, living, here.left):
        _say_once(
            here,
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
                here,
                world,
                f"super learner {number} is not replaced: no host of a running super learner has slots for "
                f"{len(world.groups[number])} more learners (HVD_ADPSGD_SPARE_SLOTS="
                f"{world.config.spare_slots}).",
            )
    plan = {i: rank for i, rank in plan.items() if i in missing}
    mine = [i for i, rank in plan.items() if rank == world.rank]
    # a learner starts one per call
    here.again = sum(here.failures.get(i, 0) < ATTEMPTS for i in mine) > 1
    for number, rank in plan.items():
        if rank == world.rank and here.failures.get(number, 0) < ATTEMPTS:
            log.warning("super learner %d is gone; starting another one in its place.", number)
            here.start(world, number, terms(optimizers), patience_s)
            return


def _say_once(here: JoinServer, world: World, line: str) -> None:
    """Log a warning on the first surviving learner, once per text."""
    if world.rank == min(world.collectives.ranks) and line not in here.said:
        here.said.add(line)
        log.warning("%s", line)


def _give_number(
    here: JoinServer,
    world: World,
    optimizers: list[torch.optim.Optimizer],
    mine: list[JoiningSuperLearner],
    coming: list[_Coming],
    awaited: set[int],
    patience_s: float,
) -> dict[int, int]:
    """Send an offer to the first requesting super learner whose super_rank is free.

    Returns:
        by the super_rank in the offer, the rank of the learner that sends it; on all learners the same.
    """
    _refuse_if_full(here, world)
    gone = lost(world.groups, world.collectives.ranks)
    for one in coming:
        if one.state != "requesting" or one.request is None:
            continue
        number = _number_of(world, one.request, gone)
        if number is not None and number not in awaited:
            if one.rank == world.rank:
                candidate = next(n for n in mine if n.number is None and n.request == one.request)
                _offer(world, optimizers, candidate, number, patience_s)
            return {number: one.rank}
    return {}


def _refuse_if_full(here: JoinServer, world: World) -> None:
    """Dismiss requesting super learners if the job has no super_rank left for an additional one."""
    if len(world.groups) < MOST_SUPER_LEARNERS:
        return
    why = (
        f"the job has had {len(world.groups)} super learners, the most is {MOST_SUPER_LEARNERS}, and "
        "each additional one needs a new number. Start the job again from a checkpoint, or replace a failed "
        "super learner"
    )
    for candidate in list(here.candidates):
        if candidate.number is not None or candidate.request is None:
            continue
        if candidate.request.instead_of is not None:
            continue
        here.remove(candidate)
        candidate.dismiss(why=why)
        log.error("a super learner cannot join: %s.", why)


def _number_of(world: World, request: JoinRequest, gone: Collection[int]) -> int | None:
    """Return the super_rank for a requesting super learner: that of the failed one that the launcher replaces
    by it, else the next free one; None without a free one, or while that one is not known to have failed.
    """
    if request.instead_of is None:
        return len(world.groups) if len(world.groups) < MOST_SUPER_LEARNERS else None
    return request.instead_of if request.instead_of in gone else None


def _offer(
    world: World,
    optimizers: list[torch.optim.Optimizer],
    candidate: JoiningSuperLearner,
    number: int,
    patience_s: float,
) -> None:
    """Offer a super_rank to a requesting super learner."""
    ends = time.monotonic() + patience_s
    offer = JoinOffer.of(world, number, candidate.request, world.rank)
    candidate.expect(offer, terms(optimizers), ends)
    candidate.send_offer()


def _offer_alone(
    here: JoinServer, world: World, optimizers: list[torch.optim.Optimizer], patience_s: float
) -> None:
    """Give a requesting super learner its super_rank without a meeting, on the first living learner.

    Two learners may both take themselves for the first one, and offer the same super_rank: the second of
    their super learners is dismissed when it is ready (`_dismiss_late`).
    """
    living = world.living()
    if world.rank != min(living, default=-1):
        return
    _refuse_if_full(here, world)
    gone = lost(world.groups, living)
    mine = list(here.candidates)
    for one in mine:
        if one.state() != "requesting" or one.request is None:
            continue
        number = _number_of(world, one.request, gone)
        owner = -1 if number is None else here.elsewhere.get(number)
        taken = owner == -1 or owner in living or number in [other.number for other in mine]
        if number is not None and not taken:
            _offer(world, optimizers, one, number, patience_s)
            return


def _dismiss_late(here: JoinServer, world: World) -> None:
    """Dismiss joining super learners whose super_rank another one has taken, which is no failed start."""
    gone = lost(world.groups, world.collectives.ranks)
    for one in list(here.candidates):
        if one.number is None or one.number >= len(world.groups):
            continue
        replaces = one.request is None or one.request.instead_of is not None
        if not (replaces and one.number in gone):
            here.remove(one)
            one.dismiss(why=f"another one has joined as super learner {one.number}")


def _give_up(here: JoinServer, candidate: JoiningSuperLearner) -> None:
    here.remove(candidate)
    candidate.dismiss(why=candidate.problem)
    number = candidate.number
    if number is None:
        return
    log.error(
        "super learner %d has not joined: %s. Training continues%s.",
        number,
        candidate.problem,
        _count_failure(here, number),
    )


def _admit(
    here: JoinServer,
    world: World,
    chosen: _Coming,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    averagings: list[Averaging],
    state: bytes,
) -> None:
    """Connect all learners to the joining super learner and send it the state; without it if it fails."""
    candidate = None
    if chosen.rank == world.rank:
        candidate = next(n for n in here.candidates if n.number == chosen.number and n.request)
    assert chosen.number is not None and chosen.request is not None
    offer = JoinOffer.of(world, chosen.number, chosen.request, chosen.rank)
    senders = _senders(world, chosen.rank)
    share = shares(model, len(senders))[senders.index(world.rank)] if world.rank in senders else ()
    with paused(world, DOING, averagings):
        values = mean_model(model, share)
        moments = mean_moments(live(), candidate is not None)
        data = _state_for(candidate, optimizers, state, moments)
        new_group = _met(world, offer, senders, candidate)
        if new_group is None:
            if candidate is not None:
                _put_off(here, candidate)
            return
        here.joined[chosen.number] = time.monotonic()
        here.known.discard(chosen.number)
        if candidate is not None:
            here.remove(candidate)
        if has_parts(model):  # parts are exchanged after this, in the pause
            _give(world, new_group, senders, data, share, values)
            grown = worlds.current()
            exchange_parts(grown, model, live(), grown.super_rank_of(senders[0]), chosen.number)
            share, senders = (), ()
    _give(world, new_group, senders, data, share, values)
    del values
    _trim()
    if candidate is not None:
        log.warning(
            "super learner %d has joined, with the mean of the others' models.", chosen.number
        )


def _put_off(here: JoinServer, candidate: JoiningSuperLearner) -> None:
    """Keep a ready super learner for a later call, as another learner may have failed; ATTEMPTS times."""
    candidate.tries += 1
    if candidate.problem or candidate.tries == ATTEMPTS:
        candidate.problem = candidate.problem or "it failed, or did not come, when all met"
        _give_up(here, candidate)
    else:
        candidate.send(False)


def _give(
    world: World,
    new_group: NewGroup,
    senders: Sequence[int],
    data: memoryview | bytes,
    share: Sequence[int],
    values: dict[int, torch.Tensor],
) -> None:
    """Send the joining super learner this learner's share of the model, and the state, if it is a sender."""
    if world.rank in senders:
        transfer = new_group.transfers[senders.index(world.rank)]
        assert transfer is not None
        arrays = [values[i].contiguous().numpy() for i in share]
        reconnect.give(transfer, data, arrays, new_group.offer.super_rank)


def _state_for(
    candidate: JoiningSuperLearner | None,
    optimizers: list[torch.optim.Optimizer],
    state: bytes,
    moments: list[list[torch.Tensor]],
) -> memoryview | bytes:
    """Return the packed JoinState on the learner connected to the joining super learner; b"" on all others.

    Packed before any learner switches to the new connections, as it may fail.
    """
    if candidate is None:
        return b""
    try:
        return pack(JoinState(optimizers, state, moments))
    except Exception as error:  # pickle raises errors of many types
        candidate.problem = f"the state of the optimizer cannot be pickled ({error})"
        return b""


def _senders(world: World, first: int) -> tuple[int, ...]:
    """Return the ranks that each send a part of the model: `first`, which has the state, and few leaders."""
    living = set(world.collectives.ranks)
    leaders = [group[0] for group in world.groups if living >= set(group) and group[0] != first]
    return (first, *leaders[: SENDERS - 1])


def _trim() -> None:
    """Return free heap memory to the system: glibc keeps memory that ended threads have freed."""
    # C libraries other than glibc lack malloc_trim
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _met(
    world: World, offer: JoinOffer, senders: tuple[int, ...], candidate: JoiningSuperLearner | None
) -> NewGroup | None:
    """Connect the learners of the job with the joining super learner; None on all if it failed on one."""
    ranks = tuple(sorted({*world.collectives.ranks, *offer.groups[offer.super_rank]}))
    asked = world.collectives.ranks
    ends = time.monotonic() + RECONNECT_S
    gather = Gather(world, len(offer.placements), ends, candidate)
    if candidate is not None and not candidate.problem:
        candidate.send((offer, ranks, senders))
    prepared = prepare(world, offer, ranks, senders, gather, ends)
    # all learners vote before any learner switches: if only some switched, each part would wait for the other
    all_made = all(world.collectives.gather(DOING, prepared is not None))
    if not all_switch(all_made, world.collectives.ranks, asked) or prepared is None:
        drop(prepared)
        return None
    if candidate is not None:
        candidate.send(True)
    switch(world, *prepared)
    return prepared[0]
