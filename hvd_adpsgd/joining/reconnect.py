"""How the learners of a job and of a joining super learner make new connections to each other, over sockets.

Each learner makes a second Hub, communicators and engines beside its present ones. When all learners have
agreed that these are complete, all switch to them. Values to be gathered before the new connections exist are
relayed over the connection of the joining super learner to one learner of the job. Until the agreement, the
present connections stay untouched: if a learner fails before it, the job keeps its connections and engines.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.errors import AdpsgdError, PeerFailedError, TransportError
from hvd_adpsgd.joining.candidates import JoinOffer
from hvd_adpsgd.joining.decision import MOVE_S
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.communicators import counterparts
from hvd_adpsgd.launch.world import Communicators, World, names_of
from hvd_adpsgd.lifecycle.shutdown import ShutdownBarrier, exit_state
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.messaging.messages import COMPLETE, AttemptAbandonedError, Messages
from hvd_adpsgd.messaging.sockets import Communicator, Hub
from hvd_adpsgd.training.presence import live, renumber

log = logging.getLogger("hvd_adpsgd")

RECONNECT_S = 10.0  # longest wait of the learners for each other while they make new connections
TRANSFER_S = 600.0  # longest time to send a joining super learner its state

DOING = "admit"
_VALUE, _MADE = "value", "made"  # of a gather before the connections are made, of the last one


class Gather:
    """Gathers a value from each learner of the job and of the joining super learner, by rank.

    If a learner of one side fails, the others there leave the gathers of `connect_anew`, and gather `made`
    while the other side still waits in an earlier one. So each message says of which kind it is.

    Args:
        world: the world of this learner.
        size: number of learners of the job including the joining super learner.
        ends: deadline, of time.monotonic.
        end: the learner's end of the connection between the two sides: a JoiningSuperLearner or, in that, a
            JoiningLearner; None on all other learners of the job.
    """

    def __init__(self, world: World, size: int, ends: float, end: Any):
        self._world, self._size, self._ends, self._end = world, size, ends, end
        self._ranks = world.collectives.ranks
        self._is_over = False  # whether the other side has gathered for the last time

    def __call__(self, value: Any) -> list[Any]:
        """Return the values by rank, None for a learner that is not connected.

        Raises:
            NotReconnectedError: if not all learners take part.
        """
        return self._gather(_VALUE, value)

    def made(self, made: bool) -> list[Any]:
        """Gather whether each learner has made its connections and engines; the last gather of an attempt."""
        return self._gather(_MADE, made)

    def _gather(self, kind: str, value: Any) -> list[Any]:
        collectives, others = self._world.collectives, None
        if not self._is_over:
            values = collectives.gather("admit", value)  # this may shrink collectives.ranks
            own = dict(zip(collectives.ranks, values, strict=True))
            answers = collectives.gather("admit", self._relayed(kind, own))
            others = next((answer for answer in answers if isinstance(answer, tuple)), None)
            self._is_over = others is not None and others[0] == _MADE
        if others is None or others[0] != kind or collectives.ranks != self._ranks:
            raise NotReconnectedError("not all learners have made the new connections")
        known = {**others[1], **own}
        return [known.get(rank) for rank in range(self._size)]

    def _relayed(self, kind: str, own: dict[int, Any]) -> Any:
        """Exchange values with the other side, at the ends of the connection; the joining one sends first."""
        end = self._end
        if end is None or end.conversation is None or end.problem:
            return None
        try:
            if self._world.collectives.joining:
                end.conversation.send((kind, own))
                return end.conversation.receive(self._left_s)
            told = end.conversation.receive(self._left_s)
            end.conversation.send((kind, own))
            return told
        except PeerFailedError as error:
            end.problem = f"it failed, or did not come, when all met ({error})"
            return None

    @property
    def _left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())


class NotReconnectedError(TransportError):
    """Not all learners have made the new connections, so all learners keep their present connections."""


@dataclasses.dataclass(frozen=True)
class NewGroup:
    """The new connections of all learners of a job and a joining super learner.

    Attributes:
        offer: the job including the joining super learner.
        hub: the new connections of this process.
        comms: the new communicators, over `hub`.
        members: super_ranks of the super learners in comms.outer, by rank there.
        ranks: ranks of the connected learners.
        transfers: for each sender of the state, the communicator of that sender (rank 0) and the learners of
            the joining super learner; None on all other learners.
    """

    offer: JoinOffer
    hub: Hub
    comms: Communicators
    members: tuple[int, ...]
    ranks: tuple[int, ...]
    transfers: tuple[Communicator | None, ...]

    def adopt(self, world: World) -> World:
        """Switch this learner to the new connections; return its new World, which becomes the current one."""
        comms, old = self.comms, world.collectives
        used = old.comm, old.messages.comm, world.outer, world.host  # Horovod may use `inner`
        world.teardown.join(ShutdownBarrier(comms.departures, self.ranks), *used)
        with old.between():  # no message of the new connections is handled by the old World
            return self._switch(world)

    def _switch(self, world: World) -> World:
        told, comms = self.offer, self.comms
        world.collectives.use(comms.all, comms.plain, self.ranks, len(told.placements))
        world.membership.grow(told.groups, names_of(told.groups, told.placements))
        world.membership.use(self.members)
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
        """Make collectives of the communicators fail after `ends`, of time.monotonic; None: no limit."""
        for comm in (self.comms.all, self.comms.outer, self.comms.inner):
            if comm is not None:
                comm.ends = ends


def connect_anew(
    world: World,
    offer: JoinOffer,
    ranks: Sequence[int],
    senders: Sequence[int],
    gather: Gather,
    ends: float,
) -> NewGroup:
    """Make the new connections and communicators; all learners of `ranks` call this together.

    `senders` send the joining super learner its state. `gather` returns values by rank, else None.

    Raises:
        TransportError, TopologyError: if this learner cannot connect.
    """
    hub = Hub(world.rank, len(offer.placements), world.config, gather)
    undo = contextlib.ExitStack()
    with undo:
        undo.callback(hub.close)
        new_group = _grouped(hub, world, offer, ranks, senders)
        new_group.end_by(ends)
        undo.pop_all()
    return new_group


def _grouped(
    hub: Hub, world: World, offer: JoinOffer, ranks: Sequence[int], senders: Sequence[int]
) -> NewGroup:
    """Make the communicators of `ranks` over the new connections; see `connect_anew`."""
    groups, there = offer.groups, set(ranks)
    members = tuple(i for i, group in enumerate(groups) if group[0] in there)
    mine = offer.placements[world.rank].host
    on_host = [r for r in ranks if offer.placements[r].host == mine]
    new = groups[offer.super_rank]
    everyone, plain, departures = (hub.communicator(ranks) for _ in range(3))
    host, inner = hub.communicator(on_host), hub.communicator(groups[world.super_rank])
    outer = counterparts(hub, [groups[i] for i in members], world.rank)
    transfers = tuple(hub.communicator([sender, *new]) for sender in senders)
    comms = Communicators(everyone, plain, departures, host, inner, outer)
    return NewGroup(offer, hub, comms, members, tuple(ranks), transfers)


def prepare(
    world: World,
    offer: JoinOffer,
    ranks: tuple[int, ...],
    senders: tuple[int, ...],
    gather: Gather,
    ends: float,
) -> tuple[NewGroup, list[Engine]] | None:
    """Make new connections and engines; None if that fails here, after as many gathers as on all learners."""
    new_group, engines = None, []
    try:
        names = names_of(offer.groups, offer.placements)
        new_group = connect_anew(world, offer, ranks, senders, gather, ends)
        for averaging in live():
            make = averaging.engines.for_new_group
            engines.append(make(names, new_group.comms, new_group.members))
    except AdpsgdError as error:
        log.info("a joining super learner could not be connected: %s", error)
        if new_group is not None:
            drop((new_group, engines))
            new_group = None
    try:
        answers = gather.made(new_group is not None)
        if not all(answers[rank] for rank in ranks):
            raise NotReconnectedError("another learner could not make its connections or engines")
    except AdpsgdError as error:
        log.info("a joining super learner could not be connected: %s", error)
        if new_group is not None:
            drop((new_group, engines))
        return None
    return (new_group, engines) if new_group is not None else None


def drop(prepared: tuple[NewGroup, list[Engine]] | None) -> None:
    if prepared is not None:
        for engine in prepared[1]:
            engine.stop()
            engine.release(keeps_memory=True)
        prepared[0].hub.close()


def switch(world: World, new_group: NewGroup, engines: list[Engine]) -> None:
    """Switch to the new connections and engines; close the old connections when all have switched."""
    old = exit_state.hub
    grown = new_group.adopt(world)
    for averaging, engine in zip(live(), engines, strict=True):
        averaging.move_to(grown, engine, MOVE_S)
    renumber()
    grown.collectives.gather(DOING, None)
    new_group.end_by(None)
    if old is not None:
        old.close()


def give(
    transfer: Communicator, state: bytes | memoryview, arrays: Sequence[NDArray[Any]], number: int
) -> None:
    """Send the joining super learner this learner's share of the model and of the state, on a new thread.

    The share is sent in segments, of which few are in flight, so that memory never holds a second copy of it.

    Args:
        transfer: communicator of this learner and the joining super learner.
        state: the pickled state on one of the senders, b"" on the other senders.
        arrays: this learner's share of the model; contiguous, and not changed by anything else.
        number: super_rank of the joining super learner, for the log.
    """

    def act() -> None:
        shapes = [(a.dtype.str, a.shape) for a in arrays]
        try:
            _broadcast(
                transfer,
                (len(state), shapes),
                lambda _: (np.frombuffer(state, dtype=np.uint8), *arrays),
            )
        except (AttemptAbandonedError, TransportError, PeerFailedError):
            log.warning("super learner %d was lost while it received the model.", number)

    threading.Thread(target=act, daemon=True, name="hvd_adpsgd.transfer").start()


def receive(transfer: Communicator) -> tuple[bytes, list[NDArray[Any]]]:
    """Receive one sender's share of the model and of the state, on a learner of the joining super learner.

    Args:
        transfer: communicator of that sender and the joining super learner.

    Returns:
        The pickled state, or b"", and the arrays; see `give`.

    Raises:
        PeerFailedError: if the sender, or a learner of the joining super learner, is lost.
    """
    try:
        state, *arrays = _broadcast(transfer, None, _empty)
    except AttemptAbandonedError:
        raise PeerFailedError(
            "admit: the learner that was sending the model failed. The job's super learners train on, and "
            "start another super learner."
        ) from None
    return state.tobytes(), arrays


def _empty(told: tuple[int, list[tuple[str, tuple[int, ...]]]]) -> tuple[NDArray[Any], ...]:
    """Return uninitialized arrays of the dtypes and shapes that a sender has announced in `told`."""
    nbytes, shapes = told
    arrays = (np.empty(shape, dtype=dtype) for dtype, shape in shapes)
    return np.empty(nbytes, dtype=np.uint8), *arrays


def _broadcast(
    transfer: Communicator, told: Any, arrays_for: Callable[[Any], tuple[NDArray[Any], ...]]
) -> tuple[NDArray[Any], ...]:
    """Broadcast arrays of the communicator's rank 0, which sends their shapes first; return the arrays."""
    messages, ends = Messages(transfer), time.monotonic() + TRANSFER_S
    everyone = range(messages.size)
    attempt = Attempt(messages, everyone, everyone, ends)
    arrays = arrays_for(attempt.gather(told)[0])
    for array in arrays:
        attempt.broadcast(array, 0)
    attempt.flush()
    messages.decision(messages.vote(COMPLETE), ends)
    return arrays
