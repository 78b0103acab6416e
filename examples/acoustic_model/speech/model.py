"""The acoustic model: a bidirectional LSTM that gives a score to every state in every frame."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .features import WIDTH


@dataclass(frozen=True)
class Shape:
    """Size of a model.

    Attributes:
        inputs: features per frame.
        layers, hidden: bidirectional LSTM layers; cells per direction.
        projection: width of the linear layer before the outputs; 0 for none.
        outputs: states.
    """

    layers: int
    hidden: int
    projection: int
    outputs: int
    inputs: int = WIDTH


def preset(name: str, outputs: int) -> Shape:
    """`small` trains on a laptop; `paper` is the model of the H-ADPSGD papers (43,154,944 parameters)."""
    if name == "paper":
        return Shape(layers=6, hidden=512, projection=256, outputs=32_000, inputs=260)
    return Shape(layers=2, hidden=64, projection=0, outputs=outputs)


class AcousticModel(nn.Module):
    """LSTM layers, an optional linear projection, outputs.

    PyTorch gives each gate two bias vectors, which is what the parameter count of `paper` includes.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.lstm = nn.LSTM(
            shape.inputs, shape.hidden, shape.layers, batch_first=True, bidirectional=True
        )
        width = 2 * shape.hidden
        self.projection = nn.Linear(width, shape.projection) if shape.projection else nn.Identity()
        self.output = nn.Linear(shape.projection or width, shape.outputs)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Scores before the softmax.

        Args:
            frames: float32, shape (batch, time, inputs).
            lengths: frames of each utterance if they differ, longest first; int64 (batch,).

        Returns:
            shape (batch, time, outputs).
        """
        if lengths is None:
            return self.output(self.projection(self.lstm(frames)[0]))
        packed = pack_padded_sequence(frames, lengths, batch_first=True)
        hidden = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        return self.output(self.projection(hidden))
