"""How processes find each other without MPI: what launchers set, and the stores in which they meet."""

import base64
import contextlib
import gc
import json
import pickle
import socket
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hvd_adpsgd.engine.handshake import RELEASE
from hvd_adpsgd.errors import LaunchError
from hvd_adpsgd.launch import rendezvous
from hvd_adpsgd.launch.deadline import Deadline
from hvd_adpsgd.launch.rendezvous import HttpStore, Place, StoreGather, of_environment, opened
from tests.launcher import wait_for

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[07-09,12],gpu1",
    "SLURM_JOB_ID": "41000",
}
GLOO = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({**TORCHRUN, "OMPI_COMM_WORLD_SIZE": "4"}, None),  # mpirun inside such an environment
        ({**GLOO, "PMIX_RANK": "0"}, None),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # a batch script
        (TORCHRUN, ("torchrun, or a launcher like it", 2, 4, "node1", 29500, False)),
        (GLOO, ("horovodrun --gloo", 1, 2, "10.0.0.1", 1234, True)),
        ({**TORCHRUN, **GLOO}, ("horovodrun --gloo", 1, 2, "10.0.0.1", 1234, True)),
        (SRUN, ("srun", 3, 8, "node07", 13768, False)),
        ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("srun", 3, 8, "a", 5, False)),
        ({**SRUN, "SLURM_STEP_NODELIST": "a1,b2"}, ("srun", 3, 8, "a1", 13768, False)),
        ({**SRUN, "SLURM_STEP_NODELIST": "r[1-2]-ib"}, ("srun", 3, 8, "r1-ib", 13768, False)),
        (
            {**SRUN, "SLURM_STEP_NODELIST": "r[1-2]n[04,07-9]-ib,x"},
            ("srun", 3, 8, "r1n04-ib", 13768, False),
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": "solo"}, ("srun", 3, 8, "solo", 13768, False)),
    ],
)
def test_what_launchers_set(environ: dict[str, str], place: tuple[Any, ...] | None) -> None:
    assert of_environment(environ) == (place and Place(*place))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "two"}, ("torchrun", "RANK is 'two'", "a number")),
        ({**TORCHRUN, "MASTER_ADDR": ""}, ("MASTER_ADDR is ''", "a host")),
        ({**TORCHRUN, "RANK": "4"}, ("RANK=4", "WORLD_SIZE=4", "[0, 4)")),
        ({**GLOO, "HOROVOD_ELASTIC": "1"}, ("HOROVOD_ELASTIC=1", "--min-np")),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, ("srun", "MASTER_ADDR is ''")),
    ],
)
def test_what_cannot_be_read_is_refused(environ: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError) as raised:
        of_environment(environ)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.fixture
def servers() -> Iterator[Callable[[int], Any]]:
    """Starts Horovod's rendezvous server for n processes; where it listens."""
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    http_server = pytest.importorskip("horovod.runner.http.http_server")
    made: list[Any] = []

    def start(n: int) -> int:
        made.append(http_server.RendezvousServer())
        port = int(made[-1].start())
        made[-1].init(hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{n}"), n))
        return port

    yield start
    for server in made:
        server.stop()


def test_processes_meet_at_horovods_server(servers: Callable[[int], int]) -> None:
    port = servers(3)
    places = [Place("a test", rank, 3, "127.0.0.1", port, True) for rank in range(3)]
    gathers = [StoreGather(HttpStore(p, 60), p, Deadline(60)) for p in places]
    with ThreadPoolExecutor(3) as threads:
        for values in ([{"a": 1}, ["\0\xff" * 1000, None], None], [3, 4, 5]):
            told = threads.map(lambda gather, value: gather(value), gathers, values)
            assert list(told) == [values] * 3
    store = HttpStore(places[0], 60)
    assert store.has("0.1.0") and b"4" in store.get("0.1.1")
    gathers[1].clear()
    assert store.get("0.0.1") == store.get("0.1.1") == b""


class Shelf(dict[str, Any]):
    """A store in this process."""

    set, has = dict.__setitem__, dict.__contains__

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return str(self[key]).encode()


PLACE = Place("a test", 0, 4, "127.0.0.1", 1)
OTHER = json.dumps([RELEASE, "", 4, "node1", 1])


def test_those_that_do_not_come_are_named_at_the_deadline() -> None:
    """All of them, and all gathers together have one deadline."""
    store, deadline = Shelf({f"0.0.{rank}": OTHER for rank in (1, 2, 3)}), Deadline(0.5)
    gather = StoreGather(store, PLACE, deadline)
    assert gather(1) == [1, 1, 1, 1]
    store["0.1.2"] = OTHER
    with pytest.raises(LaunchError, match=r"nothing of learners \[1, 3\] at the store") as raised:
        gather(2)
    assert "HVD_ADPSGD_START_TIMEOUT_S=0.5 s" in str(raised.value)
    assert deadline.left == 0
    with pytest.raises(LaunchError, match=r"nothing of learners \[1, 2, 3\]"):
        gather(3)


def test_who_serves_the_store_gives_up_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun first: its deadline is the earliest."""
    monkeypatch.setattr(rendezvous, "_LAST_S", 60.0)
    store, serving = Shelf({"0.0.0": OTHER}), PLACE._replace(serves=True)
    with ThreadPoolExecutor(3) as threads:
        gathers = [StoreGather(store, PLACE._replace(rank=rank), Deadline(0.5)) for rank in (1, 2)]
        others = [threads.submit(gather, 1) for gather in gathers]
        wait_for(lambda: {"0.0.1", "0.0.2"} <= store.keys(), "learners 1 and 2 come")
        with pytest.raises(LaunchError, match=r"nothing of learners \[3\] at the store"):
            StoreGather(store, serving, Deadline(0.0))(1)
        assert {"0.left.1", "0.left.2"} <= store.keys()
        for other in others:
            with pytest.raises(LaunchError, match=r"nothing of learners \[3\] at the store"):
                other.result(60)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a value of the store was run",)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            json.dumps(["0.0.9 (protocol 7)", "", 1]),
            "learner 1 runs hvd_adpsgd 0.0.9 (protocol 7), ",
        ),
        (json.dumps({"a": 1}), "not understood"),
        ("", "not understood"),
        (base64.b64encode(pickle.dumps(Harmful())).decode(), "not understood"),
    ],
)
def test_what_a_stranger_or_another_release_writes_is_refused(value: str, words: str) -> None:
    store = Shelf({f"0.0.{rank}": OTHER for rank in (2, 3)} | {"0.0.1": value})
    with pytest.raises(LaunchError) as raised:
        StoreGather(store, PLACE, Deadline(60))(1)
    assert words in str(raised.value) and "same release" in str(raised.value)


def test_two_processes_of_one_rank_are_told() -> None:
    class Overwritten(Shelf):
        def get(self, key: str) -> bytes:  # type: ignore[override]
            return OTHER.encode()

    store = Overwritten({f"0.0.{rank}": OTHER for rank in (1, 2, 3)})
    with pytest.raises(LaunchError, match="another process is learner 0 too"):
        StoreGather(store, PLACE, Deadline(60))(1)


def test_a_store_that_stops_answering_does_not_outlast_the_deadline() -> None:
    class Silent(Shelf):
        def has(self, key: str) -> bool:
            return threading.Event().wait() or False

    with pytest.raises(LaunchError, match="lost the store 127.0.0.1 port 1: no answer"):
        StoreGather(Silent(), PLACE, Deadline(0.1))(1)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no-such-host.invalid", "the name no-such-host.invalid does not resolve"),
        ("127.0.0.1", "Connection refused"),
    ],
)
@pytest.mark.parametrize("speaks_http", [True, False])
def test_a_store_that_is_not_there_is_named(host: str, words: str, speaks_http: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        place = Place("a test", 1, 2, host, free.getsockname()[1], speaks_http)
        with pytest.raises(LaunchError) as raised:
            opened(place, lambda place, seconds: pytest.fail("opened"), Deadline(0.1))
    for each in (words, f"{host} port {place.port}", "START_TIMEOUT_S=0.1 s", "learner 1 of 2"):
        assert each in str(raised.value)


def test_what_listens_there_but_is_no_store_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = Place("a test", 1, 2, "127.0.0.1", other.getsockname()[1])
        with pytest.raises(LaunchError, match="no such store answers there, for HVD"):
            opened(place, lambda place, seconds: threading.Event().wait(), Deadline(0.1))


@pytest.mark.extended
def test_a_port_that_is_taken_is_named() -> None:
    """By the learner that serves the store."""
    TcpStore = pytest.importorskip("hvd_adpsgd.torch.rendezvous").TcpStore
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        place = Place("a test", 0, 2, "127.0.0.1", port, serves=True)
        with pytest.raises(LaunchError, match=f"port {port}.*address already in use.*MASTER_PORT"):
            opened(place, TcpStore, Deadline(60))


def test_a_failed_start_keeps_no_store_open() -> None:
    """Until the garbage collector runs: a script that tries again would run out of descriptors."""
    kept: list[weakref.ref[Any]] = []

    def act() -> None:
        store = Shelf()
        kept.append(weakref.ref(store))
        raise LaunchError

    gc.disable()
    try:
        with contextlib.suppress(LaunchError):
            Deadline(60).bounded(act)
        wait_for(lambda: kept[0]() is None, "the thread has ended")
    finally:
        gc.enable()


@pytest.mark.parametrize("address", ["fd00::1", "[fd00::1]"])
def test_an_ipv6_address_of_the_store_is_understood(address: str) -> None:
    """With brackets or without; sockets take it without, a URL needs them."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "80"}
    place = of_environment(environ)
    assert place is not None and place.host == "fd00::1"
    assert urllib.parse.urlsplit(HttpStore(place, 1.0)._at).netloc == "[fd00::1]:80"


def test_different_numbers_of_processes_are_named_with_their_hosts() -> None:
    """They find each other, and would then wait for a connection that nobody opens."""
    store, deadline = Shelf(), Deadline(60)
    gathers = [
        StoreGather(store, PLACE._replace(rank=rank, size=size), deadline)
        for rank, size in ((0, 2), (1, 3))
    ]
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(gather, 1) for gather in gathers]
    here = socket.gethostname()
    for rank, other, gather in ((0, 1, done[0]), (1, 0, done[1])):
        sizes = {0: 2, 1: 3}
        error = str(gather.exception())
        assert f"learner {rank} on {here} was started as one of {sizes[rank]} processes" in error
        assert f"learner {other} on {here} as one of {sizes[other]}" in error


def test_default_ports_of_slurm_jobs_are_none_of_outgoing_connections() -> None:
    for job in (1, 7231, 19999, 20000, 12767231):
        slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(job)}
        place = of_environment({**slurm, "SLURM_STEP_NODELIST": "node1"})
        assert place is not None and 1024 < place.port < 32768
