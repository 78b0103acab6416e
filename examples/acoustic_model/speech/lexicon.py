"""Phones, pronunciations and context-dependent states, learned from the training utterances.

A word's pronunciation is the phones that espeak-ng reported. A state is one third of a phone in its context
inside the word, `left|phone|right.third`; rare states back off to `left|phone.third`, then `phone.third`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

SILENCE = "_"
EDGE = "#"  # context at the beginning and end of a word
UNKNOWN = -1  # label of a frame whose state does not occur in the training split
THIRDS = 3


@dataclass(frozen=True)
class SpokenWord:
    """A spoken word: its phones, and the frames in which they begin; the last of `bounds` is its end."""

    word: str
    phones: tuple[str, ...]
    bounds: tuple[int, ...]


def words_of(
    text: list[str], phones: list[tuple[int, str]], end: int
) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]] | None:
    """Cut an utterance's phones into words, at espeak's pauses.

    Args:
        text: the words of the utterance.
        phones: (onset sample, phoneme); pauses begin with `_`.
        end: number of samples.

    Returns:
        (word, phones, onset samples and end) per word; None if the number of words between pauses is not
        len(text), because espeak made no pause between two words.
    """
    groups: list[tuple[list[str], list[int]]] = []
    names, onsets = [], []
    for onset, name in [*phones, (end, SILENCE)]:
        if not name.startswith(SILENCE):
            names.append(name.lstrip("',%="))
            onsets.append(onset)
        elif names:
            groups.append((names, [*onsets, onset]))
            names, onsets = [], []
    if len(groups) != len(text):
        return None
    return [(w, tuple(n), tuple(o)) for w, (n, o) in zip(text, groups, strict=True)]


def contexts(phones: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Return the names of each phone from the most to the least specific: triphone, biphone, monophone."""
    padded = (EDGE, *phones, EDGE)
    return [
        (f"{left}|{phone}|{right}", f"{left}|{phone}", phone)
        for left, phone, right in zip(padded, phones, padded[2:], strict=False)
    ]


def spans(word: SpokenWord) -> list[tuple[int, int, int, int]]:
    """Return (phone's position, third, first frame, end frame) of every state; thirds are equally long."""
    found = []
    for at in range(len(word.phones)):
        cut = np.linspace(word.bounds[at], word.bounds[at + 1], THIRDS + 1).round().astype(int)
        found += [(at, third, int(cut[third]), int(cut[third + 1])) for third in range(THIRDS)]
    return found


class States:
    """The set of states, with their indices: 0 is silence, the others are sorted by name."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._index = {name: at for at, name in enumerate(names)}

    @classmethod
    def learn(cls, utterances: list[list[SpokenWord]], least: int) -> States:
        """Return the states with at least `least` frames in `utterances`, and all monophone states."""
        frames: Counter[str] = Counter()
        for word in (word for words in utterances for word in words):
            names = contexts(word.phones)
            for at, third, begin, end in spans(word):
                for name in names[at]:
                    frames[f"{name}.{third}"] += end - begin
        # A name with "|" has a context: espeak's notation separates phones by "|", so no phone has one.
        kept = [name for name, n in frames.items() if n >= least or "|" not in name]
        return cls([SILENCE, *sorted(kept)])

    def __len__(self) -> int:
        return len(self.names)

    def find(self, names: tuple[str, str, str], third: int) -> int:
        """Return the most specific state that exists; UNKNOWN if not even the monophone state exists."""
        known = (self._index.get(f"{name}.{third}", UNKNOWN) for name in names)
        return next((at for at in known if at != UNKNOWN), UNKNOWN)

    def chain(self, phones: tuple[str, ...]) -> list[int]:
        """Return the states of a pronunciation, in order."""
        return [self.find(names, third) for names in contexts(phones) for third in range(THIRDS)]

    def label(self, words: list[SpokenWord], frames: int) -> np.ndarray:
        """Return the state of every frame of an utterance, int16, shape (frames,)."""
        labels = np.zeros(frames, np.int16)
        for word in words:
            chain = self.chain(word.phones)
            for at, third, begin, end in spans(word):
                labels[begin:end] = chain[at * THIRDS + third]
        return labels


def pronunciations(
    utterances: list[list[SpokenWord]], share: float = 0.02
) -> dict[str, list[tuple[str, ...]]]:
    """Return each word's pronunciations that make up at least `share` of its occurrences, sorted."""
    counts: dict[str, Counter[tuple[str, ...]]] = {}
    for word in (word for words in utterances for word in words):
        counts.setdefault(word.word, Counter())[word.phones] += 1
    return {
        word: sorted(p for p, n in found.items() if n >= share * found.total())
        for word, found in sorted(counts.items())
    }
