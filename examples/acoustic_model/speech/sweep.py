"""Runs many trainings one after another, keeps finished ones, and estimates the remaining time.

The name of a run's folder has a digest of the run's settings, so that runs with different settings have
different folders. A run is finished when its record, run.json, is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from . import launch, strategy
from .launch import Training
from .problem import Problem


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        run: the training.
        record: content of the run's run.json; None if the run failed.
        failure: why the run failed; "" if it did not.
    """

    run: Training
    record: dict | None
    failure: str = ""


def known(specs: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the specs that this version of the library knows, and the error message of each other one."""
    refused = {}
    for spec in specs:
        try:
            strategy.check(spec)
        except Problem as problem:
            refused[spec] = str(problem).removeprefix("--strategy: ")
    return [spec for spec in specs if spec not in refused], refused


def settings(run: Training, data: Path) -> dict:
    """Return everything that a run's result depends on; a finished run with equal settings is kept."""
    chosen = dataclasses.asdict(run)
    del chosen["folder"]
    speech = json.loads((data / "settings.json").read_text())["digest"]
    return chosen | {"speech": speech, "versions": launch.versions()}


def placed(run: Training, root: Path, data: Path) -> Training:
    """Return the run with its folder set, below `root`."""
    text = json.dumps(settings(run, data), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = f"{strategy.folder_name(run.scheme)}-{run.seed}-{digest}"
    return dataclasses.replace(run, folder=root / name)


def recall(folder: Path) -> dict | None:
    """Return the record of a finished run; None if `folder` has none that can be read."""
    try:
        record = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "seconds" in record else None


def keep(folder: Path, record: dict) -> None:
    """Write the record of a run, atomically."""
    part = folder / "run.json.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(folder / "run.json")


def perform(runs: list[Training], data: Path, act: Callable[[Training], dict]) -> list[Outcome]:
    """Call act(run) for each run that is not finished; a run that fails does not stop the others.

    Args:
        runs: trainings with folders, as placed() returns them.
        data: folder of the speech corpus.
        act: function that trains one run, and returns the content of its record.
    """
    records = [recall(run.folder) for run in runs]
    took = [record["seconds"] for record in records if record]
    todo = len(runs) - len(took)
    print(f"{len(runs)} runs, {len(took)} finished before", flush=True)
    outcomes = []
    for run, record in zip(runs, records, strict=True):
        if record is None:
            print(f"-- {run.scheme}, seed {run.seed}; {left(took, todo)}", flush=True)
            outcomes.append(_perform(run, data, act))
            todo -= 1
            took += [outcomes[-1].record["seconds"]] if outcomes[-1].record else []
        else:
            outcomes.append(Outcome(run, record))
    return outcomes


def _perform(run: Training, data: Path, act: Callable[[Training], dict]) -> Outcome:
    shutil.rmtree(run.folder, ignore_errors=True)  # remains of an interrupted or failed run
    run.folder.mkdir(parents=True)
    began = time.perf_counter()
    try:
        found = act(run)
    except Problem as problem:
        print(f"   failed: {problem}", flush=True)
        return Outcome(run, None, str(problem))
    record = {
        "settings": settings(run, data),
        "seconds": time.perf_counter() - began,
        **found,
    }
    keep(run.folder, record)
    return Outcome(run, record)


def left(took: list[float], todo: int) -> str:
    """Return a text with the number of runs left, and their time by the mean of the finished runs."""
    runs = f"{todo} {'run' if todo == 1 else 'runs'} left"
    if not took:
        return runs
    seconds = todo * sum(took) / len(took)
    return (
        f"{runs}, about {seconds / 60:.0f} min"
        if seconds > 90
        else f"{runs}, about {seconds:.0f} s"
    )


def failures(outcomes: list[Outcome]) -> list[str]:
    """Return a line on every run that failed."""
    return [
        f"{one.run.scheme}, seed {one.run.seed}: {one.failure}"
        for one in outcomes
        if one.record is None
    ]
