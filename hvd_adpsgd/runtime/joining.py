"""How super learners join a job that runs, over sockets: as one of them, and with one of them.

    in init(), its first learner knocks      the job goes on
    init() returns with the job's ranks      hvd.admit: it has a number
    it builds its model, wraps it            the job goes on
    hvd.admit: it is ready                   hvd.admit: all meet it
    all learners, old and new, connect anew, make new engines, agree, and switch to them

Until all have agreed, nothing of what they had is touched: if the newcomer, or one of them, fails in between,
they go on as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adpsgd.errors import LaunchError, PeerFailedError, TransportError
from hvd_adpsgd.runtime import bootstrap, communicators, rendezvous
from hvd_adpsgd.runtime import world as worlds
from hvd_adpsgd.runtime.door import Conversation, knock
from hvd_adpsgd.runtime.messages import COMPLETE, Attempt, AttemptAbandonedError, Messages
from hvd_adpsgd.runtime.newcomers import (
    JOIN,
    JOIN_AS,
    JOIN_SECRET_FILE,
    Invitation,
    Knock,
    Newcomer,
    checked,
)
from hvd_adpsgd.runtime.rendezvous import Place, Store
from hvd_adpsgd.runtime.shutdown import ShutdownBarrier, exit_state
from hvd_adpsgd.runtime.sockets import Communicator, Hub
from hvd_adpsgd.runtime.world import Communicators, Placement, World, names_of

__all__ = [
    "MEETING_S",
    "Guest",
    "Merged",
    "NotMetError",
    "enter",
    "gather_with_guest",
    "gather_with_newcomer",
    "give",
    "is_guest",
    "meet",
    "receive",
    "this_guest",
    "watch_job",
]

log = logging.getLogger("hvd_adpsgd")

MEETING_S = 10.0  # longest wait for one another, once all are there
_LOOK_S = 0.5
_TOGETHER_S = 5.0  # super learners that end within so long have not failed one by one
GIFT_S = 600.0  # longest time for the newcomer's state

Gather = Callable[[Any], list[Any]]


class NotMetError(TransportError):
    """Not all have come to the meeting."""


@dataclasses.dataclass(frozen=True)
class Merged:
    """All learners with a newcomer, connected anew.

    Attributes:
        invitation: the job with the newcomer.
        hub: the connections.
        comms: over them.
        members: the super learners of comms.outer.
        ranks: of the learners that are there.
        gift: the newcomer, and who gives it its state (first); None on others.
    """

    invitation: Invitation
    hub: Hub
    comms: Communicators
    members: tuple[int, ...]
    ranks: tuple[int, ...]
    gift: Communicator | None

    def adopt(self, world: World) -> World:
        """Go on with these; worlds.current returns the new world from now on."""
        told, comms = self.invitation, self.comms
        old = world.collectives
        used = old.comm, old.messages.comm, world.outer, world.host  # Horovod may use `inner`
        world.teardown.join(ShutdownBarrier(comms.goodbye, self.ranks), *used)
        world.collectives.meet(comms.all, comms.plain, self.ranks, len(told.placements))
        world.membership.grow(told.groups, names_of(told.groups, told.placements))
        world.membership.meet(self.members)
        grown = dataclasses.replace(
            world,
            config=told.config,
            started=told.started,
            placements=told.placements,
            groups=told.groups,
            size=len(told.placements),
            super_size=len(told.groups),
            cross_size=sum(p.local_rank == world.local_rank for p in told.placements),
            host=comms.host,
            inner=comms.inner,
            outer=comms.outer,
            members=self.members,
        )
        exit_state.hub = self.hub
        worlds.put(grown)
        return grown

    def limit(self, seconds: float | None) -> None:
        """What they gather takes at most so long from now on; None: no limit."""
        for comm in (self.comms.all, self.comms.outer, self.comms.inner):
            if comm is not None:
                comm.patience_s = seconds


def meet(
    world: World, invitation: Invitation, ranks: Sequence[int], giver: int, gather: Gather
) -> Merged:
    """Connect anew; all learners of `ranks` call this together.

    Args:
        world: of this learner.
        invitation: the job with the newcomer.
        ranks: of those that are there.
        giver: who gives the newcomer its state.
        gather: values of all, by rank, None for those that are not there.

    Raises:
        TransportError, TopologyError: if this learner cannot.
    """
    hub = Hub(world.rank, len(invitation.placements), world.config, gather)
    groups, there = invitation.groups, set(ranks)
    members = tuple(i for i, group in enumerate(groups) if group[0] in there)
    mine = invitation.placements[world.rank].host
    on_host = [r for r in ranks if invitation.placements[r].host == mine]
    new = groups[invitation.super_rank]
    everyone, plain, goodbye = (hub.communicator(ranks) for _ in range(3))
    host, inner = hub.communicator(on_host), hub.communicator(groups[world.super_rank])
    outer = hub.communicator([groups[i][0] for i in members])
    gift = hub.communicator([giver, *new])
    comms = Communicators(everyone, plain, goodbye, host, inner, outer)
    merged = Merged(invitation, hub, comms, members, tuple(ranks), gift)
    merged.limit(MEETING_S)
    return merged


def gather_with_newcomer(world: World, size: int, newcomer: Newcomer | None) -> Gather:
    """For `meet`, on learners of the job.

    Args:
        world: of this learner.
        size: of the job with the newcomer.
        newcomer: on the learner that talks with it.
    """
    ranks = world.collectives.ranks

    def gather(value: Any) -> list[Any]:
        told = dict(
            zip(world.collectives.ranks, world.collectives.gather("admit", value), strict=True)
        )
        heard = None
        if newcomer is not None and newcomer.conversation is not None and not newcomer.problem:
            try:
                heard = newcomer.conversation.hear(MEETING_S)
                newcomer.conversation.tell(told)
            except PeerFailedError as error:
                newcomer.problem = str(error)
        answers = [a for a in world.collectives.gather("admit", heard) if a is not None]
        if world.collectives.ranks != ranks or not answers:
            raise NotMetError("not all came to the meeting")
        told |= answers[0]
        return [told.get(rank) for rank in range(size)]

    return gather


def gather_with_guest(world: World, size: int, conversation: Conversation | None) -> Gather:
    """For `meet`, on the learners of the newcomer; the first one has the conversation."""

    def gather(value: Any) -> list[Any]:
        mine = dict(
            zip(world.collectives.ranks, world.collectives.gather("admit", value), strict=True)
        )
        told = None
        if conversation is not None:
            with contextlib.suppress(PeerFailedError):
                conversation.tell(mine)
                told = conversation.hear(3 * MEETING_S)
        answers = [a for a in world.collectives.gather("admit", told) if a is not None]
        if not answers:
            raise NotMetError("the job did not come to the meeting")
        known = {**answers[0], **mine}
        return [known.get(rank) for rank in range(size)]

    return gather


# ---- the newcomer's state ------------------------------------------------------------------------


def give(gift: Communicator, data: bytes, number: int) -> None:
    """Send the newcomer its state, beside the training; it is number `number`."""

    def act() -> None:
        try:
            _broadcast(gift, np.frombuffer(data, dtype=np.uint8))
        except (AttemptAbandonedError, TransportError, PeerFailedError):
            log.warning("super learner %d was lost while it received the model.", number)

    threading.Thread(target=act, daemon=True, name="hvd_adpsgd.gift").start()


def receive(gift: Communicator) -> bytes:
    """The state of a newcomer, on its learners.

    Raises:
        PeerFailedError: if the giver, or a learner of the newcomer, is lost.
    """
    try:
        return bytes(_broadcast(gift, None))
    except AttemptAbandonedError:
        raise PeerFailedError(
            "admit: the learner that gave this one the model is lost. The others go on, and start "
            "another one."
        ) from None


def _broadcast(gift: Communicator, data: Any) -> Any:
    messages, ends = Messages(gift), time.monotonic() + GIFT_S
    everyone = range(messages.size)
    attempt = Attempt(messages, everyone, everyone, ends)
    nbytes = attempt.gather(None if data is None else data.size)[0]
    data = np.empty(nbytes, dtype=np.uint8) if data is None else data
    attempt.broadcast(data, 0)
    attempt.flush()
    messages.decision(messages.vote(COMPLETE), ends)
    return data


# ---- a newcomer ------------------------------------------------------------------------------------


class Guest:
    """A process of a super learner that joins a job which runs.

    Args:
        store: connects to torch's TCPStore, where its learners meet.

    Attributes:
        invitation: what the job has told.
        conversation: with the job; None but on its first learner.
    """

    def __init__(self, store: Callable[[Place], Store] | None):
        place = rendezvous.of_environment(os.environ)
        if place is None:
            exit_state.hub = Hub(0, 1, communicators.options_of_network(), lambda value: [value])
            self.everyone: Any = exit_state.hub.communicator([0])
        else:
            self.everyone = communicators.over_sockets(place, store)
        self._host = communicators.of_host(self.everyone)
        self.conversation: Conversation | None = None
        self.invitation: Invitation = self._invited()

    def _invited(self) -> Invitation:
        head = self._host.bcast(self.everyone.Get_rank())
        mine = Placement(head, socket.gethostname(), self._host.Get_rank(), self._host.Get_size())
        placements = tuple(self.everyone.allgather(mine))
        told: Any = None
        if self.everyone.Get_rank() == 0:
            try:
                told = self._knock(placements)
            except (LaunchError, PeerFailedError) as error:
                told = error
        told = self.everyone.bcast(told)
        if isinstance(told, Exception):
            raise told
        if told is None:
            self._is_over()
        assert isinstance(told, Invitation)
        return told

    def _knock(self, placements: tuple[Placement, ...]) -> Any:
        self.conversation = knock(os.environ[JOIN], _secret())
        number = os.environ.get(JOIN_AS)
        self.conversation.tell(Knock(placements, None if number is None else int(number)))
        return self.conversation.hear(None)

    def _is_over(self) -> None:
        log.warning("the job ended before this super learner joined.")
        raise SystemExit(0)

    def make_world(self) -> World:
        """Of this super learner alone, with the job's ranks."""
        told, everyone = self.invitation, self.everyone
        plain, goodbye = communicators.duplicate(everyone), communicators.duplicate(everyone)
        inner = communicators.duplicate(everyone)
        comms = Communicators(everyone, plain, goodbye, self._host, inner, None)
        rank = told.groups[told.super_rank][everyone.Get_rank()]
        return World.make(told.config, told.placements, told.groups, rank, comms, joining=True)

    def ready(self, world: World, terms: Any) -> tuple[Invitation, tuple[int, ...], int]:
        """Wait for the job to meet this newcomer: the job now, ranks of all, and who gives it its state.

        Raises:
            PeerFailedError: if the learner that it talks with is lost.
            SystemExit: with status 0, if the job has ended.
        """
        told: Any = ()
        if self.conversation is not None:
            try:
                self.conversation.tell(terms)
                told = self.conversation.hear(None)
            except PeerFailedError as error:
                told = error
        told = next(t for t in world.collectives.gather("admit", told) if t != ())
        if isinstance(told, Exception):
            raise told
        if told is None:
            self._is_over()
        invitation, ranks, giver = told
        return invitation, ranks, giver

    def is_in(self, world: World) -> bool:
        """Whether the job has switched to what all have agreed."""
        said = None
        if self.conversation is not None:
            with contextlib.suppress(PeerFailedError):
                said = self.conversation.hear(3 * MEETING_S)
            self.conversation.close()
        return any(world.collectives.gather("admit", said))


def _secret() -> bytes:
    name = os.environ.get(JOIN_SECRET_FILE, "")
    try:
        return checked(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"init(): {JOIN} is set, and {JOIN_SECRET_FILE}={name!r} cannot be read ({error}). Give the file "
            "that the job was started with: 64 hexadecimal digits."
        ) from None


def watch_job(world: World) -> None:
    """End this process in order, if a learner has started it, when the launcher has ended the job.

    It does not know this process, which would train on alone. Super learners that fail one by one are no
    reason to end, also where no other one is left that the launcher has started.
    """
    if world.super_rank in world.started:
        threading.Thread(target=_watch_job, daemon=True, name="hvd_adpsgd.launcher").start()


def _watch_job() -> None:
    ended: dict[
        int, float
    ] = {}  # when each super learner of the launcher was first seen to have ended
    while worlds.is_initialized():
        world, now = worlds.current(), time.monotonic()
        gone = world.collectives.ended()
        launched = [i for i in range(world.super_size) if i not in world.started]
        for i in launched:
            if gone.issuperset(world.groups[i]):
                ended.setdefault(i, now)
        lately = [i for i in launched if now - ended.get(i, -math.inf) < _TOGETHER_S]
        is_over = len(lately) > 1 and ended.keys() >= set(launched)
        if (
            is_over and worlds.is_initialized()
        ):  # at an end in order, all meet without a world first
            log.warning(
                "super learner %d leaves: the launcher has ended all that it has started.",
                world.super_rank,
            )
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(_LOOK_S)


_guest: Guest | None = None


def is_guest() -> bool:
    """Whether this process is of a super learner that joins a job which runs."""
    return JOIN in os.environ


def enter(store: Callable[[Place], Store] | None) -> World:
    """init() of a newcomer; worlds.current returns its world from now on.

    Raises:
        LaunchError: if the job cannot be joined.
        PeerFailedError: if it is lost meanwhile.
        SystemExit: with status 0, if the job ends before.
    """
    global _guest
    bootstrap.watch_exit()
    _guest = Guest(store)
    return bootstrap.enter(_guest.make_world())


def this_guest() -> Guest:
    """The one that `enter` has made."""
    assert _guest is not None
    return _guest
