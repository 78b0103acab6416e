"""A super learner from a host that the job does not know joins it."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hvd_adpsgd_lab.machines import Cluster, unavailable

from tests.cluster.test_replaced import facts
from tests.launcher import QUICK, environment
from tests.launchers.grown import require_grown

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

PROGRAM = Path(__file__).parents[1] / "launchers" / "programs" / "growing.py"
TIMEOUT_S = 120.0


@pytest.mark.parametrize("by_ssh", [False, True], ids=["started-there", "started-by-ssh"])
def test_a_newcomer_from_another_host_makes_two_three(tmp_path: Path, by_ssh: bool) -> None:
    """With the address that the job prints, and the file with its secret."""
    secret = f"HVD_ADPSGD_JOIN_SECRET_FILE={tmp_path / 'secret'}"
    program = [sys.executable, str(PROGRAM), "--size", "3"]
    env = environment({"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}, [QUICK])
    job = ["horovodrun", "--gloo", "-np", "2", "-H", "node1:1,node2:1", "env", secret, *program]
    log = tmp_path / "log"
    with Cluster(3) as cluster, open(log, "a") as file:
        out = {"env": env, "stdout": file, "stderr": subprocess.STDOUT}
        with cluster.started(job, **out) as running:
            listeners = printed(r"HVD_ADPSGD_JOIN=(\S+)", log, running)
            path = f"PYTHONPATH={env['PYTHONPATH']}"  # ssh passes none on
            told = ["env", path, f"HVD_ADPSGD_JOIN={listeners}", secret, *program]
            command = ["ssh", "node3", f"cd {Path.cwd()};", *told] if by_ssh else told
            with cluster.started(command, host="node1" if by_ssh else "node3", **out) as candidate:
                assert candidate.wait(TIMEOUT_S) == 0, log.read_text()
                assert running.wait(TIMEOUT_S) == 0, log.read_text()
    said = log.read_text()
    assert "127.0.0.1" not in listeners, said
    require_grown(sorted(facts(said), key=lambda one: one["rank"]), [3], 3)


LISTENS = """
import time
from hvd_adpsgd.joining.listener import Listener
kept = []
def enter(candidate):
    kept.append(candidate)
    print("conversation", candidate.receive(None), flush=True)
listener = Listener("0.0.0.0", bytes(32), enter, 10.0)
print("port", listener.port, flush=True)
time.sleep(1000)
"""
WAITS = """
import sys
from hvd_adpsgd.errors import PeerFailedError
from hvd_adpsgd.joining.listener import connect
job = connect(sys.argv[1], bytes(32), 10.0)
job.send("open")
try:
    job.receive(None)
except PeerFailedError as error:
    print("ended", error, flush=True)
"""


def test_a_newcomer_whose_host_is_cut_off_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Its connection is not closed: the system asks the other host whether it is there."""
    log = tmp_path / "log"
    with Cluster(2) as cluster, open(log, "a") as file:
        out = {"env": environment({}), "stdout": file, "stderr": subprocess.STDOUT}
        with cluster.started([sys.executable, "-c", LISTENS], **out) as job:
            port = printed(r"port (\d+)", log, job)
            command = [sys.executable, "-c", WAITS, f"node1:{port}"]
            with cluster.started(command, host="node2", **out) as candidate:
                printed(r"(conversation open)", log, job)
                cluster.cut("node2")
                assert candidate.wait(TIMEOUT_S) == 0, log.read_text()
                assert "is lost: [Errno 110]" in log.read_text()


def printed(pattern: str, log: Path, job: subprocess.Popen[bytes]) -> str:
    """What the pattern's group finds in the log of a job that runs."""
    ends = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends and job.poll() is None:
        match = re.search(pattern, log.read_text())
        if match:
            return match.group(1)
        time.sleep(0.05)
    raise AssertionError(log.read_text())
