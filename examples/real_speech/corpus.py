"""Reads what prepare.py wrote: features and texts of a split; minibatches of utterances of similar length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.acoustic_model.speech.problem import Problem
from examples.real_speech.utterances import BINS

BLANK = 0  # output of CTC
STACKED = 3  # frames that the model sees as one, 30 ms
_BUCKET = 16  # minibatches whose utterances are sorted by length together


@dataclass
class Batch:
    """Utterances, padded to the longest.

    Attributes:
        frames: features, float32 (n, frames, STACKED * BINS).
        lengths: frames of each utterance, int64 (n,).
        letters: texts one after the other, int64; letter i of the corpus is i + 1.
        counts: letters of each utterance, int64 (n,).
    """

    frames: torch.Tensor
    lengths: torch.Tensor
    letters: torch.Tensor
    counts: torch.Tensor


def read(folder: Path) -> dict:
    """Return the content of corpus.json.

    Raises:
        Problem: if the corpus is not prepared.
    """
    try:
        return json.loads((folder / "corpus.json").read_text("utf-8"))
    except FileNotFoundError:
        raise Problem(
            f"no {folder}/corpus.json; make it first: python -m examples.real_speech.prepare"
        ) from None


class Split:
    """One split, memory-mapped.

    Args:
        folder: folder of prepare.py.
        name: "train", "dev" or "test".
    """

    def __init__(self, folder: Path, name: str) -> None:
        corpus = read(folder)
        self.letters: str = corpus["letters"]
        self.texts = [u["text"] for u in corpus[name]]
        self.speakers = [u["speaker"] for u in corpus[name]]
        self._scale = 1 / np.array(corpus["deviation"], np.float32)
        self._features = np.load(folder / f"{name}.features.npy", mmap_mode="r")
        self._offsets = np.load(folder / f"{name}.offsets.npy")
        self._codes = {letter: i + 1 for i, letter in enumerate(self.letters)}

    def __len__(self) -> int:
        return len(self.texts)

    def frames(self, i: int) -> np.ndarray:
        """Return the features of an utterance, STACKED frames as one: float32 (frames, STACKED * BINS)."""
        return self.stacked(self._features[self._offsets[i] : self._offsets[i + 1]])

    def stacked(self, features: np.ndarray) -> np.ndarray:
        """Return features (frames, BINS), scaled to a deviation of 1, STACKED frames as one."""
        whole = features.astype(np.float32) * self._scale
        count = len(whole) // STACKED
        return whole[: count * STACKED].reshape(count, STACKED * BINS)

    def batch(self, chosen: list[int]) -> Batch:
        """Return utterances as a minibatch."""
        return self.collated([self.frames(i) for i in chosen], [self.texts[i] for i in chosen])

    def collated(self, sounds: list[np.ndarray], texts: list[str]) -> Batch:
        """Return frames and texts as a minibatch; letters that train does not have are left out."""
        frames = [torch.from_numpy(sound) for sound in sounds]
        codes = [[self._codes[c] for c in text if c in self._codes] for text in texts]
        return Batch(
            torch.nn.utils.rnn.pad_sequence(frames, batch_first=True),
            torch.tensor([len(f) for f in frames]),
            torch.tensor([code for text in codes for code in text], dtype=torch.long),
            torch.tensor([len(text) for text in codes]),
        )

    def lengths(self) -> np.ndarray:
        """Return the number of (stacked) frames of each utterance."""
        return np.diff(self._offsets) // STACKED


def part(split: Split, rank: int, size: int, by_speaker: bool, seed: int) -> list[int]:
    """Return the utterances of a learner: one of `size` equally large parts, without overlap.

    Args:
        split: the training data.
        rank: which part.
        size: number of parts.
        by_speaker: whether utterances are sorted by speaker, so that the parts differ.
        seed: of the order in which utterances are dealt.
    """
    order = np.random.default_rng(seed).permutation(len(split))
    if by_speaker:
        names = np.array(split.speakers)[order]
        order = order[np.argsort(names, kind="stable")]
        count = len(order) // size
        return order[rank * count : (rank + 1) * count].tolist()
    return order[rank : len(order) - len(order) % size : size].tolist()


def minibatches(
    mine: list[int], lengths: np.ndarray, batch: int, seed: int, epoch: int
) -> Iterator[list[int]]:
    """Yield minibatches of utterances of similar length; those left over are left out.

    They come in random order, in epoch 0 the shortest first: CTC finds the letters of short texts sooner.

    Source: SortaGrad of Amodei et al., arXiv:1512.02595.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(mine)
    if epoch == 0:
        order = order[np.argsort(lengths[order], kind="stable")]
        for i in range(0, len(order) - batch + 1, batch):
            yield order[i : i + batch].tolist()
        return
    groups = []
    for start in range(0, len(order), batch * _BUCKET):
        bucket = order[start : start + batch * _BUCKET]
        bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
        groups += [bucket[i : i + batch] for i in range(0, len(bucket) - batch + 1, batch)]
    for i in random.permutation(len(groups)):
        yield groups[i].tolist()
