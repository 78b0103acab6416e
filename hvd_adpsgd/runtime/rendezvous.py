"""How processes that MPI does not join find each other: who they are, and a store in which they meet.

horovodrun --gloo                           HOROVOD_RANK, HOROVOD_SIZE; Horovod's rendezvous server
torchrun, and launchers that set the same   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; torch's TCPStore
srun                                        SLURM_PROCID, SLURM_STEP_NUM_TASKS; the same, on the first host
"""

from __future__ import annotations

import base64
import itertools
import pickle
import re
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from hvd_adpsgd.errors import LaunchError

__all__ = [
    "BEGUN",
    "PATIENCE_S",
    "SCOPE",
    "HttpStore",
    "Place",
    "Store",
    "gather_by",
    "of_environment",
    "opened",
]

_JOINED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
SCOPE, BEGUN = "hvd_adpsgd", "begun"  # at Horovod's server: see tools/build_horovod.py
PATIENCE_S = 300.0  # for processes that start later
_PAUSE_S = 0.01
_FIRST_PORT, _PORTS = 15000, 20000  # of a Slurm job without MASTER_PORT


class Store(Protocol):
    """Where processes meet, as torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> object:
        """Keep a value, of ASCII."""

    def get(self, key: str, /) -> bytes:
        """The value, once there is one; raises after a time."""


class Place(NamedTuple):
    """Which process of the job this is, and where the store is.

    Attributes:
        launcher: for messages.
        rank, size: of the process, of how many.
        host, port: of the store.
        speaks_http: it is Horovod's rendezvous server, else torch's TCPStore.
    """

    launcher: str
    rank: int
    size: int
    host: str
    port: int
    speaks_http: bool = False


def of_environment(environ: Mapping[str, str]) -> Place | None:
    """The place that a launcher other than MPI's has given to this process; None if there is none.

    Raises:
        LaunchError: if what a launcher has set cannot be read, or is for elastic Horovod.
    """
    if any(name in environ for name in _JOINED_BY_MPI):
        return None
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return _of_horovod(environ)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return _read("torchrun, or a launcher like it", environ, *names)
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
    return place._replace(speaks_http=True)


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
    """The first of Slurm's list of hosts: rack[1-2]node[07-09,12],gpu1 gives rack1node07."""
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
    place = Place(
        launcher, int(environ[rank]), int(environ[size]), environ[host], int(environ[port])
    )
    if place.rank >= place.size:
        raise LaunchError(
            f"init(): {rank}={place.rank} and {size}={place.size}, allowed is a rank in "
            f"[0, {place.size}). Start the processes with a launcher that sets both."
        )
    return place


class HttpStore:
    """Horovod's rendezvous server as a store."""

    def __init__(self, place: Place):
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._at = f"http://{place.host}:{place.port}/{SCOPE}"

    def set(self, key: str, value: str) -> None:
        """See Store."""
        asked = urllib.request.Request(f"{self._at}/{key}", data=value.encode(), method="PUT")
        with self._open(asked, timeout=PATIENCE_S):
            pass

    def get(self, key: str) -> bytes:
        """See Store."""
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self._open(f"{self._at}/{key}", timeout=PATIENCE_S) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                if error.code != 404 or time.monotonic() > ends:
                    raise
            time.sleep(_PAUSE_S)


def opened(place: Place, store: Callable[[Place], Store]) -> Store:
    """The store at this place.

    Raises:
        LaunchError: if it cannot be opened, or something else listens there.
    """
    found: list[Store] = []
    problem: list[object] = [f"no answer in {PATIENCE_S:g} s"]

    def act() -> None:
        try:
            found.append(store(place))
        except Exception as error:  # torch's, of several kinds
            problem[:] = [error]

    thread = threading.Thread(target=act, daemon=True, name="hvd_adpsgd.store")
    thread.start()
    thread.join(PATIENCE_S)
    if not found:
        raise LaunchError(
            f"init(): the store {place.host} port {place.port} cannot be opened: {problem[0]}. Choose a free "
            "MASTER_PORT in [1, 65535], and see that learner 0 is started."
        )
    return found[0]


def gather_by(store: Store, place: Place, attempt: int = 0) -> Callable[[Any], list[Any]]:
    """Gathers the values of all processes, by rank, as often as it is called.

    Args:
        store: where they meet.
        place: of this process.
        attempt: number of this function in the job; the same on all processes.

    The function raises LaunchError if one does not come within five minutes.
    """
    calls = itertools.count()
    mine = secrets.token_hex(8)

    def gather(value: Any) -> list[Any]:
        call = f"{attempt}.{next(calls)}"
        try:
            told = base64.b64encode(pickle.dumps((mine, value))).decode()
            store.set(f"{call}.{place.rank}", told)
        except Exception as error:
            raise _lost(place, place.rank, error) from error
        found = [_get(f"{call}.{rank}", rank) for rank in range(place.size)]
        if found[place.rank][0] != mine:
            raise LaunchError(
                f"init(): another process is learner {place.rank} too at the store {place.host} port "
                f"{place.port}: two jobs use the same port. Give each its own MASTER_PORT."
            )
        return [value for _, value in found]

    def _get(key: str, rank: int) -> Any:
        try:
            return pickle.loads(base64.b64decode(store.get(key)))
        except Exception as error:
            raise _lost(place, rank, error) from error

    return gather


def _lost(place: Place, rank: int, error: Exception) -> LaunchError:
    return LaunchError(
        f"init(): learner {place.rank} of {place.size}, started by {place.launcher}, heard nothing of "
        f"learner {rank} at the store {place.host} port {place.port}: {error}. See that all {place.size} "
        "processes are started, that learner 0, which may serve the store, lives, and that it is reached."
    )
