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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.errors import PeerFailedError, TransportError
from hvd_adpsgd.joining.candidates import JoiningSuperLearner, JoinOffer
from hvd_adpsgd.joining.listener import Conversation
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.communicators import counterparts
from hvd_adpsgd.launch.world import Communicators, World, names_of
from hvd_adpsgd.lifecycle.shutdown import ShutdownBarrier, exit_state
from hvd_adpsgd.messaging.attempt import Attempt
from hvd_adpsgd.messaging.messages import COMPLETE, AttemptAbandonedError, Messages
from hvd_adpsgd.messaging.sockets import Communicator, Hub

log = logging.getLogger("hvd_adpsgd")

RECONNECT_S = 10.0  # longest wait of the learners for each other while they make new connections
TRANSFER_S = 600.0  # longest time to send a joining super learner its state

_VALUE, _MADE = "value", "made"  # of a gather before the connections are made, of the last one


class Gather(ABC):
    """Gathers a value from each learner of the job and of the joining super learner, by rank.

    If a learner of the job fails, the job's other learners leave the gathers of `connect_anew` and go on to
    `made`, while the joining super learner still waits in an earlier one, or the reverse. So each message
    says of which kind it is.

    Args:
        world: the world of this learner.
        size: number of learners of the job including the joining super learner.
        ends: deadline, of time.monotonic.
    """

    def __init__(self, world: World, size: int, ends: float):
        self._world, self._size, self._ends = world, size, ends

    def __call__(self, value: Any) -> list[Any]:
        """Return the values by rank, None for a learner that is not connected.

        Raises:
            NotReconnectedError: if not all learners take part.
        """
        return self._gather(_VALUE, value)

    def made(self, made: bool) -> list[Any]:
        """Gather whether each learner has made its connections and engines; the last gather of an attempt."""
        return self._gather(_MADE, made)

    @abstractmethod
    def _gather(self, kind: str, value: Any) -> list[Any]: ...

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
    try:
        return _grouped(hub, world, offer, ranks, senders, ends)
    except BaseException:
        hub.close()
        raise


def _grouped(
    hub: Hub,
    world: World,
    offer: JoinOffer,
    ranks: Sequence[int],
    senders: Sequence[int],
    ends: float,
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
    new_group = NewGroup(offer, hub, comms, members, tuple(ranks), transfers)
    new_group.end_by(ends)
    return new_group


class MembersGather(Gather):
    """The Gather of a learner of the job.

    Args:
        candidate: the joining super learner, on the learner to which it is connected; else None.
    """

    def __init__(self, world: World, size: int, candidate: JoiningSuperLearner | None, ends: float):
        super().__init__(world, size, ends)
        self._candidate = candidate
        self._ranks = world.collectives.ranks
        self._is_left = False  # whether the joining super learner has gathered for the last time

    def _gather(self, kind: str, value: Any) -> list[Any]:
        told = _gathered(self._world, value)
        answers = self._world.collectives.gather("admit", self._relayed(kind, told))
        nothing: tuple[str, dict[int, Any]] = ("", {})
        heard = next((a for a in answers if a is not None), nothing)
        if self._world.collectives.ranks != self._ranks or heard[0] != kind:
            raise NotReconnectedError("not all learners have made the new connections")
        told |= heard[1]
        return [told.get(rank) for rank in range(self._size)]

    def _relayed(self, kind: str, told: dict[int, Any]) -> tuple[str, dict[int, Any]] | None:
        """Return what the joining super learner says, after it was told the others' values."""
        candidate = self._candidate
        if (
            candidate is None
            or candidate.conversation is None
            or candidate.problem
            or self._is_left
        ):
            return None
        try:
            heard: tuple[str, dict[int, Any]] = candidate.conversation.receive(self._left_s)
            candidate.conversation.send((kind, told), self._left_s)
        except PeerFailedError as error:
            candidate.problem = f"it failed, or did not come, when all met ({error})"
            return None
        self._is_left = heard[0] == _MADE
        return heard


class CandidatesGather(Gather):
    """The Gather of a learner of the joining super learner.

    Args:
        conversation: the connection to the job, on the first learner; else None.
    """

    def __init__(self, world: World, size: int, conversation: Conversation | None, ends: float):
        super().__init__(world, size, ends)
        self._conversation = conversation
        self._is_over = False  # whether the job's learners have gathered for the last time

    def made(self, made: bool) -> list[Any]:
        """See Gather."""
        if self._is_over:
            return [False] * self._size
        return super().made(made)

    def _gather(self, kind: str, value: Any) -> list[Any]:
        mine = _gathered(self._world, value)
        answers = self._world.collectives.gather("admit", self._relayed(kind, mine))
        told = next((a for a in answers if isinstance(a, tuple)), None)
        if told is None or told[0] != kind:
            self._is_over = told is not None and told[0] == _MADE
            raise NotReconnectedError("the job's learners have not made the new connections")
        known = {**told[1], **mine}
        return [known.get(rank) for rank in range(self._size)]

    def _relayed(self, kind: str, mine: dict[int, Any]) -> Any:
        if self._conversation is None:
            return None
        with contextlib.suppress(PeerFailedError):
            self._conversation.send((kind, mine))
            return self._conversation.receive(max(0.0, self._ends - time.monotonic()))
        return None


def _gathered(world: World, value: Any) -> dict[int, Any]:
    """Gather a value from each learner of `world` (the job's or the joining super learner's), by rank."""
    values = world.collectives.gather("admit", value)  # this may shrink collectives.ranks
    return dict(zip(world.collectives.ranks, values, strict=True))


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
