"""Three hosts under `horovodrun --gloo`: one loses its power, its link, its sshd, or is started again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.machines import unavailable
from tests.cluster.training import PROGRAM, Run, training

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

GLOO = ["--gloo"]
FAILED_STATUS = 75
TIMEOUT_S = 4
RETURN_S = 15.0  # for the command, after the last learner is done
PATIENCE = {"HVD_ADPSGD_FAILURE_TIMEOUT_S": str(TIMEOUT_S), "HVD_ADPSGD_LEAVE_DEADLINE_S": "3"}


def require_others_trained_on(run: Run, since: float, lost: int = 2) -> None:
    """One host's learner is lost; the other two go on to the end, agree, and the command returns in time."""
    assert run.status == FAILED_STATUS, run.said
    ends, left = [], [rank for rank in range(3) if rank != lost]
    for rank, other in zip(left, left[::-1], strict=True):
        end = run.facts(rank)[-1]
        assert end["living"] == 2, (end, run.said)
        assert end["lost"] == [lost]
        assert end["first"] == (rank == left[0])
        before = run.at(rank, since + 1.5)
        last = [f for f in run.facts(rank) if "met" in f][-1]
        assert last["met"][other] > before["met"][other] + 30, run.said
        ends.append(end["time"])
    assert run.ended - max(ends) < RETURN_S, run.said


@pytest.mark.parametrize("silently", [True, False], ids=["power", "reboot"])
def test_a_host_that_goes_down_is_left_behind(tmp_path: Path, silently: bool) -> None:
    """Without a word, or with its connections closed, as at a reboot: the others train to the end."""
    with training(tmp_path, 20, GLOO, **PATIENCE) as run:
        killed = time.time()
        run.cluster.kill("node3", silently=silently)
    require_others_trained_on(run, killed)


def test_a_host_whose_ssh_ends_is_left_behind(tmp_path: Path) -> None:
    """The launcher's ssh to it: its learner ends with it, or trains on; the job ends in any case."""
    with training(tmp_path, 20, GLOO, **PATIENCE) as run:
        killed = time.time()
        found = [pid for pid in processes(run, "node1") if is_ssh_to(pid, "node3")]
        assert found, run.said
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    assert run.status not in (None, 0), run.said
    assert {run.facts(rank)[-1]["living"] for rank in (0, 1)} <= {2, 3}, run.said
    for rank, other in ((0, 1), (1, 0)):
        last = [f for f in run.facts(rank) if "met" in f][-1]
        assert last["met"][other] > run.at(rank, killed + 1.5)["met"][other] + 30, run.said


def test_a_learner_of_the_launching_host_is_left_behind(tmp_path: Path) -> None:
    """Where horovodrun and its rendezvous server live, and the first leader."""
    with training(tmp_path, 20, GLOO, **PATIENCE) as run:
        killed = time.time()
        found = [pid for pid in processes(run, "node1") if is_learner(pid)]
        assert found, run.said
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    require_others_trained_on(run, killed, lost=0)


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


def test_a_link_that_is_cut_for_5_s_loses_nobody(tmp_path: Path) -> None:
    with training(tmp_path, 22, GLOO, HVD_ADPSGD_FAILURE_TIMEOUT_S="20") as run:
        cut = time.time()
        run.cluster.cut("node3")
        time.sleep(5)  # the injected cut
        run.cluster.heal("node3")
        healed = time.time()
    assert run.status == 0, run.said
    for rank, other in ((0, 1), (1, 0)):
        assert run.at(rank, healed)["met"][other] > run.at(rank, cut + 1.5)["met"][other] + 10
        back = [f for f in run.facts(rank) if "met" in f][-1]
        assert back["met"][2] > run.at(rank, healed)["met"][2] + 10, "it contributes again"
    assert [run.facts(rank)[-1]["living"] for rank in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("quorum", [False, True], ids=["both sides", "majority"])
def test_a_link_that_is_cut_for_good_parts_the_job(tmp_path: Path, quorum: bool) -> None:
    """2 against 1: by default both train on; with a quorum the smaller side stops, with a typed error."""
    env = {**PATIENCE, "HVD_ADPSGD_QUORUM": "majority"} if quorum else PATIENCE
    with training(tmp_path, 20, GLOO, **env) as run:
        cut = time.time()
        run.cluster.cut("node3")
    require_others_trained_on(run, cut)
    alone = run.facts(2)[-1]
    if quorum:
        assert alone["stopped"] == "QuorumLostError", (alone, run.said)
        assert alone["saved"], "the model can be saved where the error is caught"
        assert alone["time"] < cut + TIMEOUT_S + 5, "long before the end of training"
    else:
        assert alone["living"] == 1, (alone, run.said)
        assert alone["time"] > cut + 10


@pytest.mark.parametrize("loses", ["received", "sent"])
def test_a_link_that_is_cut_one_way_is_a_failure(tmp_path: Path, loses: str) -> None:
    """What node3 sends, or what it is sent, is lost: acknowledgements are missing on one side or both."""
    with training(tmp_path, 20, GLOO, **PATIENCE) as run:
        cut = time.time()
        run.cluster.cut_one_way("node3", loses)
    require_others_trained_on(run, cut)
