"""Synthesises the speech corpus: espeak-ng voices in a noisy room, as log-mel features with labels.

    python -m examples.acoustic_model.prepare_data               easy: 20 words, SNR 10 to 30 dB, 0.85 h
    python -m examples.acoustic_model.prepare_data --task hard   58 words, SNR 0 to 20 dB, 1.4 h

The same options and seed give the same bytes. Finished splits are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from examples.acoustic_model.speech import corpus, lexicon
from examples.acoustic_model.speech import voices as who
from examples.acoustic_model.speech.problem import Problem, new_parser, require, run, within
from examples.acoustic_model.speech.tasks import SPLITS, TASKS, Task


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the script."""
    parser = new_parser(__doc__)
    parser.add_argument("--task", choices=sorted(TASKS), default="easy")
    parser.add_argument("--out", type=Path, help="folder (default: out/speech/TASK)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    parser.add_argument(
        "--jobs", type=int, default=usable_cores(), help="processes (default: usable cores)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all hours (default: 1)")
    parser.add_argument("--snr", type=float, nargs=2, metavar=("LOW", "HIGH"), help="SNR in dB")
    return parser.parse_args(argv)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def task_of(options: argparse.Namespace) -> Task:
    """Return the chosen task with the options applied.

    Raises:
        Problem: if an option is out of range.
    """
    within("--jobs", options.jobs, 1, 1024)
    within("--scale", options.scale, 0.001, 1000)
    within("--seed", options.seed, 0, 2**31 - 1)
    task = TASKS[options.task]
    low, high = options.snr or (task.snr_low, task.snr_high)
    within("--snr LOW", low, -20, high)
    within("--snr HIGH", high, low, 100)
    hours = {f"{s}_hours": task.hours(s) * options.scale for s in SPLITS}
    return dataclasses.replace(task, snr_low=low, snr_high=high, seed=options.seed, **hours)


def named(name: str, quick: bool, folder: Path | None = None) -> tuple[Path, str]:
    """Synthesise the corpus of a task, unless its folder has it already.

    Args:
        name: name of the task.
        quick: synthesise a twelfth of the corpus, as a test.
        folder: folder of the corpus; default: out/speech/NAME.

    Returns:
        the folder, and a text with the number of words and the SNR.
    """
    flags = ["--task", name, *(["--scale", "0.08"] if quick else [])]
    task = task_of(arguments(flags))
    folder = folder or Path("out/speech") / (name + "-quick" * quick)
    made = prepare(task, folder, usable_cores())
    what = f"{len(task.words)} words, SNR {task.snr_low:g} to {task.snr_high:g} dB"
    print(f"{folder}: {what}, {'made' if made else 'already there'}", flush=True)
    return folder, what


def prepare(task: Task, folder: Path, jobs: int, quiet: bool = False) -> bool:
    """Synthesise those splits of the corpus that `folder` does not have yet.

    Args:
        task: the task to synthesise.
        folder: folder of the corpus.
        jobs: number of processes.
        quiet: show no progress bars.

    Returns:
        False if the corpus was complete already.

    Raises:
        Problem: if a package is missing or the folder cannot be written.
    """
    if _is_done(folder, task):
        return False
    _make_writable(folder)
    cast = who.split_voices(who.installed(), task.seed)
    for split in SPLITS:
        if not _is_done(folder / split, task):
            _make_split(task, folder, split, cast[split], jobs, quiet)
    _label(task, folder)
    _finish(folder, task)
    return True


def _is_done(folder: Path, task: Task) -> bool:
    try:
        return json.loads((folder / "settings.json").read_text())["digest"] == task.digest()
    except (OSError, ValueError, KeyError, TypeError):
        return False  # settings.json is missing or incomplete, so the folder is not finished


def _finish(folder: Path, task: Task) -> None:
    """Write settings.json, which marks the folder as complete; it is written last."""
    settings = {"digest": task.digest(), "task": dataclasses.asdict(task)}
    part = folder / "settings.json.part"
    part.write_text(json.dumps(settings, indent=1))
    part.replace(folder / "settings.json")


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        raise Problem(f"--out {folder} is a file; name a folder") from None
    except OSError as error:
        raise Problem(
            f"cannot write to {folder} ({error.strerror}); name another with --out"
        ) from None


def _make_split(
    task: Task, folder: Path, split: str, voices: list[who.Voice], jobs: int, quiet: bool
) -> None:
    require("scipy", "scipy")
    from examples.acoustic_model.speech import (
        recording,  # imported here: it imports scipy, which takes half a second
    )

    tqdm = require("tqdm", "tqdm").tqdm
    part = folder / f"{split}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    cast = who.speakers(task, split, voices)
    bank = _babble_bank(task, cast, jobs)
    seconds = task.hours(split) * 3600 / len(cast)
    work = [recording.Job(task, speaker, seconds, bank) for speaker in cast]
    recorded = recording.in_fresh_processes(recording.record, work, jobs)
    bar = tqdm(recorded, total=len(work), desc=f"{split} speakers", disable=quiet, mininterval=1)
    _write(part, bar, cast)
    _finish(part, task)
    shutil.rmtree(folder / split, ignore_errors=True)
    part.rename(folder / split)


def _babble_bank(task: Task, cast: list[who.Speaker], jobs: int) -> np.ndarray:
    """Return babble noise of the split's own speakers, so that no voice occurs in two splits."""
    from examples.acoustic_model.speech import recording, room

    few = cast[:: max(1, len(cast) // recording.BANK_SPEAKERS)][: recording.BANK_SPEAKERS]
    work = [recording.Job(task, speaker, recording.BANK_S) for speaker in few]
    voices = list(recording.in_fresh_processes(recording.bank_voice, work, jobs))
    return room.mix_babble(voices, recording.BANK_S * 8000)


def _write(folder: Path, recorded, cast: list[who.Speaker]) -> None:
    frames, utterances, speakers = [], [], []
    for speaker, takes in zip(cast, recorded, strict=True):
        frames += [take.features for take in takes]
        utterances += [take.words for take in takes]
        speakers += [f"{speaker.accent}+{speaker.voice.name}"] * len(takes)
    lengths = [len(f) for f in frames]
    corpus.write_array(folder / "features.npy", np.concatenate(frames))
    corpus.write_array(folder / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    corpus.write_array(
        folder / "means.npy", np.stack([f.astype(np.float32).mean(0) for f in frames])
    )
    spoken = [[(w.word, w.phones, w.bounds) for w in words] for words in utterances]
    text = json.dumps({"speakers": speakers, "utterances": spoken}, separators=(",", ":"))
    (folder / "words.json").write_text(text)


def _label(task: Task, folder: Path) -> None:
    """Learn states and lexicon from the training split; write these, the labels of all splits, statistics."""
    said = _said(folder / "train")
    states = lexicon.States.learn(said, task.state_frames)
    found = lexicon.pronunciations(said)
    chains = {word: [states.chain(p) for p in prons] for word, prons in found.items()}
    (folder / "states.json").write_text(json.dumps(states.names))
    (folder / "lexicon.json").write_text(json.dumps({"phones": found, "states": chains}))
    for split in SPLITS:
        lengths = np.diff(np.load(folder / split / "offsets.npy"))
        said = _said(folder / split)
        labels = [states.label(words, n) for words, n in zip(said, lengths, strict=True)]
        corpus.write_array(folder / split / "labels.npy", np.concatenate(labels))
    stats = corpus.statistics(folder / "train", len(states))
    corpus.write_array(folder / "counts.npy", stats["counts"])
    corpus.write_array(folder / "std.npy", stats["std"])


def _said(folder: Path) -> list[list[lexicon.SpokenWord]]:
    spoken = corpus.read_json(folder / "words.json")["utterances"]
    return [[lexicon.SpokenWord(w, tuple(p), tuple(b)) for w, p, b in words] for words in spoken]


def main() -> None:
    """Prepare the corpus, and print its size."""
    options = arguments()
    task = task_of(options)
    folder = options.out or Path("out/speech") / task.name
    made = prepare(task, folder, options.jobs)
    states = len(corpus.read_json(folder / "states.json"))
    hours = sum(task.hours(split) for split in SPLITS)
    print(
        f"{folder}: {'made' if made else 'already there'}: {hours:.2f} h, {len(task.words)} words, "
        f"{states} states, SNR {task.snr_low:g} to {task.snr_high:g} dB"
    )


if __name__ == "__main__":
    run(main)
