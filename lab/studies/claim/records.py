"""Finished runs, a line of JSON each: an interrupted study loses no finished run, and repeats none."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .curves import Point


@dataclass(frozen=True)
class Key:
    """What identifies a run."""

    task: str
    situation: str
    scheme: str
    seed: int

    @property
    def place(self) -> tuple[str, str, str]:
        """Task, situation and scheme."""
        return self.task, self.situation, self.scheme


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        key: which one it is.
        settings: of the task, and the budget; only runs with equal ones are compared.
        curve: points by time.
        ended_s: when the job ended because a learner was killed; None: it did not.
        took_s: of the whole run, with start and evaluation.
    """

    key: Key
    settings: dict[str, Any]
    curve: list[Point]
    ended_s: float | None
    took_s: float


def append(file: Path, record: Record) -> None:
    """Add a record to a file, and wait until it is on the disk; first end a line that was cut short."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as out:
        if out.tell():
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                out.write(b"\n")
        out.write((json.dumps(asdict(record)) + "\n").encode())
        out.flush()
        os.fsync(out.fileno())


def load(file: Path) -> list[Record]:
    """Return all whole records of a file; none if there is no file."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [record for line in lines if (record := _read(line)) is not None]


def _read(line: str) -> Record | None:
    try:
        told = json.loads(line)
        curve = [Point(*point) for point in told["curve"]]
        return Record(Key(**told["key"]), told["settings"], curve, told["ended_s"], told["took_s"])
    except (ValueError, KeyError, TypeError):
        return None
