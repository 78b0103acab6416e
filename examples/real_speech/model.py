"""A bidirectional LSTM whose outputs are letters, for connectionist temporal classification (CTC)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from examples.real_speech.corpus import BLANK, STACKED, Batch
from examples.real_speech.utterances import BINS

# SpecAugment (Park et al., arXiv:1904.08779), without time warping: number and widest of the masks
BANDS, WIDEST_BAND = 2, 16  # mel bins
GAPS, WIDEST_GAP = 2, 12  # stacked frames, at most a fifth of the utterance each


@dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    Attributes:
        letters: number of letters.
        layers: LSTM layers.
        cells: cells per direction.
        dropout: between layers.
    """

    letters: int
    layers: int = 3
    cells: int = 128
    dropout: float = 0.2


class Layer(nn.Module):
    """A bidirectional LSTM over padded utterances; each direction begins at an end of the utterance.

    On CPUs torch's loop over packed sequences takes four times as long as oneDNN's over padded ones.
    """

    def __init__(self, features: int, cells: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.onwards = nn.LSTM(features, cells, batch_first=True)
        self.back = nn.LSTM(features, cells, batch_first=True)
        for lstm in (self.onwards, self.back):  # input, forget, cell and output gate
            nn.init.ones_(lstm.bias_ih_l0.data[cells : 2 * cells])  # begin by keeping the cell

    def forward(self, frames: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        """Return (n, frames, 2 cells) of (n, frames, features); `turned` as `turned_around` returns it."""
        frames = self.norm(frames)
        back = self.back(frames.take_along_dim(turned, 1))[0].take_along_dim(turned, 1)
        return torch.cat((self.onwards(frames)[0], back), -1)


class Recogniser(nn.Module):
    """Log-probabilities of letters (and the blank) from stacked frames."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide = 2 * shape.cells
        sizes = (STACKED * BINS, *[wide] * (shape.layers - 1))
        self.layers = nn.ModuleList(Layer(size, shape.cells) for size in sizes)
        self.dropout = nn.Dropout(shape.dropout)
        self.outputs = nn.Linear(wide, shape.letters + 1)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities (n, frames, letters + 1) of (n, frames, features)."""
        turned = turned_around(lengths, frames.shape[1])
        for layer in self.layers:
            frames = self.dropout(layer(frames, turned))
        return self.outputs(frames).log_softmax(-1)


def turned_around(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """Return indices (n, longest, 1) that turn each utterance around and leave its padding where it is."""
    places = torch.arange(longest)
    ends = lengths[:, None] - 1
    return torch.where(places <= ends, ends - places, places)[..., None]


def loss(model: Recogniser, batch: Batch) -> torch.Tensor:
    """Return the CTC loss in nats, summed over utterances; those shorter than their text count as 0."""
    scores = model(batch.frames, batch.lengths).transpose(0, 1)
    return nn.functional.ctc_loss(
        scores, batch.letters, batch.lengths, batch.counts, BLANK, "sum", zero_infinity=True
    )


def augmented(batch: Batch, random: torch.Generator) -> Batch:
    """Return the minibatch with masked bands of frequencies and gaps in time, drawn for each utterance."""
    frames = batch.frames.clone()
    n, longest, _ = frames.shape
    bins = frames.view(n, longest, STACKED, BINS)
    for i in range(n):
        length = int(batch.lengths[i])
        for _ in range(BANDS):
            low, width = _drawn(BINS, WIDEST_BAND, random)
            bins[i, :, :, low : low + width] = 0
        for _ in range(GAPS):
            low, width = _drawn(length, min(WIDEST_GAP, length // 5), random)
            frames[i, low : low + width] = 0
    return Batch(frames, batch.lengths, batch.letters, batch.counts)


def _drawn(room: int, widest: int, random: torch.Generator) -> tuple[int, int]:
    """Return the start and the width of a mask inside `room`."""
    width = int(torch.randint(widest + 1, (), generator=random))
    return int(torch.randint(room - width + 1, (), generator=random)), width


def greedy(scores: torch.Tensor, lengths: torch.Tensor, letters: str) -> list[str]:
    """Return the texts of the best path: repeated outputs count once, blanks not at all."""
    texts = []
    for best, length in zip(scores.argmax(-1), lengths, strict=True):
        path = torch.unique_consecutive(best[:length]).tolist()
        texts.append("".join(letters[code - 1] for code in path if code != BLANK))
    return [" ".join(text.split()) for text in texts]
