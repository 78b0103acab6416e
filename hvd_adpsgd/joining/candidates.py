"""Super learners that come later, as the job sees them: those that it starts, and those that ask to join.

requesting  it has sent a JoinRequest to the listener, and has no number
starting    it has a number, and runs its script up to hvd.admit
ready       it waits in hvd.admit
failed      see `problem`
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
from hvd_adpsgd.joining.listener import Conversation, Listener, new_secret
from hvd_adpsgd.launch.world import Placement, World

__all__ = [
    "JoinOffer",
    "JoinRequest",
    "JoinServer",
    "JoiningSuperLearner",
    "join_server",
    "open_listener",
    "open_own_listener",
]

log = logging.getLogger("hvd_adpsgd")

JOIN, JOIN_SECRET_FILE = "HVD_ADPSGD_JOIN", "HVD_ADPSGD_JOIN_SECRET_FILE"
_REQUEST_S = 10.0
_DISMISSED_S = 1.0  # for those that receive that the job has ended
_LOOPBACK = "127.0.0.1"
# What a launcher tells a process about its place: a super learner that is started here has another one.
_OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "PRTE_"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_GLOO_"),
    *("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME", JOIN),
)


@dataclass(frozen=True)
class JoinRequest:
    """What a joining super learner sends first.

    Attributes:
        placements: of its learners; hosts are numbered within it.
        instead_of: the failed super learner that it replaces; None: any number.
    """

    placements: tuple[Placement, ...]
    instead_of: int | None


@dataclass(frozen=True)
class JoinOffer:
    """What a joining super learner receives: the job with it.

    Attributes:
        super_rank: its number.
        placements, groups, config, started: of the job, as in World.
    """

    super_rank: int
    placements: tuple[Placement, ...]
    groups: tuple[tuple[int, ...], ...]
    config: Config
    started: frozenset[int]

    @classmethod
    def of(cls, world: World, number: int, request: JoinRequest | None, host: int) -> JoinOffer:
        """For a joining super learner, which gets the ranks of a failed super learner, or the next ones.

        Args:
            world: of a learner of the job.
            number: the super_rank.
            request: None before it has sent one: it is started here.
            host: rank of the learner that invites it, on whose host it is if that has started it.
        """
        started = world.started - {number}
        placements, groups = world.placements, world.groups
        if request is None or request.instead_of is not None:
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
    """The placements with those of a group on the host of learner `to`, whose devices they share."""
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
    """One that is coming.

    Args:
        number: its super_rank; None while it is requesting.
        ends: of time.monotonic: longest time until it is ready.
        processes: of those that this learner has started.

    Attributes:
        number: see the arguments.
        problem: why it has failed.
        conversation, request: once it has connected to the listener.
    """

    def __init__(
        self, number: int | None, ends: float, processes: Sequence[subprocess.Popen[bytes]] = ()
    ):
        self.number, self.problem = number, ""
        self.conversation: Conversation | None = None
        self.request: JoinRequest | None = None
        self._ends, self._processes = ends, processes
        self._offer: JoinOffer | None = None
        self._terms: Any = None
        self._is_ready = False

    def enters(self, conversation: Conversation, request: JoinRequest) -> None:
        """It has connected to the listener."""
        self.request, self.conversation = request, conversation

    def expect(self, offer: JoinOffer, terms: Any, ends: float | None = None) -> None:
        """It has a number now, and must send `terms` when it is ready."""
        self._offer, self._terms = offer, terms
        self.number, self._ends = offer.super_rank, ends or self._ends

    def send_offer(self) -> None:
        """Tell it its number: it runs its script up to hvd.admit."""
        self.send(self._offer)

    def state(self) -> str:
        """See the module; does not block."""
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
        except PeerFailedError:
            self.problem = "it ended before it was ready; its own messages tell why"
        ended = [p.returncode for p in self._processes if p.poll() is not None]
        if ended and not self._is_ready and not self.problem:
            self.problem = f"it ended before it was ready, with status {ended[0]}"
        if self.number is not None and not self._is_ready and time.monotonic() > self._ends:
            self.problem = self.problem or "it was not ready after patience_s"

    def send(self, value: Any) -> None:
        """Send it an object; if it is lost, `state` tells."""
        assert self.conversation is not None
        with contextlib.suppress(PeerFailedError):
            self.conversation.send(value)

    def dismiss(self, patience_s: float = 0.0, why: str = "") -> None:
        """It is not needed: it exits. What was started here is killed if it has not after `patience_s`.

        Args:
            patience_s: see above.
            why: it is given up for this; "": the job ends.
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
    """The first of its terms that is another one than the job's."""
    for its_one, our_one in itertools.zip_longest(its, ours, fillvalue="nothing more"):
        if its_one != our_one:
            return f"it averages {its_one}, the others {our_one}"
    return ""


class JoinServer:
    """The joining super learners of this learner: its listener, and what it has started."""

    def __init__(self) -> None:
        self.candidates: list[JoiningSuperLearner] = []
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._listener: Listener | None = None
        self._place, self._secret = "", b""
        self._servers: list[Any] = []

    def open(self, failure_s: float, address: str = _LOOPBACK, secret: bytes = b"") -> str:
        """Open the listener, once; where it is, as host:port. See Listener for `failure_s`."""
        if self._listener is None:
            self._secret = secret or new_secret()
            self._listener = Listener(address, self._secret, self._enter, failure_s)
            self._place = f"[{address}]" if ":" in address else address
        return f"{self._place}:{self._listener.port}"

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
        """Start the processes of a super learner in place of a failed one, on this host.

        Args:
            world: of this learner.
            number: of the super learner.
            terms: what it must send when it is ready.
            patience_s: longest time until then.
        """
        size = len(world.groups[number])
        told = {JOIN: self.open(world.config.failure_timeout_s), REPLACES: str(number)}
        if size > 1:
            told |= self._rendezvous(size)
        processes = [_started({**told, "HOROVOD_RANK": str(i)}, self._secret) for i in range(size)]
        if not self._started:
            world.departure.at_leave(self._leave_too)
        self._started = [p for p in self._started if p.poll() is None] + processes
        candidate = JoiningSuperLearner(number, time.monotonic() + patience_s, processes)
        candidate.expect(JoinOffer.of(world, number, None, world.rank), terms)
        with self._lock:
            self.candidates.append(candidate)

    def _rendezvous(self, size: int) -> dict[str, str]:
        """Variables with which processes meet as under `horovodrun --gloo`."""
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
        """SIGTERM: this host is taken away, or the launcher ends the job, and knows nothing of these."""
        for process in self._started:
            if process.poll() is None:
                process.terminate()

    def remove(self, candidate: JoiningSuperLearner) -> None:
        """It has joined, or has failed."""
        with self._lock:
            self.candidates.remove(candidate)

    def close(self) -> None:
        """Nobody comes any more."""
        if self._listener is not None:
            self._listener.close()
        for candidate in self.candidates:
            candidate.dismiss(_DISMISSED_S)
        for server in self._servers:
            server.stop()


_join_server: JoinServer | None = None


def join_server(world: World) -> JoinServer:
    """The joining super learners of this learner, until shutdown()."""
    global _join_server
    if _join_server is None:
        _join_server = JoinServer()
        world.teardown.at_shutdown(_close)
    return _join_server


def _close() -> None:
    global _join_server
    if _join_server is not None:
        _join_server.close()
        _join_server = None


def open_listener(world: World) -> None:
    """Let super learners that come later connect to each leader; all learners call this together.

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
    if world.rank == 0:
        log.warning("super learners can join: %s=%s %s=%s", JOIN, listeners, JOIN_SECRET_FILE, name)


def open_own_listener(world: World, address: str, secret: bytes) -> None:
    """On a super learner that has joined a job with listeners: those of the first learners end with them.

    Args:
        world: with this super learner.
        address: on which this learner listens to the others.
        secret: with which it has come.
    """
    if world.is_leader and world.config.join_secret_file is not None:
        listener = join_server(world).open(world.config.failure_timeout_s, address, secret)
        log.warning(
            "super learner %d: others can join here too: %s=%s", world.super_rank, JOIN, listener
        )


def _require_open(world: World) -> None:
    if strategies.parse(world.config.averaging).averages == "nothing":
        raise InnerOnlyError(
            f"init(): {JOIN_SECRET_FILE} is set with averaging={world.config.averaging}, which makes one "
            "super learner of all: others cannot join it. Choose another strategy, or leave the file out."
        )


def _secret(name: str) -> bytes | LaunchError:
    """Of this file, which is made if it is missing."""
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
    """Return the secret in a text.

    Raises:
        ValueError: if there is none.
    """
    secret = bytes.fromhex(text.strip())
    if len(secret) != SECRET_NBYTES:
        raise ValueError(f"{len(secret)} bytes, needed are {SECRET_NBYTES} in hexadecimal digits")
    return secret


def _started(told: dict[str, str], secret: bytes) -> subprocess.Popen[bytes]:
    """Start the program once more, as another learner; the secret goes through a pipe."""
    reads, writes = os.pipe()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    try:
        os.write(writes, secret.hex().encode())
        env = {**kept, **told, JOIN_SECRET_FILE: f"/dev/fd/{reads}"}
        command = [sys.executable, *sys.orig_argv[1:]]
        return subprocess.Popen(command, env=env, pass_fds=[reads])
    finally:
        os.close(writes)
        os.close(reads)
