"""Joining super learners, from the job's side: the job's learners start some of them, others ask to join.

The states of a joining super learner:

requesting  it has sent a JoinRequest to the listener, and has no super_rank yet
starting    it has a super_rank, and runs its script up to hvd.admit
ready       it waits in hvd.admit
failed      it cannot join; its `problem` is the reason
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_adpsgd import strategies
from hvd_adpsgd.config import REPLACES, Config
from hvd_adpsgd.engine.handshake import SECRET_NBYTES
from hvd_adpsgd.engine.interfaces import addresses, choose_address, network_name
from hvd_adpsgd.errors import InnerOnlyError, LaunchError, PeerFailedError
from hvd_adpsgd.inner import backend
from hvd_adpsgd.joining.listener import Conversation, Listener, new_secret
from hvd_adpsgd.joining.meetings import Meetings
from hvd_adpsgd.launch import processes
from hvd_adpsgd.launch.world import Placement, World

log = logging.getLogger("hvd_adpsgd")

JOIN, JOIN_SECRET_FILE = "HVD_ADPSGD_JOIN", "HVD_ADPSGD_JOIN_SECRET_FILE"
_REQUEST_S = 10.0
_DISMISSED_S = 1.0  # wait for started processes to exit after the job, before they are killed
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class JoinRequest:
    """The first message of a joining super learner to the job.

    Attributes:
        placements: placements of its learners; their `host` is a rank within that super learner.
        instead_of: super_rank of the failed super learner to replace; None: the job assigns the next free
            super_rank.
        by_launcher: whether the job's launcher has started it, in the slots of the failed one.
    """

    placements: tuple[Placement, ...]
    instead_of: int | None
    by_launcher: bool = False


@dataclass(frozen=True)
class JoinOffer:
    """The job's answer to a joining super learner: its super_rank, and all learners and options of the job.

    Attributes:
        super_rank: super_rank of the joining super learner.
        placements, groups, config, started: as in World, of the job with the joining super learner.
    """

    super_rank: int
    placements: tuple[Placement, ...]
    groups: tuple[tuple[int, ...], ...]
    config: Config
    started: frozenset[int]

    @classmethod
    def of(cls, world: World, number: int, request: JoinRequest | None, host: int) -> JoinOffer:
        """Make the offer to a joining super learner: a failed super learner's ranks, or the next free ranks.

        Args:
            world: the world of a learner of the job.
            number: super_rank of the joining super learner.
            request: its JoinRequest; None if a learner starts it, before it has sent a JoinRequest.
            host: rank of the learner that makes the offer; a super learner that it starts runs on the same
                host.
        """
        started = world.started - {number}
        placements, groups = world.placements, world.groups
        if request is None or not (request.instead_of is None or request.by_launcher):
            started |= {number}
            placements = _moved(placements, groups[number], host)
        if number == len(groups) and request is not None:
            first = len(placements)
            groups = (*groups, tuple(range(first, first + len(request.placements))))
            placements += tuple(
                Placement(first + p.host, p.hostname, p.local_rank, p.local_size)
                for p in request.placements
            )
        return cls(number, placements, groups, world.config.replace(wire="tcp"), started)


def _moved(
    placements: tuple[Placement, ...], group: Sequence[int], to: int
) -> tuple[Placement, ...]:
    """Return the placements with the learners of `group` moved to the host of learner `to`.

    The moved learners share the devices of that host.
    """
    host = placements[to]
    if placements[group[0]].host == host.host:
        return placements
    return tuple(
        Placement(host.host, host.hostname, p.local_rank % host.local_size, host.local_size)
        if rank in group
        else p
        for rank, p in enumerate(placements)
    )


class JoiningSuperLearner:
    """A joining super learner, as seen by the learner that has started it or to which it has connected.

    Args:
        number: its super_rank; None while its state is requesting.
        ends: deadline, of time.monotonic, for its state to become ready.
        processes: its processes, if this learner has started them.

    Attributes:
        number: see the arguments.
        problem: why its state is failed; "" if it is not.
        tries: how often all have tried to connect to it.
        conversation, request: its connection to this learner, and its JoinRequest; None until it has
            connected to the listener.
    """

    def __init__(
        self, number: int | None, ends: float, processes: Sequence[subprocess.Popen[bytes]] = ()
    ):
        self.number, self.problem, self.tries = number, "", 0
        self.conversation: Conversation | None = None
        self.request: JoinRequest | None = None
        self._ends, self._processes = ends, processes
        self._offer: JoinOffer | None = None
        self._terms: Any = None
        self._is_ready = False

    def enters(self, conversation: Conversation, request: JoinRequest) -> None:
        """Record that the joining super learner has connected to the listener, and sent its request."""
        self.request, self.conversation = request, conversation

    def expect(self, offer: JoinOffer, terms: Any, ends: float | None = None) -> None:
        """Assign the super_rank of `offer`, and the terms that the joining super learner must match.

        These are the job's strategy, shards and parameters. `ends`: a new deadline for its state to be ready.
        """
        self._offer, self._terms = offer, terms
        self.number, self._ends = offer.super_rank, ends or self._ends

    def send_offer(self) -> None:
        """Send the offer to the joining super learner, which then runs its script up to hvd.admit."""
        self.send(self._offer)

    def state(self) -> str:
        """Return the joining super learner's state: requesting, starting, ready or failed; does not block."""
        if not self.problem and not self._is_ready:
            self._look()
        if self.problem:
            return "failed"
        if self.number is None:
            return "requesting"
        return "ready" if self._is_ready else "starting"

    def _look(self) -> None:
        try:
            for terms in self.conversation.received() if self.conversation is not None else ():
                self._is_ready = terms == self._terms
                if not self._is_ready:
                    self.problem = _difference(terms, self._terms)
        except PeerFailedError as error:
            self.problem = f"it ended before it was ready, or stopped ({error}); see its own output"
        ended = [p.returncode for p in self._processes if p.poll() is not None]
        if ended and not self._is_ready and not self.problem:
            self.problem = f"it ended before it was ready, with status {ended[0]}"
        if self.number is not None and not self._is_ready and time.monotonic() > self._ends:
            self.problem = self.problem or "it was not ready after patience_s"

    def send(self, value: Any) -> None:
        """Send the joining super learner an object; its state becomes failed if the connection is lost."""
        assert self.conversation is not None
        with contextlib.suppress(PeerFailedError):
            self.conversation.send(value)

    def dismiss(self, patience_s: float = 0.0, why: str = "") -> None:
        """Make the joining super learner exit without joining; kill processes started here that do not exit.

        Args:
            patience_s: longest wait, in seconds, for these processes to exit by themselves.
            why: the reason, which the joining super learner raises as LaunchError; "": the job has ended, and
                the joining super learner exits with status 0.
        """
        if self.conversation is not None:
            self.send(LaunchError(f"this super learner was not let in: {why}.") if why else None)
            self.conversation.close()
        ends = time.monotonic() + (patience_s if self.conversation is not None else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends - time.monotonic()))
            process.kill()
            process.wait()


def _difference(its: Sequence[str], ours: Sequence[str]) -> str:
    """Return the first difference between a joining super learner's terms and the job's, as text, or ""."""
    for its_one, our_one in itertools.zip_longest(its, ours, fillvalue="nothing more"):
        if its_one != our_one:
            return f"it averages {its_one}, the others {our_one}"
    return ""


class JoinServer:
    """The joining super learners that connect to this learner's listener, or that this learner starts.

    Attributes:
        candidates: these super learners.
        failures: by super_rank, the number of failed starts.
        said: warnings that were logged.
        left: super learners that have left, and are not replaced yet.
        joined: those that joined in the last call of hvd.admit, and when (monotonic); the next call checks if
            they live.
        known: super learners lost in the last call, and not replaced since.
        elsewhere: by super_rank that another learner has offered, the rank of that one, as of the last call;
            -1: not known.
        again: whether the last call has left super learners to be started by the next one.
        meetings: decides when learners meet, see Meetings.
    """

    def __init__(self, rank: int = 0) -> None:
        self.failures: dict[int, int] = {}
        self.said: set[str] = set()
        self.left: set[int] = set()
        self.joined: dict[int, float] = {}
        self.known: set[int] = set()
        self.elsewhere: dict[int, int] = {}
        self.again = False
        self.meetings = Meetings(rank)
        self.candidates: list[JoiningSuperLearner] = []
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._listener: Listener | None = None
        self._place, self._secret = "", b""
        self._servers: list[Any] = []

    def open(self, failure_s: float, address: str = _LOOPBACK, secret: bytes = b"") -> str:
        """Open the listener, if it is not open; return its address as host:port. Arguments: see Listener."""
        if self._listener is None:
            self._secret = secret or new_secret()
            self._listener = Listener(address, self._secret, self._enter, failure_s)
            self._place = f"[{address}]" if ":" in address else address
        return self.address

    @property
    def address(self) -> str:
        """The listener's address as host:port; "" if it is not open."""
        return f"{self._place}:{self._listener.port}" if self._listener is not None else ""

    def _enter(self, conversation: Conversation) -> None:
        request: JoinRequest = conversation.receive(_REQUEST_S)
        with self._lock:
            for candidate in self.candidates:
                if candidate.number == request.instead_of and candidate.conversation is None:
                    candidate.enters(conversation, request)
                    candidate.send_offer()
                    return
            candidate = JoiningSuperLearner(None, time.monotonic())
            candidate.enters(conversation, request)
            self.candidates.append(candidate)

    def start(self, world: World, number: int, terms: Any, patience_s: float) -> None:
        """Start the processes of a super learner on this host, in place of a failed super learner.

        Args:
            world: the world of this learner.
            number: super_rank of the failed super learner.
            terms: terms that the new super learner must send when it is ready; see expect().
            patience_s: longest time, in seconds, until the new super learner is ready.
        """
        size = len(world.groups[number])
        told = {JOIN: self.open(world.config.failure_timeout_s), REPLACES: str(number)}
        places = [{"HOROVOD_RANK": "0"}]
        if size > 1 and backend() == "torch":
            port = processes.free_port(_LOOPBACK)
            places = [processes.place(i, size, i, size, _LOOPBACK, port) for i in range(size)]
        elif size > 1:
            its = self._rendezvous(size)
            places = [{**its, "HOROVOD_RANK": str(i)} for i in range(size)]
        started = [_started({**told, **place}, self._secret) for place in places]
        if not self._started:
            world.departure.at_leave(self._leave_too)
        self._started = [p for p in self._started if p.poll() is None] + started
        candidate = JoiningSuperLearner(number, time.monotonic() + patience_s, started)
        candidate.expect(JoinOffer.of(world, number, None, world.rank), terms)
        with self._lock:
            self.candidates.append(candidate)

    def _rendezvous(self, size: int) -> dict[str, str]:
        """Start a rendezvous server for `size` processes; return the variables with its address, as
        `horovodrun --gloo` sets them.
        """
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        port = server.start()
        server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
        self._servers.append(server)
        return {
            "HOROVOD_SIZE": str(size),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": _LOOPBACK,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }

    def _leave_too(self) -> None:
        """Send SIGTERM to the processes started here when this learner leaves after SIGTERM.

        This host is preempted, or the launcher ends the job, and the launcher does not know these processes.
        """
        for process in self._started:
            if process.poll() is None:
                process.terminate()

    def remove(self, candidate: JoiningSuperLearner) -> None:
        """Remove a super learner that has joined or has failed."""
        with self._lock:
            self.candidates.remove(candidate)

    def close(self) -> None:
        """Close the listener, and dismiss the super learners that have not joined."""
        if self._listener is not None:
            self._listener.close()
        for candidate in self.candidates:
            candidate.dismiss(_DISMISSED_S)
        for server in self._servers:
            server.stop()


_join_server: JoinServer | None = None


def join_server(world: World) -> JoinServer:
    """Return the JoinServer of this learner, which is made at the first call, and closed in shutdown()."""
    global _join_server
    if _join_server is None:
        _join_server = JoinServer(world.rank)
        world.teardown.at_shutdown(_close)
    return _join_server


def _close() -> None:
    global _join_server
    if _join_server is not None:
        _join_server.close()
        _join_server = None


def listener(world: World) -> str:
    """Return the address of this learner's listener, if others can know its secret; else ""."""
    if _join_server is None or world.config.join_secret_file is None:
        return ""
    return _join_server.address


def notify_launcher(world: World) -> None:
    """Report to the launcher of `run` this learner's super learner, and where others can join."""
    is_member = world.rank in world.collectives.ranks and not world.collectives.joining
    processes.notify_launcher(
        super_rank=world.super_rank, listener=listener(world), is_member=is_member
    )


def open_listener(world: World) -> None:
    """Open a listener for joining super learners on each leader; all learners call this together.

    Raises:
        LaunchError: on all learners, if the secret cannot be read or written.
        InnerOnlyError: on all learners, if HVD_ADPSGD_AVERAGING=synchronous makes them one super learner.
    """
    name = world.config.join_secret_file
    if not any(world.collectives.gather("init", name is not None)):
        return
    _require_open(world)
    told: Any = _secret(name or "") if world.rank == 0 else None
    secret = world.collectives.gather("init", told)[0]
    if isinstance(secret, Exception):
        raise secret
    known = world.collectives.gather("init", (network_name(), addresses()))
    mine = ""
    if world.is_leader:
        address = choose_address(world.config.nics, network_name(), known)
        mine = join_server(world).open(world.config.failure_timeout_s, address, secret)
    listeners = ",".join(filter(None, world.collectives.gather("init", mine)))
    if world.rank == 0 and not processes.is_replaced_by_launcher():
        log.warning("super learners can join: %s=%s %s=%s", JOIN, listeners, JOIN_SECRET_FILE, name)


def open_own_listener(world: World, address: str, secret: bytes) -> None:
    """Open a listener on a super learner that has joined: each listener ends with its own super learner.

    Args:
        world: the world of this learner, after it has joined.
        address: address on which this learner listens to other learners.
        secret: the job's secret, with which this super learner has joined.
    """
    if world.is_leader and world.config.join_secret_file is not None:
        listener = join_server(world).open(world.config.failure_timeout_s, address, secret)
        if not processes.is_replaced_by_launcher():
            log.warning(
                "super learner %d: others can join here too: %s=%s",
                world.super_rank,
                JOIN,
                listener,
            )


def _require_open(world: World) -> None:
    if strategies.parse(world.config.averaging).averages == "nothing":
        raise InnerOnlyError(
            f"init(): {JOIN_SECRET_FILE} is set with averaging={world.config.averaging}, which makes one "
            "super learner of all: others cannot join it. Choose another strategy, or leave the file out."
        )


def _secret(name: str) -> bytes | LaunchError:
    """Return the secret in the file `name`, which is made if missing; return the error if that fails."""
    try:
        with contextlib.suppress(FileExistsError):
            made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(made, "w") as file:
                file.write(new_secret().hex())
        if os.stat(name).st_mode & 0o077:
            raise ValueError("its mode lets others read it: chmod 600")
        return checked(Path(name).read_text())
    except (OSError, ValueError) as error:
        return LaunchError(f"init(): {JOIN_SECRET_FILE}={name!r} cannot be used: {error}.")


def checked(text: str) -> bytes:
    """Return the secret that a text contains as hexadecimal digits.

    Raises:
        ValueError: if the text is not SECRET_NBYTES bytes in hexadecimal digits.
    """
    secret = bytes.fromhex(text.strip())
    if len(secret) != SECRET_NBYTES:
        raise ValueError(f"{len(secret)} bytes, needed are {SECRET_NBYTES} in hexadecimal digits")
    return secret


def _started(told: dict[str, str], secret: bytes) -> subprocess.Popen[bytes]:
    """Run this program in a new process with the environment variables `told`; pass the secret in a pipe."""
    reads, writes = os.pipe()
    try:
        os.write(writes, secret.hex().encode())
        told = {**told, JOIN_SECRET_FILE: f"/dev/fd/{reads}"}
        env = processes.environment(os.environ, told)
        command = [sys.executable, *sys.orig_argv[1:]]
        return subprocess.Popen(command, env=env, pass_fds=[reads])
    finally:
        os.close(writes)
        os.close(reads)
