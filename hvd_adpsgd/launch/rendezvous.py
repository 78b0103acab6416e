"""How processes find each other without MPI: environment variables with ranks, and a shared key-value store.

horovodrun --gloo                           HOROVOD_RANK, HOROVOD_SIZE; Horovod's rendezvous server
torchrun, and launchers that set the same   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; torch's TCPStore
srun                                        SLURM_PROCID, SLURM_STEP_NUM_TASKS; torch's TCPStore, by default
                                            on the first host
"""

import contextlib
import itertools
import json
import logging
import re
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from hvd_adpsgd.engine.handshake import RELEASE
from hvd_adpsgd.errors import LaunchError
from hvd_adpsgd.launch import processes
from hvd_adpsgd.launch.deadline import Deadline
from hvd_adpsgd.polling import polls

log = logging.getLogger("hvd_adpsgd")

_JOINED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
SCOPE, BEGUN = "hvd_adpsgd", "begun"  # at Horovod's server: see tools/patches/launchers.patch
_LONGEST_S = 0.2  # between two polls of a store
_LAST_S = 5.0  # longest wait of the store's process for other processes, after a failure
_ATTEMPT_S = 10.0  # longest time of one attempt to reach a store
_AGAIN_S = 1.0  # longest pause between two attempts to reach a store
_WARN_S = 10.0  # waiting time after which a warning says for which learners or which store
# ports for Slurm jobs without MASTER_PORT, and their number: below 32768, where Linux begins to choose ports
# for outgoing connections, one of which could have the port already
_FIRST_PORT, _PORTS = 12768, 20000


class Store(Protocol):
    """A key-value store that all processes of a job reach; methods as in torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> object:
        """Store an ASCII value under a key."""

    def has(self, key: str, /) -> bool:
        """Return whether a key has a value; does not wait for a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key, which must have a value."""


class Place(NamedTuple):
    """Rank of this process in the job, and address of the store in which processes find each other.

    Attributes:
        launcher: name of the launcher, for messages.
        rank, size: rank of this process, and number of processes of the job.
        host, port: address of the store.
        speaks_http: whether the store is Horovod's rendezvous server; else it is torch's TCPStore.
        serves: whether this process serves the store itself.
    """

    launcher: str
    rank: int
    size: int
    host: str
    port: int
    speaks_http: bool = False
    serves: bool = False

    def __str__(self) -> str:
        return f"learner {self.rank} of {self.size}, started by {self.launcher},"

    @property
    def store(self) -> str:
        """Address of the store, for messages."""
        return f"the store {self.host} port {self.port}"


Opener = Callable[[Place, float], Store]  # connects to the store of a Place, within some seconds


def of_environment(environ: Mapping[str, str]) -> Place | None:
    """Return rank and store that a launcher without MPI has given this process; None without such a launcher.

    Raises:
        LaunchError: if a variable is missing or invalid, or the launcher is that of elastic Horovod.
    """
    if any(name in environ for name in _JOINED_BY_MPI):
        return None
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return _of_horovod(environ)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        by_run = processes.PIPE in environ
        launcher = "python -m hvd_adpsgd run" if by_run else "torchrun, or a launcher like it"
        return _read(launcher, environ, *names)
    if _number(environ.get("SLURM_STEP_NUM_TASKS", "")) > 1 and "SLURM_PROCID" in environ:
        return _of_slurm(environ)
    return None


def _of_horovod(environ: Mapping[str, str]) -> Place:
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise LaunchError(
            "init(): elastic Horovod (HOROVOD_ELASTIC=1) starts and ends learners by itself. Launch with "
            "`horovodrun --gloo -np N python ...`, without --min-np, --max-np and --host-discovery-script."
        )
    address, port = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
    place = _read("horovodrun --gloo", environ, "HOROVOD_RANK", "HOROVOD_SIZE", address, port)
    return place._replace(speaks_http=True, serves=False)


def _of_slurm(environ: Mapping[str, str]) -> Place:
    known = dict(environ)
    known.setdefault("MASTER_ADDR", _first_host(environ.get("SLURM_STEP_NODELIST", "")))
    job, step = (_number(environ.get(name, "")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    known.setdefault("MASTER_PORT", str(_FIRST_PORT + (job + 101 * step) % _PORTS))
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "MASTER_PORT")
    return _read("srun", known, *names)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list of hosts: rack[1-2]node[07-09,12],gpu1 gives rack1node07."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _read(
    launcher: str, environ: Mapping[str, str], rank: str, size: str, host: str, port: str
) -> Place:
    for name in (rank, size, host, port):
        value = environ.get(name, "")
        if not value or (name != host and not value.isdigit()):
            raise LaunchError(
                f"init(): {launcher} started this process, and {name} is {value!r}, allowed is "
                f"{'a host' if name == host else 'a number'}. Set it, or launch with `horovodrun -np N`."
            )
    at = environ[host].strip("[]")  # of an IPv6 address; sockets take it without brackets
    place = Place(launcher, int(environ[rank]), int(environ[size]), at, int(environ[port]))
    of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if place.rank >= place.size:
        raise LaunchError(
            f"init(): {rank}={place.rank} and {size}={place.size}, allowed is a rank in "
            f"[0, {place.size}). Start the processes with a launcher that sets both."
        )
    return place._replace(serves=place.rank == 0 and not of_agent)


class HttpStore:
    """A client of Horovod's rendezvous server, used as the store in which processes find each other."""

    def __init__(self, place: Place, seconds: float):
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        host = f"[{place.host}]" if ":" in place.host else place.host  # IPv6
        self._at = f"http://{host}:{place.port}/{SCOPE}"
        self._seconds = max(_AGAIN_S, min(_ATTEMPT_S, seconds))

    def set(self, key: str, value: str) -> None:
        """See Store."""
        asked = urllib.request.Request(f"{self._at}/{key}", data=value.encode(), method="PUT")
        with self._open(asked, timeout=self._seconds):
            pass

    def has(self, key: str) -> bool:
        """See Store."""
        try:
            self.get(key)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True

    def get(self, key: str) -> bytes:
        """See Store."""
        with self._open(f"{self._at}/{key}", timeout=self._seconds) as answer:
            return bytes(answer.read())


def opened(place: Place, opener: Opener, deadline: Deadline) -> Store:
    """Return the store at the address in `place`, once it can be reached.

    Raises:
        LaunchError: if its host or its port cannot be reached, or another program listens on that port.
    """
    problem: list[object] = ["no answer"]

    def act() -> Store:
        _await_store(place, deadline, problem)
        problem[:] = ["no such store answers there"]
        return opener(place, deadline.left)

    try:
        return deadline.bounded(act)
    except TimeoutError:
        told = f"{problem[0]}, for {deadline}"
    except Exception as error:  # torch raises exceptions of several classes
        told = _first_line(error)
    raise LaunchError(
        f"init(): {place} cannot open {place.store}: {told}. See that learner 0 is started, that this host "
        "resolves and reaches that host (MASTER_ADDR), and that no other program uses the port (MASTER_PORT)."
    )


def _await_store(place: Place, deadline: Deadline, problem: list[object]) -> None:
    """Wait until the name of the store's host resolves, and its port accepts connections.

    Both may take a while: names of Kubernetes pods appear late, and learner 0, which may serve the store,
    may start late.

    Args:
        place: rank and store of this process; if the process serves the store, only the name must resolve.
        deadline: the deadline, at which TimeoutError is raised.
        problem: a list, whose only element becomes the reason why the last attempt failed.
    """
    began, warned = time.monotonic(), False
    for _ in polls(longest_s=_AGAIN_S):
        try:
            if place.serves:
                socket.getaddrinfo(place.host, place.port)
                return
            seconds = max(0.01, min(_ATTEMPT_S, deadline.left))
            with socket.create_connection((place.host, place.port), timeout=seconds):
                return
        except socket.gaierror as error:
            problem[:] = [f"the name {place.host} does not resolve ({error.strerror})"]
        except OSError as error:
            problem[:] = [error.strerror or str(error)]
        if deadline.left <= 0:
            raise TimeoutError
        if not warned and time.monotonic() - began > _WARN_S:
            warned = True
            log.warning(
                "init(): %s waits for %s: %s. It gives up after %s.",
                place,
                place.store,
                problem[0],
                deadline,
            )


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, because torch's errors also contain a stack trace."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")


class StoreGather:
    """A function that gathers a value of each process through the store; all processes call it together.

    Values are sent as JSON, not pickled, because anybody who reaches the store can write to it.

    Args:
        store: the store of the job.
        place: rank and store of this process.
        deadline: the deadline of all calls together.
        attempt: number of the attempt of init() to connect, the same on all processes.

    A call raises LaunchError if a process does not come in time, runs another release, or has the same rank.
    """

    def __init__(self, store: Store, place: Place, deadline: Deadline, attempt: int = 0):
        self._store, self._place, self._deadline = store, place, deadline
        self._attempt, self._calls = attempt, itertools.count()
        self._token = secrets.token_hex(8)
        self._keys: list[str] = []
        self._has_warned = False

    def __call__(self, value: Any) -> list[Any]:
        try:
            return self._deadline.bounded(lambda: self._gathered(value))
        except TimeoutError:
            raise self._lost("no answer") from None
        except LaunchError:
            with contextlib.suppress(Exception):  # of several classes; the store itself may be lost
                self._leave()
            raise

    def _leave(self) -> None:
        """Record in the store that this process gives up.

        The process that serves the store then waits, up to _LAST_S, until the other processes give up: the
        store ends with it, and the other processes read in the store which ranks are missing.
        """
        place, ends = self._place, time.monotonic() + _LAST_S
        self._store.set(f"{self._attempt}.left.{place.rank}", "")
        came = [r for r in range(place.size) if self._store.has(f"{self._attempt}.0.{r}")]
        if place.serves:
            keys = [f"{self._attempt}.left.{rank}" for rank in came]
            any(all(map(self._store.has, keys)) for _ in polls(ends, _LONGEST_S))

    def _gathered(self, value: Any) -> list[Any]:
        call, place = f"{self._attempt}.{next(self._calls)}", self._place
        key = f"{call}.{place.rank}"
        try:
            mine = [RELEASE, self._token, place.size, socket.gethostname(), value]
            self._store.set(key, json.dumps(mine))
        except Exception as error:  # stores raise errors of many types
            raise self._lost(_first_line(error)) from error
        self._keys.append(key)
        told = [self._get(call, rank) for rank in range(place.size)]
        if told[place.rank][0] != self._token:
            raise LaunchError(
                f"init(): another process is learner {place.rank} too at {place.store}: two jobs use the "
                "same port. Give each its own MASTER_PORT."
            )
        return [value for _, value in told]

    def _get(self, call: str, rank: int) -> tuple[str, Any]:
        try:
            is_there = self._await(call, rank)
            data = self._store.get(f"{call}.{rank}") if is_there else b""
        except Exception as error:  # stores raise errors of many types
            raise self._lost(_first_line(error)) from error
        if not is_there:
            raise self._not_there(call)
        try:
            told = json.loads(data)
            if not isinstance(told, list):
                raise TypeError
            release = told[0] if told else ""
            token, size, host, value = told[1:] if release == RELEASE else ("", 0, "", None)
        except (ValueError, TypeError):
            raise LaunchError(
                f"init(): what learner {rank} has written into {self._place.store} is not understood: "
                "another job uses that port, or that learner runs another release of hvd_adpsgd. Give each "
                "job its own MASTER_PORT, and install the same release on every host."
            ) from None
        if release != RELEASE:
            raise LaunchError(
                f"init(): learner {rank} runs hvd_adpsgd {release}, learner {self._place.rank} runs "
                f"{RELEASE}: two releases cannot train together. Install the same release on every host."
            )
        if size != self._place.size:
            raise LaunchError(
                f"init(): learner {self._place.rank} on {socket.gethostname()} was started as one of "
                f"{self._place.size} processes, learner {rank} on {host} as one of {size}. Start all with "
                "the same number (WORLD_SIZE, or the variable that the launcher sets)."
            )
        return token, value

    def _await(self, call: str, rank: int) -> bool:
        """Wait until process `rank` has stored its value of this call; return False at the deadline."""
        began, place = time.monotonic(), self._place
        for _ in polls(began + self._deadline.left, _LONGEST_S):
            if self._store.has(f"{call}.{rank}"):
                return True
            if time.monotonic() - began > _WARN_S and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "init(): %s waits for learners %s at %s. It gives up after %s.",
                    place,
                    self._missing(call),
                    place.store,
                    self._deadline,
                )
        return False

    def _missing(self, call: str) -> list[int]:
        """Return the ranks of processes that have not stored their value of this call yet."""
        return [r for r in range(self._place.size) if not self._store.has(f"{call}.{r}")]

    def _not_there(self, call: str) -> LaunchError:
        place = self._place
        return LaunchError(
            f"init(): {place} found nothing of learners {self._missing(call)} at {place.store} in "
            f"{self._deadline}. See that all {place.size} processes are started and reach that host; raise "
            "the time-out if they start later."
        )

    def _lost(self, why: str) -> LaunchError:
        place = self._place
        return LaunchError(
            f"init(): {place} lost {place.store}: {why}. Look at the output of learner 0, which may serve "
            "the store, and check that this host reaches it."
        )

    def clear(self) -> None:
        """Erase the values that this process has stored, after all have read them (one is a secret)."""
        for key in self._keys:
            self._store.set(key, "")
        self._keys.clear()
