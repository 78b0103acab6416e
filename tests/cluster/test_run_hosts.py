"""Three hosts under `python -m hvd_adpsgd run`: one loses its power; the launcher is killed."""

import os
import signal
import sys
from pathlib import Path

import pytest
from hvd_adpsgd_lab.machines import unavailable

from tests.cluster.training import PROGRAM, training

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

RUN = (sys.executable, "-m", "hvd_adpsgd", "run")
IMPATIENT = {"HVD_ADPSGD_FAILURE_TIMEOUT_S": "4", "HVD_ADPSGD_LEAVE_DEADLINE_S": "3"}


def processes(folder: Path, is_launcher: bool) -> list[int]:
    """The pids of the learners on all hosts of the job in `folder`, or of its launcher."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        is_ours = {str(PROGRAM).encode(), str(folder).encode()} <= set(words)
        is_ours = is_ours and b"nsenter" not in words[0]
        if is_ours and (b"run" in words) == is_launcher:
            found.append(int(name))
    return found


def test_a_host_that_loses_its_power_is_left_behind(tmp_path: Path) -> None:
    """The ssh connection to it says nothing for a while: the job does not wait for that."""
    with training(tmp_path, launcher=RUN, **IMPATIENT) as run:
        run.cluster.kill("node3", silently=True)
        for rank in (0, 1):
            run.wait_failed([rank], [2])
        run.wait_exchanges(0, 1)
    assert run.status == 75, run.said
    for rank in (0, 1):
        assert run.facts(rank)[-1]["failed"] == [2], run.said
    assert "learner 2 on node3 has ended" in run.said


def test_no_learner_outlives_the_launcher_on_any_host(tmp_path: Path) -> None:
    with training(tmp_path, launcher=RUN) as run:
        assert len(processes(tmp_path, is_launcher=False)) == 3
        for pid in processes(tmp_path, is_launcher=True):
            os.kill(pid, signal.SIGKILL)
        run.wait_for(lambda: not processes(tmp_path, is_launcher=False))
    assert run.status not in (0, None), run.said
