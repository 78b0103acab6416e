"""A small GPT over the bytes of Python's standard library: the work of `bench storm` and of studies."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

HEAD = 32  # width of an attention head
_HELD_OUT = 0.05  # last part of the text, for evaluation
_EVALUATED = 64  # sequences of an evaluation

Batch = tuple[torch.Tensor, torch.Tensor]


class Text:
    """Bytes of the standard library's modules, of which sequences are drawn.

    Args:
        length: bytes of a sequence.
    """

    def __init__(self, length: int):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        joined = bytearray(b"\n".join(map(Path.read_bytes, files)))
        whole = torch.frombuffer(joined, dtype=torch.uint8)
        cut = int((1 - _HELD_OUT) * len(whole))
        self._trained, self._held_out, self._length = whole[:cut], whole[cut:], length

    def batch(self, count: int, chance: torch.Generator) -> Batch:
        """Return `count` sequences of the trained text, and the same one byte later."""
        return self._drawn(self._trained, count, chance)

    def held_out(self, count: int = _EVALUATED) -> Batch:
        """Return the sequences of an evaluation, always the same ones."""
        return self._drawn(self._held_out, count, torch.Generator().manual_seed(0))

    def _drawn(self, text: torch.Tensor, count: int, chance: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - self._length - 1, (count, 1), generator=chance)
        found = text[starts + torch.arange(self._length + 1)].long()
        return found[:, :-1], found[:, 1:]


class Block(nn.Module):
    """Causal self-attention and two linear layers, each with a residual connection."""

    def __init__(self, width: int, head: int):
        super().__init__()
        self.head = head
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for x, shape (n, length, width)."""
        n, length, width = x.shape
        parts = self.inputs(self.before_attention(x)).view(
            n, length, 3, width // self.head, self.head
        )
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outputs(seen.transpose(1, 2).reshape(n, length, width))
        return cast(torch.Tensor, x + self.layers(self.before_layers(x)))


class GPT(nn.Module):
    """A GPT over bytes.

    Args:
        width: a multiple of `head`.
        layers: number of blocks.
        length: largest number of bytes of a sequence.
        head: width of an attention head.
        std: of the first embeddings; None: that of torch, 1.
    """

    def __init__(
        self, width: int, layers: int, length: int, head: int = HEAD, std: float | None = 0.02
    ):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, head) for _ in range(layers)))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, 256)
        if std is not None:
            for embedding in (self.bytes, self.places):
                nn.init.normal_(embedding.weight, std=std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next bytes for bytes x, shape (n, length)."""
        places = self.places.weight[: x.shape[1]]
        return cast(torch.Tensor, self.logits(self.norm(self.blocks(self.bytes(x) + places))))


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


def adamw(parameters: Sequence[nn.Parameter], rate: float) -> torch.optim.AdamW:
    """Return AdamW with the learning rate `rate`."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


@torch.no_grad()
def load(model: nn.Module, values: npt.NDArray[np.float32]) -> None:
    """Set the parameters of a model to `values`, one parameter after the other."""
    nn.utils.vector_to_parameters(torch.from_numpy(values), model.parameters())
