"""Measures the mean model of a run, point by point."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvd_adpsgd_lab.learning.memory import Layout
from hvd_adpsgd_lab.learning.outcome import Point
from hvd_adpsgd_lab.learning.super_learner import trained
from hvd_adpsgd_lab.learning.task import Task, seed_torch

_PROBES = 8
Vector = npt.NDArray[np.float64]


class Curve:
    """The points of one run.

    Args:
        task: the task.
        model: a module like those of the super learners, which holds the mean model from now on.
        n: number of super learners.
        seed: seed of the run.

    Attributes:
        model: the mean model of the last point.
        points: the points.
        layout: where the trained parameters lie in a vector of a model.
    """

    def __init__(self, task: Task, model: torch.nn.Module, n: int, seed: int):
        self.model, self.points = copy.deepcopy(model).eval(), list[Point]()
        self._parameters = [p for _, p in trained(self.model)]
        self.layout = Layout(self._parameters)
        self._task, self._seed = task, seed
        self._probes = [task.copied(next(task.stream(i, n, seed))) for i in range(min(n, _PROBES))]
        self._losses: list[float] = []

    def add_loss(self, loss: float) -> None:
        """Count the loss of a batch for the next point."""
        self._losses.append(loss)

    def add(
        self,
        time_s: float,
        steps: int,
        samples: int,
        vectors: Callable[[], Iterator[Vector]],
        models: Sequence[torch.nn.Module],
        training: int,
    ) -> Point:
        """Measure the mean model, and append a point.

        Args:
            time_s: see Point.
            steps: see Point.
            samples: see Point.
            training: see Point.
            vectors: yields the parameters of each model, in the order of `layout`; called twice.
            models: the modules of the super learners, for their buffers.
        """
        total, count = np.zeros(self.layout.extent), 0
        for vector in vectors():
            total += vector
            count += 1
        if count:
            total /= count
            self.layout.write(self._parameters, total)
            self._average_buffers(models)
        square = sum(float(((vector - total) ** 2).sum()) for vector in vectors())
        loss, evaluation = self._evaluate()
        point = Point(
            time_s=time_s,
            steps=steps,
            samples=samples,
            train_loss=math.fsum(self._losses) / len(self._losses) if self._losses else None,
            loss=loss,
            evaluation=evaluation,
            distance=math.sqrt(square / max(count, 1)),
            training=training,
        )
        self._losses.clear()
        self.points.append(point)
        return point

    def _evaluate(self) -> tuple[float, dict[str, float]]:
        seed_torch(self._seed, 0, 0)
        losses = [self._task.loss_of(self.model, probe).item() for probe in self._probes]
        self.model.eval()  # the user's function may have left it in another mode
        with torch.no_grad():
            evaluation = self._task.evaluation(self.model)
        return math.fsum(losses) / len(losses), evaluation

    @torch.no_grad()
    def _average_buffers(self, models: Sequence[torch.nn.Module]) -> None:
        """Set floating-point buffers to their mean, and others to those of the first model."""
        theirs: list[dict[str, Any]] = [dict(model.named_buffers()) for model in models]
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                mean = sum(each[name].double() for each in theirs) / len(theirs)
                buffer.copy_(mean)
            else:
                buffer.copy_(theirs[0][name])
