"""Three hosts under `horovodrun --gloo`: one loses its power, its link, its sshd, or is started again."""

import os
import signal
from pathlib import Path

import pytest
from hvd_adpsgd_lab.machines import unavailable

from tests.cluster.training import PROGRAM, Run, training

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

GLOO = ["--gloo"]
FAILED_STATUS = 75
LEAVE = {"HVD_ADPSGD_LEAVE_DEADLINE_S": "3"}
IMPATIENT = {"HVD_ADPSGD_FAILURE_TIMEOUT_S": "4", **LEAVE}
# a cut is no failure, however long the waits last
PATIENT = {"HVD_ADPSGD_FAILURE_TIMEOUT_S": "600"}


def wait_left_behind(run: Run, lost: int = 2) -> None:
    """Wait until the other two count a host's learner as failed, and have exchanged further since."""
    left = [rank for rank in range(3) if rank != lost]
    run.wait_failed(left, [lost])
    run.wait_exchanges(*left)


def require_left_behind(run: Run, lost: int = 2) -> None:
    """The other two have trained to the end, and agree; the command has returned."""
    assert run.status == FAILED_STATUS, run.said
    left = [rank for rank in range(3) if rank != lost]
    for rank in left:
        end = run.facts(rank)[-1]
        assert end["living"] == 2, (end, run.said)
        assert end["failed"] == [lost]
        assert end["first"] == (rank == left[0])


@pytest.mark.parametrize("silently", [True, False], ids=["power", "reboot"])
def test_a_host_that_goes_down_is_left_behind(tmp_path: Path, silently: bool) -> None:
    """Without a word, or with its connections closed, as at a reboot: the others train to the end."""
    with training(tmp_path, GLOO, **IMPATIENT) as run:
        run.cluster.kill("node3", silently=silently)
        wait_left_behind(run)
    require_left_behind(run)


def test_a_host_whose_ssh_ends_is_left_behind(tmp_path: Path) -> None:
    """The launcher's ssh to it: its learner ends with it, or trains on; the job ends in any case."""
    with training(tmp_path, GLOO, **IMPATIENT) as run:
        found = [pid for pid in processes(run, "node1") if is_ssh_to(pid, "node3")]
        assert found, run.said
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        run.wait_exchanges(0, 1)
        run.wait_exchanges(1, 0)
    assert run.status not in (None, 0), run.said
    assert {run.facts(rank)[-1]["living"] for rank in (0, 1)} <= {2, 3}, run.said


def test_a_learner_of_the_launching_host_is_left_behind(tmp_path: Path) -> None:
    """Where horovodrun and its rendezvous server live, and the first leader."""
    with training(tmp_path, GLOO, **IMPATIENT) as run:
        found = [pid for pid in processes(run, "node1") if is_learner(pid)]
        assert found, run.said
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        wait_left_behind(run, lost=0)
    require_left_behind(run, lost=0)


def is_learner(pid: int) -> bool:
    words = command_of(pid)
    return bool(words) and "python" in os.path.basename(words[0]) and str(PROGRAM) in words[1:3]


def processes(run: Run, host: str) -> list[int]:
    """Of a host, as seen from outside."""
    wanted = os.readlink(f"/proc/{run.cluster._pid(host)}/ns/net")
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/net") == wanted:
                found.append(int(name))
        except OSError:  # it has just ended
            continue
    return found


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has just ended
        return []


def is_ssh_to(pid: int, host: str) -> bool:
    words = command_of(pid) or [""]
    return os.path.basename(words[0]) == "ssh" and host in " ".join(words)


def test_a_link_that_is_cut_for_a_while_loses_nobody(tmp_path: Path) -> None:
    with training(tmp_path, GLOO, **PATIENT) as run:
        run.cluster.cut("node3")
        run.wait_exchanges(0, 1)
        run.wait_exchanges(1, 0)
        run.cluster.heal("node3")
        run.wait_exchanges(0, 2)
        run.wait_exchanges(1, 2)
    assert run.status == 0, run.said
    assert [run.facts(rank)[-1]["living"] for rank in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("quorum", [False, True], ids=["both sides", "majority"])
def test_a_link_that_is_cut_for_good_parts_the_job(tmp_path: Path, quorum: bool) -> None:
    """2 against 1: by default both train on; with a quorum the smaller side stops, with a typed error."""
    env = {**IMPATIENT, "HVD_ADPSGD_QUORUM": "majority"} if quorum else IMPATIENT
    with training(tmp_path, GLOO, **env) as run:
        run.cluster.cut("node3")
        wait_left_behind(run)
        if quorum:  # before it is enough
            run.wait_for(lambda: "stopped" in run.facts(2)[-1])
        else:
            run.wait_failed([2], [0, 1])
            run.wait_steps(2)
    require_left_behind(run)
    alone = run.facts(2)[-1]
    if quorum:
        assert alone["stopped"] == "QuorumLostError", (alone, run.said)
        assert alone["saved"], "the model can be saved where the error is caught"
    else:
        assert alone["living"] == 1, (alone, run.said)


@pytest.mark.parametrize("loses", ["received", "sent"])
def test_a_link_that_is_cut_one_way_is_a_failure(tmp_path: Path, loses: str) -> None:
    """What node3 sends, or what it is sent, is lost: acknowledgements are missing on one side or both."""
    with training(tmp_path, GLOO, **IMPATIENT) as run:
        run.cluster.cut_one_way("node3", loses)
        wait_left_behind(run)
    require_left_behind(run)
