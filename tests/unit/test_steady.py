"""tests/steady.py ends all that it started, and takes cores away as long as a run lasts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import preempting, steady


def test_a_run_that_does_not_end_is_ended_with_what_it_has_left_behind(tmp_path: Path) -> None:
    """The command's child outlives it, as a daemon does."""
    child = "import subprocess as s; s.Popen(['sleep', '1000']); s.Popen(['sleep', '1000']).wait()"
    told = subprocess.run(
        [sys.executable, "-m", "tests.steady", "--stopped", "1", "--limit-s", "1", "--out", tmp_path,
         sys.executable, "-c", child],
        capture_output=True, text=True, timeout=120, cwd=steady.ROOT,
    )  # fmt: skip
    assert told.returncode == 1, told.stderr
    assert "| 1 | stopped, seed 0 |" in told.stdout and "status -15" in told.stdout, told.stdout


@pytest.mark.skipif(not preempting.is_permitted(), reason="taking a core away needs root")
def test_each_core_is_taken_away_as_long_as_the_run_lasts(tmp_path: Path) -> None:
    """The command waits until as many processes go before it as there are cores."""
    looks = (
        "import os, psutil, time\n"
        "def taking():\n"
        "    beside = psutil.Process().parent().children()\n"
        "    return sum(os.sched_getscheduler(p.pid) == os.SCHED_FIFO for p in beside)\n"
        "while taking() < len(os.sched_getaffinity(0)):\n"
        "    time.sleep(0.01)\n"
    )
    told = subprocess.run(
        [sys.executable, "-m", "tests.steady", "--preempted", "1", "--limit-s", "60", "--out", tmp_path,
         sys.executable, "-c", looks],
        capture_output=True, text=True, timeout=120, cwd=steady.ROOT,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert "| 1 | preempted, seed 0 |" in told.stdout
