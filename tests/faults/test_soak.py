"""The soak study, shortened: learners have failed in every way, replaced, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import QUICK, environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.alone]


def test_half_a_minute_of_faults(tmp_path: Path) -> None:
    """Judged is all but memory, for which lives are too short here.

    The seed's faults are an exit after 12 s, a segfault after 19, and an exception after 25; this last
    one only if there is a third learner by then.
    """
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "examples.studies.soak", "--minutes", "0.45", "--seed", "235"]
    command += ["--out", str(tmp_path / "soak")]
    env = environment({}, [QUICK])
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    told = f"{run.stdout}\n{run.stderr}\n{(tmp_path / 'soak' / 'stderr').read_text()}"
    assert run.returncode == 0, told
    result = json.loads((tmp_path / "soak" / "result.json").read_text())
    assert {"exit", "segfault"} <= set(result["faults"]), told
    assert result["all_replaced"], told
    assert result["ended_well"] == 4, told
    assert result["left_in_dev_shm"] < 8 * 2**20
