"""A task for training in virtual time: a small transformer predicts bytes of Python's standard library.

    python -m hvd_adpsgd simulate --train examples/byte_transformer.py --super-learners 8 --steps 300 \
        --step 50ms --network 1Gb/s,50us --compare synchronous --options moments=shared

AdamW with a warm-up and a cosine of 300 steps. Batches are small, so gradients are noisy.
"""

import functools
import math
from collections.abc import Iterable, Iterator

import torch
from hvd_adpsgd_lab.bench.storm.model import GPT, Batch, Text, loss_of
from torch import nn

WIDTH, LENGTH, HEADS, SEQUENCES = 64, 48, 4, 4
STEPS, WARM_UP, RATE = 300, 50, 0.016
HELD_OUT = 256  # sequences

loss = loss_of
text = functools.cache(lambda: Text(LENGTH))


def model(width: int = WIDTH, blocks: int = 2) -> nn.Module:
    return GPT(width, blocks, LENGTH, head=width // HEADS, std=None)


def batches(super_learner: int, n: int, seed: int, sequences: int = SEQUENCES) -> Iterator[Batch]:
    """Random sequences of the first 95 % of the bytes."""
    random = torch.Generator().manual_seed(seed * n + super_learner)
    while True:
        yield text().batch(sequences, random)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)


def schedule(
    optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> torch.optim.lr_scheduler.LRScheduler:
    """A linear warm-up times a cosine."""

    def factor(step: int) -> float:
        return min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def evaluate(model: nn.Module) -> dict[str, float]:
    """The loss on sequences of the last 5 % of the bytes."""
    return {"held-out loss": loss(model, text().held_out(HELD_OUT)).item()}
