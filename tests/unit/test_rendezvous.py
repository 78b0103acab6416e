"""How processes find each other without MPI: what launchers set, and the stores in which they meet."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hvd_adpsgd.errors import LaunchError
from hvd_adpsgd.runtime import rendezvous
from hvd_adpsgd.runtime.rendezvous import HttpStore, Place, gather_by, of_environment

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
        (SRUN, ("srun", 3, 8, "node07", 16000, False)),
        ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("srun", 3, 8, "a", 5, False)),
        ({**SRUN, "SLURM_STEP_NODELIST": "a1,b2"}, ("srun", 3, 8, "a1", 16000, False)),
        ({**SRUN, "SLURM_STEP_NODELIST": "r[1-2]-ib"}, ("srun", 3, 8, "r1-ib", 16000, False)),
        (
            {**SRUN, "SLURM_STEP_NODELIST": "r[1-2]n[04,07-9]-ib,x"},
            ("srun", 3, 8, "r1n04-ib", 16000, False),
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": "solo"}, ("srun", 3, 8, "solo", 16000, False)),
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
    gathers = [gather_by(HttpStore(place), place) for place in places]
    with ThreadPoolExecutor(3) as threads:
        for values in ([{"a": 1}, b"\0\xff" * 1000, None], [3, 4, 5]):
            told = threads.map(lambda gather, value: gather(value), gathers, values)
            assert list(told) == [values] * 3


def test_one_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, servers: Callable[[int], int]
) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.2)
    place = Place("a test", 0, 2, "127.0.0.1", servers(2), True)
    with pytest.raises(LaunchError, match="nothing of learner 1 at the store"):
        gather_by(HttpStore(place), place)(None)


def test_a_store_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        place = Place("a test", 0, 2, "127.0.0.1", free.getsockname()[1], True)
        with pytest.raises(LaunchError, match="nothing of learner 0 at the store"):
            gather_by(HttpStore(place), place)(None)
