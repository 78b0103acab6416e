"""The soak study, shortened: learners have failed in every way, replaced, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import QUICK, environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.alone, pytest.mark.extended]


def test_a_quarter_of_a_minute_of_faults(tmp_path: Path) -> None:
    """Judged is all but memory, for which lives are too short here.

    The seed's faults are an exit after 5.7 s and a segfault after 12.7 s.
    """
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "lab.studies.soak", "--minutes", "0.25", "--seed", "1540"]
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
