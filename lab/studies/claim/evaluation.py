"""The held-out loss of the mean model, from the copies of a run that is over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hvd_adpsgd_lab.bench.storm.model import load

from .curves import Point
from .recorder import copied, copy_file
from .situations import LEARNERS
from .tasks import Task


def curve(folder: Path, task: Task, times: Sequence[float]) -> list[Point]:
    """Return the points of a run, one for each time at which a learner that trained has copied its model."""
    model = task.model()
    points = []
    steps = [0] * LEARNERS  # a learner that was killed has made the steps of its last copy
    for number in range(len(times)):
        copies = {rank: copied(folder, number, rank) for rank in range(LEARNERS)}
        there = {rank: told for rank, told in copies.items() if told is not None}
        if not there:
            break
        for rank, told in there.items():
            steps[rank] = told["steps"]
        load(model, mean([copy_file(folder, number, rank) for rank in there]))
        seconds = max(told["seconds"] for told in there.values())
        points.append(Point(seconds, task.samples * sum(steps), task.evaluate(model)))
    return points


def mean(files: Sequence[Path]) -> np.ndarray:
    """Return the mean of copies, float32."""
    total = np.fromfile(files[0], np.float32).astype(np.float64)
    for file in files[1:]:
        total += np.fromfile(file, np.float32)
    return (total / len(files)).astype(np.float32)
