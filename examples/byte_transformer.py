"""A task for training in virtual time: a small transformer predicts bytes of Python's standard library.

    python -m hvd_adpsgd simulate --train examples/byte_transformer.py --super-learners 8 --steps 300 \
        --step 50ms --network 1Gb/s,50us --compare synchronous --options moments=shared

AdamW with a warm-up and a cosine of 300 steps. Batches are small, so gradients are noisy.
"""

import functools
import math
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

WIDTH, LENGTH, HEADS, SEQUENCES = 64, 48, 4, 4
STEPS, WARM_UP, RATE = 300, 50, 0.016
HELD_OUT = 256  # sequences

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Causal self-attention, then two linear layers, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        parts = self.inputs(self.norms[0](x)).view(n, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outputs(seen.transpose(1, 2).reshape(x.shape))
        return x + self.layers(self.norms[1](x))


class Transformer(nn.Module):
    """Blocks between embeddings of bytes and places, and the logits of the next byte."""

    def __init__(self, width: int = WIDTH, blocks: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(self.blocks(self.bytes(x) + self.places.weight)))


def model() -> nn.Module:
    return Transformer()


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean cross-entropy of the next byte, in nats."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).reshape(-1, 256), labels.reshape(-1))


def batches(super_learner: int, n: int, seed: int, sequences: int = SEQUENCES) -> Iterator[Batch]:
    """Random sequences of the first 95 % of the bytes."""
    random = torch.Generator().manual_seed(seed * n + super_learner)
    while True:
        yield drawn(text()[0], sequences, random)


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
    held_out = drawn(text()[1], HELD_OUT, torch.Generator().manual_seed(7))
    return {"held-out loss": loss(model, held_out).item()}


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """The sources of the standard library's modules, as bytes: to train on, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    cut = int(0.95 * len(whole))
    return whole[:cut].long(), whole[cut:].long()


def drawn(bytes_: torch.Tensor, sequences: int, random: torch.Generator) -> Batch:
    """Sequences at random places, and the same one byte later."""
    starts = torch.randint(len(bytes_) - LENGTH - 1, (sequences,), generator=random)
    found = bytes_[starts[:, None] + torch.arange(LENGTH + 1)]
    return found[:, :-1], found[:, 1:]
