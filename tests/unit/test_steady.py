"""tests/steady.py ends all that it started."""

import subprocess
import sys
from pathlib import Path

from tests import steady


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
