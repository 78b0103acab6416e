"""Settings of the speech corpora: vocabulary, accents, noise and hours of the easy and the hard task."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

FORMAT = 1  # version of the corpus' files, to be raised when their meaning changes
RATE = 8000  # samples per second
SPLITS = ("train", "dev", "test")

DIGITS = "zero one two three four five six seven eight nine".split()
COMMANDS = "yes no up down left right on off stop go".split()
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
MONTHS = (
    "january february march april may june july august september october november december".split()
)
ACCENTS = tuple(
    "en-us en-gb-scotland en-gb-x-rp en-gb-x-gbclan en-gb-x-gbcwmd en-029 en-us-nyc".split()
)


@dataclass(frozen=True)
class Task:
    """All settings that the prepared corpus depends on.

    Attributes:
        words: the vocabulary; every word is equally likely, there is no language model.
        accents: espeak-ng accents; a speaker is an accent and a voice variant.
        words_low, words_high: least and largest number of words of an utterance.
        snr_low, snr_high: bounds of the signal-to-noise ratio in dB, which is uniform between them.
        reverb: share of utterances with reverberation.
        train_hours, dev_hours, test_hours: hours of speech of each split.
        state_frames: least number of training frames of a context-dependent state, else it backs off.
        seed: seed of all random numbers.
    """

    name: str
    words: tuple[str, ...]
    accents: tuple[str, ...]
    words_low: int = 3
    words_high: int = 8
    snr_low: float = 10.0
    snr_high: float = 30.0
    reverb: float = 0.5
    train_hours: float = 0.6
    dev_hours: float = 0.1
    test_hours: float = 0.15
    state_frames: int = 200
    seed: int = 0
    format: int = FORMAT

    def hours(self, split: str) -> float:
        """Return the hours of speech of a split."""
        return {"train": self.train_hours, "dev": self.dev_hours, "test": self.test_hours}[split]

    def digest(self) -> str:
        """Return a hash of all settings; a prepared corpus is reused only if its hash is equal."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


TASKS = {
    "easy": Task(name="easy", words=tuple(DIGITS + COMMANDS), accents=ACCENTS[:3]),
    "hard": Task(
        name="hard",
        words=tuple(DIGITS + LETTERS + COMMANDS + MONTHS),
        accents=ACCENTS,
        snr_low=0.0,
        snr_high=20.0,
        reverb=0.7,
        train_hours=1.0,
        dev_hours=0.2,
        test_hours=0.2,
        state_frames=300,
    ),
}
