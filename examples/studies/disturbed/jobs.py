"""Jobs with a deadline, and records of those that are finished."""

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
    """Something to measure.

    Attributes:
        name: for messages and for its folder.
        settings: everything that its outcome depends on; a finished job with equal ones is kept.
        act: measures; gets the job's folder, returns what its record shall hold.
    """

    name: str
    settings: dict[str, Any]
    act: Callable[[Path], dict[str, Any]]


def folder(job: Job, root: Path) -> Path:
    """Where its record is, named by a digest of its settings."""
    told = {**job.settings, "versions": launch.versions()}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    name = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in job.name)
    return root / f"{name}-{digest}"


def perform(
    jobs: Sequence[Job], root: Path, recall_only: bool = False
) -> tuple[list[dict | None], list[str]]:
    """Do what is not finished; one that fails does not stop the others.

    Args:
        jobs: in the order in which they are done.
        root: of their folders.
        recall_only: do nothing; what is not finished has no record and is no failure.

    Returns:
        a record for each job, None where it failed, and a line on each failure.
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
    shutil.rmtree(place, ignore_errors=True)  # what an interrupted or failed try left
    place.mkdir(parents=True)
    began, load = time.monotonic(), os.getloadavg()[0]
    found = job.act(place)
    record = {"settings": job.settings, "load_before": load, **found}
    record["seconds"] = time.monotonic() - began
    sweep.keep(place, record)
    return record


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of this process but for Horovod's and MPI's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    return kept | launch.paths() | {"OMP_NUM_THREADS": "1"} | variables


def learner(program: str, options: Mapping[str, object], out: Path) -> list[str]:
    """The command of one learner: a program of this package with its options."""
    words: list[str] = []
    for name, value in {**options, "out": out.resolve()}.items():
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return [sys.executable, "-m", f"{__package__}.{program}", *words]


def run(command: Sequence[str], variables: Mapping[str, str], deadline_s: float, log: Path) -> None:
    """Run a command to its end; its output goes to `log`.

    Raises:
        Problem: if it fails or takes too long; it and what it started are ended then.
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
            _end(child)
    if status != 0:
        what = f"status {status}" if status is not None else f"not over after {deadline_s:.0f} s"
        raise Problem(f"{what}: {' '.join(command[:4])} ...\n{tail(log)}")


def tail(log: Path) -> str:
    """The end of what a command said."""
    return log.read_text(errors="replace")[-_TAIL:]


def _end(child: subprocess.Popen) -> None:
    """The launcher passes SIGTERM on to its learners; who does not listen is killed."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, kind)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            continue


def loads(records: Iterable[dict | None]) -> str:
    """A line on how busy the machine was before the jobs began: the least and the most."""
    found = [record["load_before"] for record in records if record]
    if not found:
        return "Nothing was measured."
    return f"Load average (1 min) before the runs: {min(found):.1f} to {max(found):.1f}."


def told(file: Path) -> dict[str, Any]:
    """What the first learner wrote.

    Raises:
        Problem: if it wrote nothing.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Problem(f"{file}: the first learner left no result ({error})") from None
