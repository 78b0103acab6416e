"""A storm on three super learners: one is killed and replaced, one is stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]


def test_a_killed_super_learner_is_replaced_and_a_stopped_one_goes_on(tmp_path: Path) -> None:
    """The run is short; its driver then waits until the replacement has made a step."""
    pytest.importorskip("torch")
    faults = tmp_path / "faults.txt"
    faults.write_text("1 kill 2\n2 stop 1 2\n3 cut 0 1\n")
    words = ["--slots=3", "--minutes=0.1", "--calm=0.1", "--step=0.2", "--every=2", "--json"]
    words += [f"--schedule={faults}", f"--out={tmp_path / 'out'}"]
    command = [sys.executable, "-m", "hvd_adpsgd", "bench", "storm", *words]
    done = subprocess.run(
        command,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=800,  # a hang ends: no verdict is about it
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["hadpsgd"]
    assert not isinstance(found, str), found
    assert found["faults"] == "1 kill, 1 stop"
    assert found["left_out"] == "1 cut (needs hosts)"
    assert (found["not_replaced"], found["hangs"], found["ended_by_themselves"]) == (0, 0, 0)
    assert 0 < found["kill_to_step_without_imports_s"] < found["kill_to_step_s"]
    assert min(found["steps_kept"], found["participation"], found["sent_mb"]) > 0
    assert found["killed_at_the_end"] == 0
    lives = list((tmp_path / "out" / "hadpsgd" / "storm").glob("learner-2-*.jsonl"))
    assert len(lives) == 2
