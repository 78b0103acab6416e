"""Joining a running job, from the side of a learner of the joining super learner.

init()       the super learner's first learner asks to join; init() returns with ranks of the job
the script   builds its model, wraps its optimizer
hvd.admit    waits until the job's learners next call hvd.admit; then all learners make new connections
"""

import contextlib
import logging
import math
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import torch

from hvd_adpsgd.config import REPLACES, Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.errors import AdpsgdError, LaunchError, PeerFailedError
from hvd_adpsgd.joining.candidates import (
    JOIN,
    JOIN_SECRET_FILE,
    JoinOffer,
    JoinRequest,
    checked,
    open_own_listener,
)
from hvd_adpsgd.joining.join_state import (
    JoinState,
    exchange_parts,
    has_parts,
    shares,
    terms,
    unpack,
)
from hvd_adpsgd.joining.listener import Conversation, connect
from hvd_adpsgd.joining.reconnect import (
    RECONNECT_S,
    Gather,
    NewGroup,
    drop,
    prepare,
    receive,
    switch,
)
from hvd_adpsgd.launch import bootstrap, communicators, processes, rendezvous
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.deadline import Deadline
from hvd_adpsgd.launch.rendezvous import Opener
from hvd_adpsgd.launch.world import Communicators, Placement, World
from hvd_adpsgd.lifecycle.shutdown import exit_state
from hvd_adpsgd.messaging.sockets import Hub
from hvd_adpsgd.training.pause import resume
from hvd_adpsgd.training.presence import live

log = logging.getLogger("hvd_adpsgd")

_LOOK_S = 0.5
_MPI_FAILURE_S = 60.0  # longest time until MPI reports that a learner has failed
_TOGETHER_S = 5.0  # super learners that end within this time were ended together, by the launcher


class JoiningLearner:
    """A learner of a super learner that joins a running job.

    Args:
        store: connects to torch's TCPStore, in which the learners of this super learner find each other.
        config: the options given to init(), used until the job sends its own.

    Attributes:
        offer: what the job has sent: this super learner's super_rank, and the job's placements and options.
        conversation: connection to a learner of the job; None except on the super learner's first learner.
        secret: the job's secret; empty except on this super learner's first learner.
    """

    def __init__(self, store: Opener | None, config: Config | None = None):
        place = rendezvous.of_environment(os.environ)
        self._options = config or communicators.options_of_network()
        if place is None:
            communicators.require_alone(os.environ)
            exit_state.hub = Hub(0, 1, self._options, lambda value: [value])
            self.everyone: Any = exit_state.hub.communicator([0])
        else:
            deadline = Deadline(self._options.start_timeout_s)
            self.everyone = communicators.over_sockets(place, store, self._options, deadline)
        self._host = communicators.of_host(self.everyone)
        self.conversation: Conversation | None = None
        self.problem = ""  # why the conversation has ended; see Gather
        self.secret = b""
        self.offer: JoinOffer = self._offered()

    def _offered(self) -> JoinOffer:
        head = self._host.bcast(self.everyone.Get_rank())
        mine = Placement(head, socket.gethostname(), self._host.Get_rank(), self._host.Get_size())
        placements = tuple(self.everyone.allgather(mine))
        told: Any = None
        if self.everyone.Get_rank() == 0:
            try:
                told = self._requested(placements)
            except (LaunchError, PeerFailedError) as error:
                told = error
        told = self.everyone.bcast(told)
        if isinstance(told, Exception):
            raise told
        if told is None:
            self._exit_without_job()
        assert isinstance(told, JoinOffer)
        return told

    def _requested(self, placements: tuple[Placement, ...]) -> Any:
        options = self._options
        self.secret = _secret(os.environ.get(JOIN_SECRET_FILE) or options.join_secret_file or "")
        number = os.environ.get(REPLACES)
        by_launcher = processes.is_replaced_by_launcher()
        request = JoinRequest(placements, None if number is None else int(number), by_launcher)
        lost: PeerFailedError | None = None
        while True:
            try:
                self.conversation = connect(
                    listeners(options), self.secret, options.failure_timeout_s
                )
            except LaunchError:
                if lost is not None:
                    raise lost from None
                raise
            try:
                self.conversation.send(request)
                return self.conversation.receive(None)
            except PeerFailedError as error:  # the learner there has failed: another one may listen
                self.conversation.close()
                lost = error

    def _exit_without_job(self) -> None:
        log.warning("the job ended before this super learner joined.")
        raise SystemExit(0)

    def make_world(self) -> World:
        """Make a world with the job's ranks, whose communicators contain only this super learner."""
        told, everyone = self.offer, self.everyone
        plain, departures = communicators.duplicate(everyone), communicators.duplicate(everyone)
        inner = communicators.duplicate(everyone)
        comms = Communicators(everyone, plain, departures, self._host, inner, None)
        rank = told.groups[told.super_rank][everyone.Get_rank()]
        return World.make(told.config, told.placements, told.groups, rank, comms, joining=True)

    def tell(self, terms: Any) -> None:
        """Send the job this super learner's strategy, shards and parameters, which must equal the job's."""
        if self.conversation is not None:
            with contextlib.suppress(PeerFailedError):  # `ready` raises it
                self.conversation.send(terms)

    def ready(self, world: World) -> tuple[JoinOffer, tuple[int, ...], tuple[int, ...]]:
        """Wait until the job admits this super learner.

        Args:
            world: the world of this learner.

        Returns:
            The job including this super learner, the ranks of all its running learners, and the ranks of the
            learners that send the state.

        Raises:
            PeerFailedError: if the learner of the job at the other end of the connection has failed.
            SystemExit: with status 0, if the job has ended.
        """
        self.problem = ""
        told: Any = ()
        if self.conversation is not None:
            try:
                told = self.conversation.receive(None)
            except PeerFailedError as error:
                told = error
        told = next(t for t in world.collectives.gather("admit", told) if t != ())
        if isinstance(told, Exception):
            raise told
        if told is None:
            self._exit_without_job()
        offer, ranks, senders = told
        return offer, ranks, senders

    def verdict(self, world: World) -> Any:
        """Return True if the job has switched to the new connections, which include this super learner.

        False: this super learner waits for a later call of hvd.admit. Anything else: it does not join.

        The job's learners have prepared the switch after RECONNECT_S, but their vote then waits for a learner
        that has stopped until that one counts as failed. If this super learner gave up earlier, they would
        switch to connections with a super learner that has ended.
        """
        said = None
        if self.conversation is not None:
            with contextlib.suppress(PeerFailedError):
                said = self.conversation.receive(verdict_s(world.config.failure_timeout_s))
            if said is not False:
                self.conversation.close()
        answers = world.collectives.gather("admit", said)
        return next((said for said in answers if said is not None), None)


def verdict_s(failure_timeout_s: float) -> float:
    """Longest wait of a joining super learner for the vote of the job's learners; two of them may stop."""
    return 2 * RECONNECT_S + 2 * max(failure_timeout_s, _MPI_FAILURE_S)


def _secret(name: str) -> bytes:
    try:
        if stat.S_IMODE(os.stat(name).st_mode) & 0o077:
            log.warning(
                "%s=%s can be read by others on this host: chmod 600.", JOIN_SECRET_FILE, name
            )
        return checked(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"init(): {JOIN} is set, and {JOIN_SECRET_FILE}={name!r} cannot be read ({error}). Give the file "
            "that the job was started with: 64 hexadecimal digits."
        ) from None


def watch_job(world: World) -> None:
    """In a process that a learner has started: leave when the job's launcher ends the job.

    The launcher does not know this process, which would otherwise train on alone. If the launcher's super
    learners fail one by one, this process continues, also when none of them is left.
    """
    if world.super_rank in world.started:
        threading.Thread(target=_watch_job, daemon=True, name="hvd_adpsgd.launcher").start()


def _watch_job() -> None:
    # by super_rank, when a super learner that the launcher has started was first seen to have ended
    ended: dict[int, float] = {}
    while worlds.is_initialized():
        world, now = worlds.current(), time.monotonic()
        gone = world.collectives.ended()
        launched = [i for i in range(world.super_size) if i not in world.started]
        for i in launched:
            if gone.issuperset(world.groups[i]):
                ended.setdefault(i, now)
        lately = [i for i in launched if now - ended.get(i, -math.inf) < _TOGETHER_S]
        is_over = len(lately) > 1 and ended.keys() >= set(launched)
        # in a normal shutdown(), there is no world when the processes end
        if is_over and worlds.is_initialized():
            log.warning(
                "super learner %d leaves: the launcher has ended all super learners that it started.",
                world.super_rank,
            )
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(_LOOK_S)


_joining: JoiningLearner | None = None


def listeners(config: Config | None) -> str:
    """Return the listeners of the job that this process joins, as host:port, ...; "" if it joins none.

    HVD_ADPSGD_JOIN comes before Config.join: hvd.admit sets it for the super learners that it starts.
    """
    told = os.environ.get(JOIN, "").strip()
    if told.lower() not in ("", "none"):
        return told
    return (config and config.join) or ""


def is_joining(config: Config | None) -> bool:
    """Return whether this process belongs to a super learner that joins a running job."""
    return bool(listeners(config))


def enter(store: Opener | None, config: Config | None = None) -> World:
    """Run init() on a joining super learner; worlds.current returns its world from now on.

    Raises:
        LaunchError: if the job cannot be joined.
        PeerFailedError: if the connection to the job is lost.
        SystemExit: with status 0, if the job ends before it answers.
    """
    global _joining
    bootstrap.watch_exit()
    _joining = JoiningLearner(store, config)
    return bootstrap.enter(_joining.make_world())


def arrive(world: World, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Join the running job, on a joining learner; return the state of its learners, as packed by admit."""
    candidate = _joining
    assert candidate is not None, "`enter` has made it"
    for averaging in live():
        averaging.engines.make_memory_ahead()
    candidate.tell(terms(optimizers))
    prepared = None
    while prepared is None:
        offer, ranks, senders = candidate.ready(world)
        prepared = _met_as_candidate(world, candidate, offer, ranks, senders)
    switch(world, *prepared)
    new_group = prepared[0]
    told = _receive(new_group, model)
    told.give(optimizers)
    if has_parts(model):
        world = worlds.current()
        exchange_parts(world, model, live(), world.super_rank_of(senders[0]), world.super_rank)
    for averaging in live():
        resume(averaging)
    watch_job(worlds.current())
    open_own_listener(worlds.current(), new_group.hub.address, candidate.secret)
    return unpack(told.state)


def _met_as_candidate(
    world: World,
    candidate: JoiningLearner,
    offer: JoinOffer,
    ranks: tuple[int, ...],
    senders: tuple[int, ...],
) -> tuple[NewGroup, list[Engine]] | None:
    """Return the new connections and engines; None if the job puts this super learner off.

    Raises:
        PeerFailedError: if the job continues without this super learner.
    """
    ends = time.monotonic() + 2 * RECONNECT_S  # later than the other learners, which give up first
    gather = Gather(world, len(offer.placements), ends, candidate)
    prepared = prepare(world, offer, ranks, senders, gather, ends)
    verdict = candidate.verdict(world)
    if verdict is True and prepared is not None:
        return prepared
    drop(prepared)
    if isinstance(verdict, AdpsgdError):
        raise verdict
    if verdict is not False:
        raise PeerFailedError(
            f"super learner {world.super_rank} was to join, but the others did not connect to it: one of "
            f"them failed, or did not come within {RECONNECT_S:g} s. They continue training."
        )
    return None


@torch.no_grad()
def _receive(new_group: NewGroup, model: torch.nn.Module) -> JoinState:
    """Overwrite the model with the parts that the senders send; return the first sender's JoinState."""
    tensors, told = [*model.parameters(), *model.buffers()], []
    for transfer, share in zip(
        new_group.transfers, shares(model, len(new_group.transfers)), strict=True
    ):
        assert transfer is not None
        state, values = receive(transfer)
        told.append(state)
        for i, value in zip(share, values, strict=True):
            if tensors[i].shape == value.shape:  # a cache may have another one on each learner
                tensors[i].data.copy_(torch.from_numpy(value))
    made: JoinState = unpack(told[0])
    return made
