"""Commands of measurements, with a deadline, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech import launch
from examples.acoustic_model.speech.problem import Problem

_OURS = ("HVD_ADPSGD_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_")
_TAIL = 1500  # characters of a failed job's output that are shown


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process without Horovod's, MPI's and this library's, plus `variables`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    return kept | launch.paths() | {"OMP_NUM_THREADS": "1"} | variables


def learner(program: str, options: Mapping[str, object], out: Path) -> list[str]:
    """Return the command of one learner: the program (a module of this package) with its options."""
    words: list[str] = []
    for name, value in {**options, "out": out.resolve()}.items():
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return [sys.executable, "-m", f"{__package__}.{program}", *words]


def run(command: Sequence[str], variables: Mapping[str, str], deadline_s: float, log: Path) -> None:
    """Run a command, with its output in the file `log`, and wait until it ends.

    Raises:
        Problem: if the command fails or does not end within `deadline_s`; its process group is killed.
    """
    with log.open("w") as out:
        child = subprocess.Popen(
            list(command), env=environment(variables), stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(child)
    if status != 0:
        what = f"status {status}" if status is not None else f"not over after {deadline_s:.0f} s"
        raise Problem(f"{what}: {' '.join(command[:4])} ...\n{tail(log)}")


def tail(log: Path) -> str:
    """Return the last _TAIL characters of a command's output."""
    return log.read_text(errors="replace")[-_TAIL:]


def end(child: subprocess.Popen) -> None:
    """End a command's process group: SIGTERM, which a launcher forwards to learners; 10 s later SIGKILL."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, kind)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            continue


def loads(records: Iterable[dict | None]) -> str:
    """Return a line with the lowest and highest load average of the machine before the jobs."""
    found = [record["load_before"] for record in records if record]
    if not found:
        return "Nothing was measured."
    return f"Load average (1 min) before the runs: {min(found):.1f} to {max(found):.1f}."


def told(file: Path) -> dict[str, Any]:
    """Return the results that learner 0 wrote to `file`.

    Raises:
        Problem: if learner 0 wrote no results.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Problem(f"{file}: the first learner left no result ({error})") from None
