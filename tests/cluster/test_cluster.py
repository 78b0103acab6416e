"""Hosts on one machine: up and down without a trace, thin links, a job over two of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hvd_adpsgd_lab.machines import Cluster, ClusterError, clusters, unavailable

from tests.launcher import environment

pytestmark = pytest.mark.mpi
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

ROOT = Path(__file__).parents[2]
LONGEST_S = 120.0  # of a wait: what hangs ends, no verdict is about it
COMMAND = [sys.executable, "-m", "hvd_adpsgd_lab.machines"]


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


def said(cluster: Cluster, *command: str, host: str = "node1") -> str:
    done = cluster.run(command, host=host, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S)
    assert done.returncode == 0, command
    return done.stdout.strip()


def processes_naming(folder: Path) -> list[int]:
    """Processes with this folder in their command line: every host's first one has it there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            if str(folder).encode() in words:
                found.append(int(entry.name))
    return found


def wait_until_gone(folder: Path) -> None:
    ends = time.monotonic() + LONGEST_S
    while processes_naming(folder):
        assert time.monotonic() < ends, processes_naming(folder)
        time.sleep(0.05)


def test_hosts_have_names_and_reach_each_other(pair: Cluster) -> None:
    assert said(pair, "ssh", "node2", "hostname") == "node2"
    assert said(pair, "hostname") == "node1"


def test_nothing_is_left_behind() -> None:
    """Nor do two clusters collide: this one is up beside that of the other tests."""
    links = os.listdir("/sys/class/net")
    with Cluster(2) as cluster:
        folder = cluster.folder
        assert folder is not None
        assert folder in clusters()
        assert processes_naming(folder)
    assert not folder.exists()
    wait_until_gone(folder)
    assert os.listdir("/sys/class/net") == links


@pytest.mark.parametrize(
    "sign",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.extended), signal.SIGINT, signal.SIGKILL],
)
def test_interrupted_cluster_ends(sign: signal.Signals, tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # `down` below must not end a user's cluster
    program = (
        "import signal, time; from hvd_adpsgd_lab.machines import Cluster\n"
        # who starts tests in the background has them ignore it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with Cluster(1) as cluster: print(cluster.folder, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert processes_naming(folder)
        process.send_signal(sign)
        process.wait(LONGEST_S)
    wait_until_gone(folder)
    if sign is signal.SIGKILL:  # its folder stays until the next `down`
        subprocess.run([*COMMAND, "down"], cwd=ROOT, env=env, check=True, timeout=LONGEST_S)
    assert not folder.exists()


def test_a_dead_host_takes_its_processes_along() -> None:
    with Cluster(2) as cluster, cluster.started(["sleep", "1000"], host="node2") as sleeper:
        cluster.kill("node2")
        sleeper.wait(LONGEST_S)
        assert not cluster.alive("node2")
        assert cluster.alive("node1")
        with pytest.raises(ClusterError, match="node2 is dead"):
            cluster.run(["true"], host="node2")


SEND = "head -c 2000000 /dev/zero"


def seconds_to_send(cluster: Cluster) -> float:
    began = time.monotonic()
    said(cluster, "sh", "-c", f"{SEND} | ssh node2 'cat > /dev/null'")
    return time.monotonic() - began


def test_a_shaped_link_is_thin(pair: Cluster) -> None:
    """2 MB at 4 Mbit/s take 4 s, but for the bucket: at least 3 s however fast the machine is."""
    pair.shape("node2", "4mbit")
    try:
        assert seconds_to_send(pair) > 3
    finally:
        pair.shape("node2", None)
    ends = time.monotonic() + LONGEST_S
    while seconds_to_send(pair) > 3:  # on a busy machine the first one may be as slow
        assert time.monotonic() < ends


def test_a_cut_link_carries_nothing_until_healed(pair: Cluster) -> None:
    knock = ["ssh", "-o", "ConnectTimeout=2", "node2", "true"]
    pair.cut("node2")
    try:
        assert pair.run(knock, timeout=LONGEST_S).returncode != 0
    finally:
        pair.heal("node2")
    assert pair.run(["ssh", "node2", "true"], timeout=LONGEST_S).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [(["up", "0"], "allowed are 1 to 32"), (["up", "99"], "allowed are 1 to 32")],
)
def test_bad_input_is_one_line(arguments: list[str], match: str) -> None:
    command = [*COMMAND, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    assert done.returncode == 2
    assert match in done.stderr
    assert done.stderr.count("\n") == 1


def test_bad_hosts_and_rates_are_named(pair: Cluster) -> None:
    with pytest.raises(ClusterError, match="node9"):
        pair.cut("node9")
    with pytest.raises(ClusterError, match="100mbit"):
        pair.shape("node1", "fast")


PLAIN = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum)
print("sum", total.item(), flush=True)
"""
MPI_FIRST = """
from mpi4py import MPI
import hvd_adpsgd.torch as hvd
hvd.init()
print("learner", hvd.rank(), flush=True)
"""


def launched(cluster: Cluster, program: str) -> str:
    """Output of a program of one learner on each of two hosts."""
    done = cluster.run(
        ["horovodrun", "-np", "2", "-H", "node1:1,node2:1", sys.executable, "-c", program],
        env=environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


@pytest.mark.extended
def test_plain_horovod_between_hosts_ends(pair: Cluster) -> None:
    """With MPI's failure detector on, which hvd_adpsgd's init() starts, MPI_Finalize would not return."""
    assert launched(pair, PLAIN).count("sum 3.0") == 2


@pytest.mark.extended
def test_it_is_told_that_mpi_runs_without_heartbeats(pair: Cluster) -> None:
    said = launched(pair, MPI_FIRST)
    assert said.count("MPI was started before hvd.init(), without heartbeats") == 1
    assert "learner 0" in said
    assert "learner 1" in said
