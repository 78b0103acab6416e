"""Reads the prepared speech corpus: memory-mapped features, labels and text, and batches of segments.

FOLDER/settings.json           the task and its digest
FOLDER/states.json lexicon.json std.npy counts.npy
FOLDER/{train,dev,test}/       features.npy  float16 (frames, 40)
                               labels.npy    int16   (frames,)
                               offsets.npy   int64   (utterances + 1,)
                               means.npy     float32 (utterances, 40)
                               words.json    words and phones of each utterance, with bounds in frames
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from . import features
from .problem import Problem

SEGMENT = 21  # frames; segments do not overlap


def read_json(path: Path) -> object:
    """Return the content of a JSON file of the corpus.

    Raises:
        Problem: if the file is missing or damaged.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Problem(
            f"no {path}; make it first: python -m examples.acoustic_model.prepare_data"
        ) from None
    except ValueError as error:
        raise Problem(
            f"{path} is damaged ({error}); delete {path.parent} and prepare it again"
        ) from None


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array like numpy.save, but raise an OSError with errno on a full disk, which numpy omits."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


class Split:
    """One split of the corpus, memory-mapped; features are normalised, and get deltas, when they are read.

    Args:
        folder: folder of prepare_data.py.
        name: name of the split.
        context: frames to add on either side of a segment or utterance; beyond the ends of an utterance
            its first or last frame is repeated.
    """

    def __init__(self, folder: Path, name: str, context: int = 0) -> None:
        try:
            self._features = np.load(folder / name / "features.npy", mmap_mode="r")
            self._labels = np.load(folder / name / "labels.npy", mmap_mode="r")
            self.offsets = np.load(folder / name / "offsets.npy")
            self._means = np.load(folder / name / "means.npy")
            self._scale = 1.0 / np.load(folder / "std.npy")
        except FileNotFoundError as error:
            raise Problem(
                f"no {error.filename}; make it first: python -m examples.acoustic_model.prepare_data"
            ) from None
        self._folder, self._name = folder, name
        self._reach = features.REACH + context
        self._starts, self._owners = _segments(self.offsets)

    def __len__(self) -> int:
        """Number of whole segments."""
        return len(self._starts)

    def __getitem__(self, chosen: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the chosen segments: features float32 (n, 21 + 2 context, 120), labels int64 (n, 21)."""
        starts, owners = self._starts[chosen], self._owners[chosen]
        at = starts[:, None] + np.arange(-self._reach, SEGMENT + self._reach)
        at = at.clip(self.offsets[owners, None], self.offsets[owners + 1, None] - 1)
        logmel = self._features[at].astype(np.float32) - self._means[owners][:, None, :]
        labels = self._labels[starts[:, None] + np.arange(SEGMENT)].astype(np.int64)
        return features.with_deltas(logmel) * self._scale, labels

    @property
    def utterances(self) -> int:
        """Number of utterances of the split."""
        return len(self.offsets) - 1

    def utterance(self, index: int) -> np.ndarray:
        """Return the features of a whole utterance, float32 (frames + 2 context, 120)."""
        begin, end = self.offsets[index], self.offsets[index + 1]
        logmel = self._features[begin:end].astype(np.float32) - self._means[index]
        padded = np.pad(logmel, ((self._reach, self._reach), (0, 0)), mode="edge")
        return features.with_deltas(padded) * self._scale

    def texts(self) -> list[str]:
        """Return the text of each utterance."""
        spoken = read_json(self._folder / self._name / "words.json")
        return [" ".join(word for word, _, _ in words) for words in spoken["utterances"]]


def _segments(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first frame of every whole segment, and the index of its utterance."""
    counts = np.diff(offsets) // SEGMENT
    owners = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return offsets[owners] + within * SEGMENT, owners


def statistics(split_folder: Path, states: int) -> dict[str, np.ndarray]:
    """Return the standard deviation of each feature around its utterance's mean, and the frames per state.

    Features have zero mean, because every utterance's mean is subtracted.
    """
    logmel = np.load(split_folder / "features.npy", mmap_mode="r")
    offsets, means = np.load(split_folder / "offsets.npy"), np.load(split_folder / "means.npy")
    total, frames = np.zeros(features.WIDTH), 0
    for begin, end, mean in zip(offsets, offsets[1:], means, strict=False):
        centred = logmel[begin:end].astype(np.float32) - mean
        padded = np.pad(centred, ((features.REACH, features.REACH), (0, 0)), mode="edge")
        total += np.square(features.with_deltas(padded), dtype=np.float64).sum(0)
        frames += end - begin
    labels = np.load(split_folder / "labels.npy", mmap_mode="r")
    counts = np.bincount(labels[labels >= 0], minlength=states)
    return {"std": np.sqrt(total / frames).astype(np.float32), "counts": counts}
