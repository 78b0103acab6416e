"""How all learners of a job, and those of a newcomer, connect anew over sockets.

All make a second Hub, communicators and engines beside what they have, agree, and switch to them. What must
be gathered before there is a connection is relayed over the newcomer's conversation with one of them. Until
all have agreed, nothing of what they had is touched: if the newcomer, or one of them, fails in between, they
go on as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.errors import PeerFailedError, TransportError
from hvd_adpsgd.joining.door import Conversation
from hvd_adpsgd.joining.newcomers import Invitation, Newcomer
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.communicators import counterparts
from hvd_adpsgd.launch.world import Communicators, World, names_of
from hvd_adpsgd.lifecycle.shutdown import ShutdownBarrier, exit_state
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.messaging.messages import COMPLETE, AttemptAbandonedError, Messages
from hvd_adpsgd.messaging.sockets import Communicator, Hub

__all__ = [
    "MEETING_S",
    "Gather",
    "Merged",
    "NotMetError",
    "gather_as_newcomer",
    "gather_with",
    "give",
    "meet",
    "receive",
]

log = logging.getLogger("hvd_adpsgd")

MEETING_S = 10.0  # longest wait for one another, once all are there
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
        gifts: the newcomer, and one of those that give it its state (first), by giver; None on others.
    """

    invitation: Invitation
    hub: Hub
    comms: Communicators
    members: tuple[int, ...]
    ranks: tuple[int, ...]
    gifts: tuple[Communicator | None, ...]

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

    def end_by(self, ends: float | None) -> None:
        """What they gather fails after this time, of time.monotonic; None: no limit."""
        for comm in (self.comms.all, self.comms.outer, self.comms.inner):
            if comm is not None:
                comm.ends = ends


def meet(
    world: World,
    invitation: Invitation,
    ranks: Sequence[int],
    givers: Sequence[int],
    gather: Gather,
    ends: float,
) -> Merged:
    """Connect anew; all learners of `ranks` call this together.

    Args:
        world: of this learner.
        invitation: the job with the newcomer.
        ranks: of those that are there.
        givers: ranks of those that give the newcomer its state.
        gather: values of all, by rank, None for those that are not there.
        ends: deadline, of time.monotonic.

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
    outer = counterparts(hub, [groups[i] for i in members], world.rank, world.shards)
    gifts = tuple(hub.communicator([giver, *new]) for giver in givers)
    comms = Communicators(everyone, plain, goodbye, host, inner, outer)
    merged = Merged(invitation, hub, comms, members, tuple(ranks), gifts)
    merged.end_by(ends)
    return merged


def gather_with(world: World, size: int, newcomer: Newcomer | None, ends: float) -> Gather:
    """For `meet`, on learners of the job.

    Args:
        world: of this learner.
        size: of the job with the newcomer.
        newcomer: on the learner that talks with it.
        ends: deadline, of time.monotonic.
    """
    ranks = world.collectives.ranks

    def gather(value: Any) -> list[Any]:
        told = _gathered(world, value)
        heard = None
        if newcomer is not None and newcomer.conversation is not None and not newcomer.problem:
            try:
                heard = newcomer.conversation.hear(max(0.0, ends - time.monotonic()))
                newcomer.conversation.tell(told)
            except PeerFailedError as error:
                newcomer.problem = f"it failed, or did not come, when all met ({error})"
        answers = [a for a in world.collectives.gather("admit", heard) if a is not None]
        if world.collectives.ranks != ranks or not answers:
            raise NotMetError("not all came to the meeting")
        told |= answers[0]
        return [told.get(rank) for rank in range(size)]

    return gather


def _gathered(world: World, value: Any) -> dict[int, Any]:
    """The values of the learners of the job, or of the newcomer, by rank."""
    values = world.collectives.gather("admit", value)  # `ranks` shrinks in it
    return dict(zip(world.collectives.ranks, values, strict=True))


def gather_as_newcomer(
    world: World, size: int, conversation: Conversation | None, ends: float
) -> Gather:
    """For `meet`, on the learners of the newcomer; the first one has the conversation."""

    def gather(value: Any) -> list[Any]:
        mine = _gathered(world, value)
        told = None
        if conversation is not None:
            with contextlib.suppress(PeerFailedError):
                conversation.tell(mine)
                told = conversation.hear(max(0.0, ends - time.monotonic()))
        answers = [a for a in world.collectives.gather("admit", told) if a is not None]
        if not answers:
            raise NotMetError("the job did not come to the meeting")
        known = {**answers[0], **mine}
        return [known.get(rank) for rank in range(size)]

    return gather


# ---- the newcomer's state ------------------------------------------------------------------------


def give(
    gift: Communicator, state: bytes | memoryview, arrays: Sequence[NDArray[Any]], number: int
) -> None:
    """Send the newcomer, which is number `number`, this learner's share, beside the training.

    In segments, of which few are on their way: no second copy waits for the network.

    Args:
        gift: with the newcomer.
        state: pickled; of one giver, others give b"".
        arrays: contiguous; nobody else changes them.
        number: see above.
    """

    def act() -> None:
        shapes = [(a.dtype.str, a.shape) for a in arrays]
        try:
            _broadcast(
                gift,
                (len(state), shapes),
                lambda _: (np.frombuffer(state, dtype=np.uint8), *arrays),
            )
        except (AttemptAbandonedError, TransportError, PeerFailedError):
            log.warning("super learner %d was lost while it received the model.", number)

    threading.Thread(target=act, daemon=True, name="hvd_adpsgd.gift").start()


def receive(gift: Communicator) -> tuple[bytes, list[NDArray[Any]]]:
    """One giver's share of the state of a newcomer, on its learners.

    Raises:
        PeerFailedError: if the giver, or a learner of the newcomer, is lost.
    """
    try:
        state, *arrays = _broadcast(gift, None, _empty)
    except AttemptAbandonedError:
        raise PeerFailedError(
            "admit: a learner that gave this one the model is lost. The others go on, and start "
            "another one."
        ) from None
    return state.tobytes(), arrays


def _empty(told: tuple[int, list[tuple[str, tuple[int, ...]]]]) -> tuple[NDArray[Any], ...]:
    """Arrays for what a giver has told of."""
    nbytes, shapes = told
    arrays = (np.empty(shape, dtype=dtype) for dtype, shape in shapes)
    return np.empty(nbytes, dtype=np.uint8), *arrays


def _broadcast(
    gift: Communicator, told: Any, arrays_for: Callable[[Any], tuple[NDArray[Any], ...]]
) -> tuple[NDArray[Any], ...]:
    """The arrays of the first one, which tells of them first."""
    messages, ends = Messages(gift), time.monotonic() + GIFT_S
    everyone = range(messages.size)
    attempt = Attempt(messages, everyone, everyone, ends)
    arrays = arrays_for(attempt.gather(told)[0])
    for array in arrays:
        attempt.broadcast(array, 0)
    attempt.flush()
    messages.decision(messages.vote(COMPLETE), ends)
    return arrays
