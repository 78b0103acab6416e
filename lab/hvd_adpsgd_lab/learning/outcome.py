"""What training in virtual time has shown: a curve of points, counts, and the mean model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_adpsgd.watching.record import plain


@dataclass(frozen=True)
class Point:
    """The job at one time.

    Attributes:
        time_s: virtual time.
        steps, samples: made and used by all super learners together.
        train_loss: mean loss of the batches since the point before; None if there were none.
        loss: of the mean model, on the first batch of each of up to 8 super learners.
        evaluation: numbers of evaluate(model) of the mean model.
        distance: consensus distance: root mean square distance of the models from their mean.
        training: number of super learners that train.
    """

    time_s: float
    steps: int
    samples: int
    train_loss: float | None
    loss: float
    evaluation: dict[str, float]
    distance: float
    training: int


@dataclass(frozen=True)
class Outcome:
    """Result of training in virtual time.

    Attributes:
        strategy: spec of the strategy, or of the baseline.
        points: the curve; the first point is before the first step.
        steps: steps of each super learner; last that of one that has joined.
        steps_per_s: steps of all super learners per second of virtual time.
        exchanges_per_step: exchanges per super learner and step, active and passive; 0 for baselines.
        staleness_mean, staleness_99: steps between a snapshot and the merge of its exchange: mean, and 99th
            percentile; 0 for baselines.
        staleness: number of merged chunks by their staleness in steps.
        sent_bytes: bytes that a super learner has sent, on average.
        failed, joined: numbers of super learners that have failed, and joined.
        ended: why the training has ended: "steps", "time", or "nobody trains".
        digest: SHA-256 of the mean model; equal for runs of equal bits.
        model: the mean model at the end; not in the JSON.
    """

    strategy: str
    points: list[Point]
    steps: list[int]
    steps_per_s: float
    exchanges_per_step: float
    staleness_mean: float
    staleness_99: int
    staleness: list[int]
    sent_bytes: float
    failed: int
    joined: int
    ended: str
    digest: str
    model: torch.nn.Module = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all but the model as a dict of JSON's types; a number that is not finite is None."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("model", "points")]
        points = [dataclasses.asdict(point) for point in self.points]
        found = {**{name: getattr(self, name) for name in names}, "points": points}
        told: dict[str, Any] = plain(found)
        return told

    def to_json(self) -> str:
        """Return all but the model as a JSON object."""
        return json.dumps(self.to_dict(), indent=1)


def digest_of(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
