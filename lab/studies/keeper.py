"""Runs that are kept when they are done: a second call makes only what is missing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech import launch
from examples.acoustic_model.speech.problem import Problem


@dataclass(frozen=True)
class Job:
    """A run. It is finished when its record, run.json, is written.

    Attributes:
        name: name of the run in messages and in the name of its folder.
        settings: all that the outcome depends on; a finished run with equal settings is not repeated.
        act: function that makes the run in its folder, its argument, and returns the content of the record.
    """

    name: str
    settings: dict[str, Any]
    act: Callable[[Path], dict[str, Any]]


def folder(job: Job, root: Path) -> Path:
    """Return the folder of a run, whose name ends with a digest of the run's settings."""
    all_of_it = {**job.settings, "versions": launch.versions()}
    digest = hashlib.sha256(json.dumps(all_of_it, sort_keys=True).encode()).hexdigest()[:8]
    name = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in job.name)
    return root / f"{name}-{digest}"


def recall(place: Path) -> dict[str, Any] | None:
    """Return the record of a finished run; None if `place` has none that can be read."""
    try:
        record = json.loads((place / "run.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "seconds" in record else None


def keep(place: Path, record: dict[str, Any]) -> None:
    """Write the record of a run, atomically."""
    part = place / "run.json.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(place / "run.json")


def left(took: Sequence[float], todo: int) -> str:
    """Return a text with the number of runs left, and their time by the mean of the finished runs."""
    runs = f"{todo} {'run' if todo == 1 else 'runs'} left"
    if not took:
        return runs
    seconds = todo * sum(took) / len(took)
    return f"{runs}, about " + (f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s")


def perform_jobs(
    jobs: Sequence[Job], root: Path, recall_only: bool = False
) -> tuple[list[dict[str, Any] | None], list[str]]:
    """Make all runs that are not finished, in this order; one that fails does not stop the others.

    Args:
        jobs: the runs.
        root: folder of all runs' folders.
        recall_only: make no run; one that is not finished has no record then, and counts as no failure.

    Returns:
        a record for each run, None if it failed, and a line on each failure.
    """
    records = [recall(folder(job, root)) for job in jobs]
    took = [record["seconds"] for record in records if record]
    todo, failures = len(jobs) - len(took), []
    print(f"{len(jobs)} runs, {len(took)} finished before", flush=True)
    for i, job in enumerate(jobs):
        if records[i] is not None or recall_only:
            continue
        print(f"-- {job.name}; {left(took, todo)}", flush=True)
        todo -= 1
        try:
            records[i] = record = _made(job, folder(job, root))
        except Problem as problem:
            print(f"   failed: {problem}", flush=True)
            failures.append(f"{job.name}: {problem}")
        else:
            took.append(record["seconds"])
    return records, failures


def _made(job: Job, place: Path) -> dict[str, Any]:
    shutil.rmtree(place, ignore_errors=True)  # remains of an interrupted or failed run
    place.mkdir(parents=True)
    began, load = time.monotonic(), os.getloadavg()[0]
    outcome = job.act(place)
    record = {"settings": job.settings, "load_before": load, **outcome}
    record["seconds"] = time.monotonic() - began
    keep(place, record)
    return record
