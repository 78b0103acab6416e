"""Speakers of the corpus: espeak-ng's voice variants, grouped in families, split without overlap.

Numbered variants (Gene, Gene2; steph, steph2, ...) are takes of one voice and form a family. A family is in
one split only, and every split has women's and men's voices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .problem import Problem, require
from .tasks import SPLITS, Task

# Variants that do not sound like a person: robots, whispers, effects.
_EFFECTS = re.compile(r"robo|whisper|demonic|croak|storm|tweaky|fast|announcer|serious", re.I)
_HELD_OUT = 8  # families in dev, and in test
_WOMEN = 3  # how many of these are women's
_LEAST_S = 10.0  # seconds of speech that each speaker should have at least
_LARGE = 3  # families with more variants go to train, because they would be half of dev or test


@dataclass(frozen=True)
class Voice:
    """A voice variant; its family is its name without the trailing digits."""

    name: str
    female: bool

    @property
    def family(self) -> str:
        """Name shared by all takes of the voice."""
        return self.name.rstrip("0123456789").lower()


@dataclass(frozen=True)
class Speaker:
    """A voice with an accent, speed (words per minute) and pitch of its own."""

    voice: Voice
    accent: str
    rate: int
    pitch: int
    pitch_range: int
    seed: int


def installed() -> list[Voice]:
    """Return all variants of the installed espeak-ng that sound like a person, sorted by name."""
    loader = require("espeakng_loader", "espeakng-loader")
    folder = Path(loader.get_data_path()) / "voices" / "!v"
    files = sorted(path for path in folder.iterdir() if not _EFFECTS.search(path.name))
    return [Voice(path.name, "gender female" in path.read_text("utf-8")) for path in files]


def split_voices(voices: list[Voice], seed: int) -> dict[str, list[Voice]]:
    """Assign families of voices to train, dev and test at random.

    Args:
        voices: all variants.
        seed: seed of the random assignment.

    Returns:
        The voices of each split; no family is in two splits, and each split has both genders.

    Raises:
        Problem: if there are too few families for both genders in all splits.
    """
    families: dict[str, list[Voice]] = {}
    for voice in voices:
        families.setdefault(voice.family, []).append(voice)
    women = sorted(name for name, members in families.items() if members[0].female)
    men = sorted(name for name, members in families.items() if not members[0].female)
    rng = np.random.default_rng([seed, 1])
    deal = _deal(women, _WOMEN, families, rng)
    for split, names in _deal(men, _HELD_OUT - _WOMEN, families, rng).items():
        deal[split] += names
    return {split: [v for name in sorted(deal[split]) for v in families[name]] for split in SPLITS}


def _deal(
    names: list[str], held_out: int, families: dict[str, list[Voice]], rng: np.random.Generator
) -> dict[str, list[str]]:
    small = [name for name in names if len(families[name]) <= _LARGE]
    if len(small) <= 2 * held_out:
        raise Problem(
            f"espeak-ng brings {len(small)} small families of one gender, more than "
            f"{2 * held_out} are needed for dev and test; install espeakng-loader==0.2.4"
        )
    order = [small[i] for i in rng.permutation(len(small))]
    dev, test = order[:held_out], order[held_out : 2 * held_out]
    return {"dev": dev, "test": test, "train": [n for n in names if n not in dev + test]}


def speakers(task: Task, split: str, voices: list[Voice]) -> list[Speaker]:
    """Return two speakers per voice of a split, with different accents (one if the task has one accent).

    If the split has less than 10 s of speech for each, evenly spaced ones are returned.
    """
    rng = np.random.default_rng([task.seed, 2, SPLITS.index(split)])
    chosen = []
    for voice in voices:
        count = min(2, len(task.accents))
        for accent in rng.choice(len(task.accents), count, replace=False):
            chosen.append(
                Speaker(
                    voice=voice,
                    accent=task.accents[accent],
                    rate=int(rng.integers(130, 190)),
                    pitch=int(rng.integers(35, 66)),
                    pitch_range=int(rng.integers(30, 71)),
                    seed=int(rng.integers(1, 2**31)),
                )
            )
    room_for = max(1, int(task.hours(split) * 3600 / _LEAST_S))
    return chosen[:: -(-len(chosen) // room_for)]
