"""The two tasks of the claim: bytes of text with AdamW, frames of speech with SGD.

A learner of either has a model of about 10 M parameters, 40 MB in float32, and a small batch, so that a step
computes for less than a second of a shared core.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hvd_adpsgd_lab.bench.storm.model import GPT, Text, loss_of
from torch import nn

from examples.acoustic_model.speech import corpus
from examples.acoustic_model.speech.model import Shape, make
from examples.acoustic_model.speech.problem import Problem
from lab.studies.claim.schemes import Outer

Batch = tuple[torch.Tensor, torch.Tensor]

NAMES = ("text", "speech")
DATA = Path("out/speech/easy")
LENGTH, HEADS = 48, 4  # of the transformer: bytes of a sequence, attention heads
WARM_UP = 10  # steps in which the rate grows to its final value, which it keeps


@dataclass(frozen=True)
class Task:
    """What a learner trains.

    Attributes:
        settings: what the outcome depends on; runs with other settings are not compared.
        model: makes the model.
        loss: the loss of a batch, by a model.
        batches: the batches of a learner, without end: rank, number of learners, seed.
        optimizer: makes the optimizer of parameters.
        held_out: batches on which the held-out loss is computed.
        outer: DiLoCo's outer step: of the published one (0.7, 0.9) and others, the one that learns fastest.
    """

    settings: dict[str, Any]
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batches: Callable[[int, int, int], Iterator[Batch]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    held_out: Callable[[], Sequence[Batch]]
    outer: Outer

    @property
    def samples(self) -> int:
        """Sequences or segments in a step of one learner."""
        return int(self.settings["batch"])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the mean held-out loss of batches of equal size."""
        losses = [self.loss(model, batch).item() for batch in self.held_out()]
        return sum(losses) / len(losses)


def named(name: str, quick: bool = False, speech: Path = DATA) -> Task:
    """Return a task of NAMES; `quick` makes its model tiny.

    Args:
        name: "text" or "speech".
        quick: for a test.
        speech: folder of the prepared speech.

    Raises:
        Problem: if there is no such task.
    """
    if name not in NAMES:
        raise Problem(f"--task is {name!r}, allowed are {', '.join(NAMES)}")
    return text(quick) if name == "text" else acoustics(quick, speech)


def text(quick: bool) -> Task:
    """A transformer predicts the next byte of Python's standard library: 10.0 M parameters, AdamW."""
    settings: dict[str, Any] = {"width": 320, "blocks": 8, "batch": 2, "rate": 0.001}
    settings["held_out"] = 64  # sequences
    settings |= {"width": 32, "blocks": 1, "held_out": 8} if quick else {}
    width, blocks, batch = (int(settings[key]) for key in ("width", "blocks", "batch"))

    read = functools.cache(lambda: Text(LENGTH))

    def batches(rank: int, n: int, seed: int) -> Iterator[Batch]:
        random = torch.Generator().manual_seed(seed * n + rank)
        while True:
            yield read().batch(batch, random)

    @functools.cache
    def held_out() -> list[Batch]:
        return [read().held_out(int(settings["held_out"]))]

    return Task(
        settings,
        model=lambda: GPT(width, blocks, LENGTH, head=width // HEADS, std=None),
        loss=loss_of,
        batches=batches,
        optimizer=lambda parameters: torch.optim.AdamW(
            parameters, lr=settings["rate"], betas=(0.9, 0.95), weight_decay=0.1
        ),
        held_out=held_out,
        outer=Outer(1.0, 0.5),  # docs/log/0315-few-exchanges.md
    )


def frame_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean cross-entropy over frames of a known state, in nats."""
    frames, labels = batch
    scores = model(frames)
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=-1)


def acoustics(quick: bool, data: Path) -> Task:
    """A bidirectional LSTM names the state of each frame of synthetic speech: 9 M parameters, SGD."""
    settings: dict[str, Any] = {"layers": 2, "hidden": 512, "batch": 4, "rate": 0.2}
    settings |= {"momentum": 0.9, "held_out": 128}  # segments
    settings |= {"layers": 1, "hidden": 16, "held_out": 16} if quick else {}
    layers, hidden, size, many = (
        int(settings[key]) for key in ("layers", "hidden", "batch", "held_out")
    )

    @functools.cache
    def split(name: str) -> corpus.Split:
        return corpus.Split(data, name)

    def chosen(name: str, segments: list[int]) -> Batch:
        frames, labels = split(name)[segments]
        return torch.from_numpy(frames), torch.from_numpy(labels)

    def batches(rank: int, n: int, seed: int) -> Iterator[Batch]:
        for epoch in itertools.count():
            random = torch.Generator().manual_seed(1_000_003 * seed + epoch)
            mine = torch.randperm(len(split("train")), generator=random)[rank::n].tolist()
            for first in range(0, len(mine) - size + 1, size):
                yield chosen("train", mine[first : first + size])

    @functools.cache
    def held_out() -> list[Batch]:
        every = max(1, len(split("dev")) // many)
        return [chosen("dev", list(range(0, len(split("dev")), every))[:many])]

    return Task(
        settings,
        model=lambda: make(Shape(layers, hidden, 0, len(corpus.read_json(data / "states.json")))),
        loss=frame_loss,
        batches=batches,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=settings["rate"], momentum=settings["momentum"]
        ),
        held_out=held_out,
        outer=Outer(0.7, 0.9),  # docs/log/0332-loss-over-time-speech.md
    )
