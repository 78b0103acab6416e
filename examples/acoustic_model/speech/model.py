"""Acoustic models, which score every state in every frame: a bidirectional LSTM (BLSTM), and a deep
feed-forward net (DNN) over a window of frames.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .features import BINS, WIDTH

ACTIVATIONS = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU}


@dataclass(frozen=True)
class Shape:
    """Kind and size of a model.

    Attributes:
        inputs: features per frame.
        layers: number of bidirectional LSTM layers, or of a DNN's hidden layers.
        hidden: LSTM cells per direction, or width of a DNN's hidden layers.
        projection: width of the linear layer before the outputs; 0 for none.
        outputs: number of states.
        kind: "blstm" or "dnn".
        context: number of frames on either side that a DNN gets with each frame.
        activation: activation of a DNN, "sigmoid" or "relu".
    """

    layers: int
    hidden: int
    projection: int
    outputs: int
    inputs: int = WIDTH
    kind: str = "blstm"
    context: int = 0
    activation: str = "sigmoid"

    @property
    def window(self) -> int:
        """Number of inputs of a DNN's first layer."""
        return (2 * self.context + 1) * self.inputs


PRESETS = {
    "small": Shape(2, 64, 0, 0),
    "paper": Shape(6, 512, 256, 32_000, inputs=260),
    "dnn": Shape(5, 256, 0, 0, inputs=BINS, kind="dnn", context=5),
    "dnn-paper": Shape(6, 2048, 0, 8_900, inputs=BINS, kind="dnn", context=5),
}


def preset(name: str, outputs: int) -> Shape:
    """Return a named shape; presets of papers keep their own number of outputs.

    `small` and `dnn` train on a laptop. `paper` is the model of the H-ADPSGD papers (43,154,944
    parameters), `dnn-paper` the size of DNN on which model averaging was published (6 sigmoid layers of
    2048 over 440 inputs).
    """
    shape = PRESETS[name]
    return shape if shape.outputs else replace(shape, outputs=outputs)


def make(shape: Shape) -> nn.Module:
    """Return a new model of that shape, an AcousticModel (BLSTM) or a FeedForward (DNN)."""
    return FeedForward(shape) if shape.kind == "dnn" else AcousticModel(shape)


class AcousticModel(nn.Module):
    """The BLSTM: bidirectional LSTM layers, an optional linear projection, a linear output layer.

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
        """Return the scores of all states before the softmax.

        Args:
            frames: float32, shape (batch, time, inputs).
            lengths: number of frames of each utterance if they differ, longest first; int64 (batch,).

        Returns:
            scores, shape (batch, time, outputs).
        """
        if lengths is None:
            return self.output(self.projection(self.lstm(frames)[0]))
        packed = pack_padded_sequence(frames, lengths, batch_first=True)
        hidden = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        return self.output(self.projection(hidden))


class FeedForward(nn.Module):
    """The DNN: hidden layers y = activation(W x + b) over a window of frames, and a linear output layer.

    It takes only the first `inputs` features of a frame, without deltas, because the window shows how the
    features change.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        widths = [shape.window] + [shape.hidden] * shape.layers
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.activation = ACTIVATIONS[shape.activation]()
        self.output = nn.Linear(shape.hidden, shape.outputs)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scores of all states before the softmax.

        Args:
            frames: float32, shape (batch, context + time + context, at least inputs).
            lengths: ignored, because the scores of a frame depend on no frame farther away than `context`.

        Returns:
            scores, shape (batch, time, outputs).
        """
        hidden = windows(frames, self.shape)
        for layer in self.hidden:
            hidden = self.activation(layer(hidden))
        return self.output(hidden)


def windows(frames: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return a DNN's input of each frame: (batch, context + time + context, ...) to (batch, time, window)."""
    static = frames[..., : shape.inputs]
    return static.unfold(1, 2 * shape.context + 1, 1).flatten(2)
