"""Records one speaker in a process of its own: synthesises utterances, adds noise, computes features."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np

from . import features, room
from .lexicon import SpokenWord, words_of
from .problem import Problem, require
from .synth import Espeak
from .tasks import RATE, Task
from .voices import Speaker

BANK_S = 20  # seconds of babble noise
BANK_SPEAKERS = 8  # most speakers in the babble noise


@dataclass(frozen=True)
class Take:
    """One utterance: features, float16 (frames, 40), and its words with bounds in frames."""

    features: np.ndarray
    words: list[SpokenWord]


@dataclass(frozen=True)
class Job:
    """The arguments of a recording process: task, speaker, seconds of speech, babble noise."""

    task: Task
    speaker: Speaker
    seconds: float
    bank: np.ndarray | None = None


def in_fresh_processes(
    work: Callable[[Job], object], jobs: list[Job], processes: int
) -> Iterator[object]:
    """Yield the results of work(job) for all jobs, in order, each from a process of its own.

    Each job needs a fresh process, because espeak-ng's output depends on everything it has synthesised in its
    process. The processes are forked, because importing all modules again takes 0.9 s.
    """
    require("espeakng_loader", "espeakng-loader")
    require("kaldi_native_fbank", "kaldi-native-fbank")
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(jobs))[::-1]
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    done: dict[int, object] = {}
    try:
        for turn in range(len(jobs)):
            while turn not in done:
                while waiting and len(running) < processes:
                    number, job = waiting.pop()
                    result, told = context.Pipe(duplex=False)
                    process = context.Process(target=_tell, args=(told, work, job), daemon=True)
                    process.start()
                    told.close()  # else recv() would not see the end of a process that died
                    running[result] = number, process
                for result in wait(list(running)):
                    number, process = running.pop(result)
                    done[number] = _told(result)
                    process.join()
            yield done.pop(turn)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _tell(told: Connection, work: Callable[[Job], object], job: Job) -> None:
    try:
        told.send((work(job), None))
    except Exception as error:
        told.send((None, error))


def _told(result: Connection) -> object:
    with result:
        try:
            value, error = result.recv()
        except EOFError:
            raise Problem("a recording process ended before it was done") from None
    if error is not None:
        raise error
    return value


def bank_voice(job: Job) -> np.ndarray:
    """Return clean speech of one speaker, to be mixed into babble noise."""
    espeak = _engine(job.speaker)
    rng = np.random.default_rng([job.speaker.seed, 3])
    words = rng.choice(job.task.words, int(2 * job.seconds))
    spoken = espeak.say(" ".join(words))
    return room.to_telephone(spoken.samples, spoken.rate)


def record(job: Job) -> list[Take]:
    """Record utterances of one speaker until they last at least `job.seconds`."""
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
    """Add reverberation and noise by the task's settings, and scale to a random loudness without clipping."""
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
