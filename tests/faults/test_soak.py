"""benchmarks/soak.py, shortened: learners are lost in every way, replaced, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_a_minute_of_faults(tmp_path: Path) -> None:
    """Judged is all but memory, for which lives are too short here."""
    pytest.importorskip("matplotlib")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_ADPSGD_", "OMPI_"))}
    command = [sys.executable, str(SOAK), "--minutes", "0.8", "--out", str(tmp_path / "soak")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    told = f"{run.stdout}\n{run.stderr}\n{(tmp_path / 'soak' / 'stderr').read_text()}"
    assert run.returncode == 0, told
    result = json.loads((tmp_path / "soak" / "result.json").read_text())
    assert sum(result["faults"].values()) >= 2, told
    assert result["all_replaced"], told
    assert result["ended_well"] == 4, told
    assert result["left_in_dev_shm"] == []
