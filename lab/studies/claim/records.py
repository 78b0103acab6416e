"""Finished runs of the claim."""

from __future__ import annotations

from dataclasses import dataclass
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


def record_of(key: Key, settings: dict[str, Any], kept: dict[str, Any]) -> Record:
    """Return the record of a run from what is kept of it."""
    curve = [Point(*point) for point in kept["curve"]]
    return Record(key, settings, curve, kept["ended_s"], kept["seconds"])
