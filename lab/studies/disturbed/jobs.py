"""Runs measurement jobs with a deadline, and keeps a record of each finished one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech import launch, sweep
from examples.acoustic_model.speech.problem import Problem

_OURS = ("HVD_ADPSGD_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_")
_TAIL = 1500  # characters of a failed job's output that are shown


@dataclass(frozen=True)
class Job:
    """A measurement.

    Attributes:
        name: name of the job in messages and in the name of its folder.
        settings: everything that the outcome depends on; a finished job with equal settings is not repeated.
        act: function that measures in the job's folder, its argument, and returns the content of the record.
    """

    name: str
    settings: dict[str, Any]
    act: Callable[[Path], dict[str, Any]]


def folder(job: Job, root: Path) -> Path:
    """Return the folder of a job's record, whose name ends with a digest of the job's settings."""
    told = {**job.settings, "versions": launch.versions()}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    name = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in job.name)
    return root / f"{name}-{digest}"


def perform(
    jobs: Sequence[Job], root: Path, recall_only: bool = False
) -> tuple[list[dict | None], list[str]]:
    """Run all jobs that are not finished; a job that fails does not stop the others.

    Args:
        jobs: the jobs, which run in this order.
        root: folder of all jobs' folders.
        recall_only: run no job; one that is not finished has no record then, and counts as no failure.

    Returns:
        a record for each job, None if it failed, and a line on each failure.
    """
    records = [sweep.recall(folder(job, root)) for job in jobs]
    took = [record["seconds"] for record in records if record]
    todo, failures = len(jobs) - len(took), []
    for place, job in enumerate(jobs):
        if records[place] is not None or recall_only:
            continue
        print(f"-- {job.name}; {sweep.left(took, todo)}", flush=True)
        todo -= 1
        try:
            records[place] = record = _perform(job, folder(job, root))
        except Problem as problem:
            print(f"   failed: {problem}", flush=True)
            failures.append(f"{job.name}: {problem}")
        else:
            took.append(record["seconds"])
    return records, failures


def _perform(job: Job, place: Path) -> dict[str, Any]:
    shutil.rmtree(place, ignore_errors=True)  # remains of an interrupted or failed run
    place.mkdir(parents=True)
    began, load = time.monotonic(), os.getloadavg()[0]
    found = job.act(place)
    record = {"settings": job.settings, "load_before": load, **found}
    record["seconds"] = time.monotonic() - began
    sweep.keep(place, record)
    return record


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
