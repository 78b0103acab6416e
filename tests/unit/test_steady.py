"""tests/steady.py: what it reads in the output of a run, and that it ends all that it started."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import preempting, steady

SAID = """
FAILED tests/unit/test_a.py::test_b[4] - AssertionError: 2 passed
ERROR tests/mpi/test_c.py::test_d
2 failed, 4998 passed, 12 skipped in 480.12s (0:08:00)
"""


def test_a_run_s_verdicts_are_those_of_pytest() -> None:
    names = ["tests/unit/test_a.py::test_b[4]", "tests/mpi/test_c.py::test_d"]
    assert steady.verdicts(SAID) == (4998, names)
    assert steady.verdicts("make: *** [Makefile:1] Error 2") == (0, [])


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
