"""Trainings of the speech example as runs of a study that are kept; what a study writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from examples.acoustic_model.speech import strategy
from examples.acoustic_model.speech.launch import Training
from examples.acoustic_model.speech.problem import Problem
from lab.studies.keeper import Job, folder, perform_jobs


class Outcome(NamedTuple):
    """A training, and the content of its record; None if it failed."""

    run: Training
    record: dict | None


def publish(out: Path, result: dict, text: str, figures: str, failures: list[str]) -> None:
    """Write result.json and table.md to a folder, and print the text; raise Problem if runs have failed."""
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "table.md").write_text(text + "\n")
    print(text)
    print(f"{out}: result.json, table.md, {figures}")
    if failures:
        raise Problem(f"{len(failures)} runs failed; start again to repeat them")


def known(specs: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the specs that this version of the library knows, and the error message of each other one."""
    refused = {}
    for spec in specs:
        try:
            strategy.check(spec)
        except Problem as problem:
            refused[spec] = str(problem).removeprefix("--strategy: ")
    return [spec for spec in specs if spec not in refused], refused


def _job(run: Training, data: Path, act: Callable[[Training], dict] | None = None) -> Job:
    chosen = dataclasses.asdict(run)
    del chosen["folder"]
    speech = json.loads((data / "settings.json").read_text())["digest"]
    name = f"{run.scheme}, seed {run.seed}"
    return Job(name, chosen | {"speech": speech}, lambda _: act(run) if act else {})


def placed(run: Training, root: Path, data: Path) -> Training:
    """Return the run with its folder set, below `root`."""
    return dataclasses.replace(run, folder=folder(_job(run, data), root))


def perform(
    runs: list[Training], root: Path, data: Path, act: Callable[[Training], dict]
) -> tuple[list[Outcome], list[str]]:
    """Call act(run) for each run that is not finished; a run that fails does not stop the others.

    Args:
        runs: trainings with folders, as placed() returns them.
        root: folder of all runs' folders.
        data: folder of the speech corpus.
        act: function that trains one run, and returns the content of its record.

    Returns:
        the outcome of each run, and a line on each failure.
    """
    records, failures = perform_jobs([_job(run, data, act) for run in runs], root)
    return list(map(Outcome, runs, records)), failures
