"""One speaker's utterances: synthesised, disturbed, turned into features. Runs in its own process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from . import features, room
from .lexicon import SpokenWord, words_of
from .problem import require
from .synth import Espeak
from .tasks import RATE, Task
from .voices import Speaker

BANK_S = 20  # length of the babble bank
BANK_SPEAKERS = 8


@dataclass(frozen=True)
class Take:
    """One utterance: features float16 (frames, 40) and what was said where (bounds in frames)."""

    features: np.ndarray
    words: list[SpokenWord]


@dataclass(frozen=True)
class Job:
    """What a recording process is told."""

    task: Task
    speaker: Speaker
    seconds: float
    bank: np.ndarray | None = None


def in_fresh_processes(
    work: Callable[[Job], object], jobs: list[Job], processes: int
) -> Iterator[object]:
    """Results of `work` on all jobs, in order; every job in a process that has spoken nothing yet.

    The processes are forked, so that they do not import everything anew (0.9 s each).
    """
    require("espeakng_loader", "espeakng-loader")
    require("kaldi_native_fbank", "kaldi-native-fbank")
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap(work, jobs, chunksize=1)


def bank_voice(job: Job) -> np.ndarray:
    """Clean speech of one speaker for the babble bank."""
    espeak = _engine(job.speaker)
    rng = np.random.default_rng([job.speaker.seed, 3])
    words = rng.choice(job.task.words, int(2 * job.seconds))
    spoken = espeak.say(" ".join(words))
    return room.to_telephone(spoken.samples, spoken.rate)


def record(job: Job) -> list[Take]:
    """Utterances of one speaker until `job.seconds` are filled."""
    espeak = _engine(job.speaker)
    rng = np.random.default_rng([job.speaker.seed, 4])
    takes: list[Take] = []
    left = job.seconds
    while left > 0:
        take = _take(espeak, job, rng)
        if take is None:
            continue
        takes.append(take)
        left -= len(take.features) * features.SHIFT_S
    return takes


def _engine(speaker: Speaker) -> Espeak:
    espeak = Espeak(speaker.seed)
    espeak.voice(
        speaker.accent, speaker.voice.name, speaker.rate, speaker.pitch, speaker.pitch_range
    )
    return espeak


def _take(espeak: Espeak, job: Job, rng: np.random.Generator) -> Take | None:
    task = job.task
    text = list(rng.choice(task.words, int(rng.integers(task.words_low, task.words_high + 1))))
    spoken = espeak.say(" ".join(text))
    words = words_of(text, spoken.phones, len(spoken.samples))
    if words is None:
        return None
    before, after = rng.uniform(0.1, 0.3, 2)
    clean = room.to_telephone(spoken.samples, spoken.rate)
    clean = np.pad(clean, (int(before * RATE), int(after * RATE)))
    frames = features.logmel(_disturb(clean, job, rng))
    timed = [
        SpokenWord(str(word), phones, _frames(onsets, spoken.rate, before, len(frames)))
        for word, phones, onsets in words
    ]
    return Take(frames, timed)


def _frames(onsets: tuple[int, ...], rate: int, before: float, frames: int) -> tuple[int, ...]:
    at = features.frame_of(np.array(onsets) / rate + before).clip(max=frames)
    return tuple(int(frame) for frame in at)


def _disturb(clean: np.ndarray, job: Job, rng: np.random.Generator) -> np.ndarray:
    """Reverberation and noise as the task has it, then a random loudness without clipping."""
    task = job.task
    wet = room.reverberate(clean, rng) if rng.random() < task.reverb else clean
    kind = int(rng.integers(3))
    if kind == 0:
        noise = room.white(len(wet), rng)
    elif kind == 1:
        noise = room.pink(len(wet), rng)
    else:
        noise = room.babble(len(wet), rng, job.bank)
    noisy = room.add_noise(wet, noise, rng.uniform(task.snr_low, task.snr_high))
    return noisy * np.float32(10 ** (rng.uniform(-20, -3) / 20) / np.abs(noisy).max())
