"""The acoustic model as a task for training in virtual time: `simulate --train` with this file.

    python -m examples.acoustic_model.prepare_data --task easy
    python -m hvd_adpsgd simulate --train examples/acoustic_model/virtual_time.py --super-learners 16 \
        --steps 120 --step 50ms --network 1Gb/s,50us --compare synchronous

Plain SGD, as in the papers; `task` makes tasks with other batches, rates and schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from hvd_adpsgd_lab.learning import Task
from torch import nn

from examples.acoustic_model.speech import corpus
from examples.acoustic_model.speech.model import Shape, make

DATA = Path("out/speech/easy")
LAYERS, HIDDEN = 1, 64
BASE_BATCH = 64  # segments of all super learners, to which a base rate belongs
HELD_OUT = 1024  # segments

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How the acoustic model is trained.

    Attributes:
        batch: segments of 21 frames per step, of all super learners together.
        rate: learning rate at BASE_BATCH; that of a batch is in proportion to it.
        warm_up: whether the rate grows from `rate` to its target over 5/8 of the epochs, as in the papers.
        epochs: how often each segment is used. After 5/8 of them the rate falls by 1/sqrt(2) per epoch.
        momentum: of SGD.
    """

    batch: int = 1024
    rate: float = 2.0
    warm_up: bool = False
    epochs: float = 6.0
    momentum: float = 0.0

    @property
    def scale(self) -> float:
        """The rate, as a multiple of that of BASE_BATCH."""
        return self.batch / BASE_BATCH

    def steps(self) -> int:
        """Steps of each super learner."""
        return max(1, round(self.epochs * len(split("train")) / self.batch))

    def factor(self, step: int) -> float:
        """The rate of a step, as a multiple of the target."""
        epoch, held = step * self.batch / len(split("train")), 5 / 8 * self.epochs
        warmed = min(1.0, epoch / held) if self.warm_up else 1.0
        annealed = max(0, int(epoch - held) + 1) if epoch >= held else 0
        return (1 + (self.scale - 1) * warmed) / self.scale * 0.5 ** (annealed / 2)


@functools.cache
def split(name: str) -> corpus.Split:
    return corpus.Split(DATA, name)


def model() -> nn.Module:
    states = len(corpus.read_json(DATA / "states.json"))
    return make(Shape(LAYERS, HIDDEN, 0, states))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean cross-entropy over frames of a known state, in nats."""
    frames, labels = batch
    scores = model(frames)
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=-1)


def batches(super_learner: int, n: int, seed: int, recipe: Recipe = Recipe()) -> Iterator[Batch]:
    """An epoch: every n-th of the shuffled segments."""
    order = torch.randperm(len(split("train")), generator=torch.Generator().manual_seed(seed))
    mine, size = order[super_learner::n].tolist(), max(1, recipe.batch // n)
    for first in range(0, len(mine) - size + 1, size):
        frames, labels = split("train")[mine[first : first + size]]
        yield torch.from_numpy(frames), torch.from_numpy(labels)


def optimizer(
    parameters: Iterable[nn.Parameter], recipe: Recipe = Recipe()
) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=recipe.rate * recipe.scale, momentum=recipe.momentum)


def schedule(
    optimizer: torch.optim.Optimizer, recipe: Recipe = Recipe()
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.factor)


def evaluate(model: nn.Module) -> dict[str, float]:
    """The loss on held-out segments."""
    chosen = list(range(min(HELD_OUT, len(split("dev")))))
    frames, labels = split("dev")[chosen]
    return {
        "held-out loss": loss(model, (torch.from_numpy(frames), torch.from_numpy(labels))).item()
    }


def task(recipe: Recipe) -> Task:
    """The task of a recipe."""
    return Task(
        model=model,
        loss=loss,
        batches=lambda super_learner, n, seed: batches(super_learner, n, seed, recipe),
        optimizer=lambda parameters: optimizer(parameters, recipe),
        schedule=lambda optimizer: schedule(optimizer, recipe),
        evaluate=evaluate,
        name="acoustic model",
    )
