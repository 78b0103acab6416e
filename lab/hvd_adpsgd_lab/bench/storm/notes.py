"""Files of a run: the lines of JSON that learners and driver append, and what they tell each other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Notes:
    """Appends lines of JSON to a file, each with one write, so that a killed process leaves whole lines.

    Args:
        file: the file.
        **always: what each line has.
    """

    def __init__(self, file: Path, **always: Any):
        self._out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._always = always

    def add(self, event: str, at_s: float | None = None, **facts: Any) -> None:
        """Append an event with its time, by the monotonic clock that all processes of a host share."""
        t = time.monotonic() if at_s is None else at_s
        line = json.dumps({"event": event, "t": round(t, 4), **self._always, **facts}) + "\n"
        os.write(self._out, line.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._out)


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file."""
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def published(file: Path, text: str) -> None:
    """Write a file which others see whole or not at all."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    new.write_text(text)
    new.replace(file)


def began_file(folder: Path) -> Path:
    """A file with the time at which the schedule has begun."""
    return folder / "began"


def over_file(folder: Path) -> Path:
    """A file that exists when learners end."""
    return folder / "over"


def listener_file(folder: Path, slot: int) -> Path:
    """A file with the address at which super learners can join at the learner of a slot."""
    return folder / f"listener-{slot}"


def fault_file(folder: Path, slot: int) -> Path:
    """A file with factor and end of the time in which steps of a slot take longer."""
    return folder / f"slow-{slot}"


def copy_file(folder: Path, number: int, slot: int) -> Path:
    """Parameters of a learner at the time of this number, float32, one after the other."""
    return folder / f"copy-{number}-{slot}"


def mean_file(folder: Path, number: int) -> Path:
    """The mean of the copies of this number, float32."""
    return folder / f"mean-{number}.npy"
