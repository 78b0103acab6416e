"""Corpora that are there already: Kaldi's data directories, and manifests of Lhotse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech.problem import Problem, require
from examples.real_speech.dialogs import normalised
from examples.real_speech.utterances import Utterance


def from_kaldi(folder: Path) -> list[Utterance]:
    """Return the utterances of a data directory of Kaldi that have a text.

    Read are wav.scp, text, and, if they are there, segments, utt2spk and feats.scp. Features are taken from
    feats.scp; without it they are computed from the sound. Paths are as Kaldi takes them: relative to the
    folder in which the program runs.

    Raises:
        Problem: if a file is missing or damaged, or an entry of wav.scp is a command.
    """
    texts = dict(_table(folder / "text"))
    speakers = dict(_table(folder / "utt2spk")) if (folder / "utt2spk").exists() else {}
    features = dict(_table(folder / "feats.scp")) if (folder / "feats.scp").exists() else {}
    sounds = dict(_table(folder / "wav.scp")) if (folder / "wav.scp").exists() else {}
    segments = _segments(folder / "segments") if (folder / "segments").exists() else {}
    found = []
    for name, text in texts.items():
        recording, start, end = segments.get(name, (name, 0.0, 0.0))
        sound, read = sounds.get(recording, ""), features.get(name, "")
        if sound.endswith("|"):
            raise Problem(
                f"{folder}/wav.scp: {recording} is a command ({sound[:40]}...), and commands are not run. "
                "Convert the recordings to files first, or give feats.scp"
            )
        if not sound and not read:
            raise Problem(
                f"{folder}: {name} of text has neither a recording in wav.scp ({recording}) nor features in "
                "feats.scp; utils/fix_data_dir.sh of Kaldi removes such utterances"
            )
        if spoken := normalised(text):
            seconds = end - start if end else 0.0
            speaker = speakers.get(name, name)
            found.append(Utterance(name, recording, speaker, spoken, sound, seconds, start, read))
    return found


def _table(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the key and the rest of each line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise Problem(
            f"no {path}; a data directory of Kaldi has text, and wav.scp or feats.scp"
        ) from None
    except UnicodeDecodeError as error:
        raise Problem(f"{path} is not UTF-8 ({error}); convert it") from None
    for line in filter(str.strip, lines):
        key, *rest = line.split(maxsplit=1)
        yield key, rest[0].strip() if rest else ""


def _segments(path: Path) -> dict[str, tuple[str, float, float]]:
    """Return recording, start and end in s of each utterance."""
    found = {}
    for name, rest in _table(path):
        try:
            recording, start, end = rest.split()
            found[name] = recording, float(start), float(end)
            if not 0 <= found[name][1] < found[name][2]:
                raise ValueError
        except ValueError:
            raise Problem(
                f"{path}: {name} {rest!r} is not RECORDING START END in seconds; repair the line"
            ) from None
    return found


def from_lhotse(path: Path) -> list[Utterance]:
    """Return the utterances of a manifest of cuts: a supervision with a text is an utterance.

    Raises:
        Problem: if the file is no such manifest, or a recording is not a file.
    """
    return list(utterances_of(cuts(path)))


def cuts(path: Path) -> Any:
    """Return the CutSet of a manifest.

    Raises:
        Problem: if the file is missing or no manifest of cuts.
    """
    lhotse = require("lhotse", "lhotse")
    try:
        found = lhotse.CutSet.from_file(path)
        for cut in found:  # all of them, since lines are read as they are needed
            _ = cut.supervisions
        return found
    except Exception as error:  # lhotse raises ValueError, AssertionError, OSError, ...
        raise Problem(
            f"{path} is no manifest of cuts ({type(error).__name__}: {error}); make one with lhotse, such as "
            "lhotse cut simple -r recordings.jsonl.gz -s supervisions.jsonl.gz cuts.jsonl.gz"
        ) from error


def utterances_of(found: Any) -> Iterator[Utterance]:
    """Yield the utterances of a CutSet."""
    for cut in found.trim_to_supervisions(keep_overlapping=False):
        (one,) = cut.supervisions
        if not (spoken := normalised(one.text or "")):
            continue
        source = cut.recording.sources[0] if cut.has_recording else None
        if source is None or source.type != "file" or cut.recording.transforms:
            raise Problem(
                f"cut {cut.id}: its recording is no file, or changed by lhotse (speed, volume, ...); only "
                "files are read, as they are. Save the audio with lhotse's CutSet.save_audios"
            )
        if cut.recording.num_channels > 1:
            raise Problem(
                f"cut {cut.id}: its recording has {cut.recording.num_channels} channels, allowed is 1; save "
                "the channel of each supervision as a file"
            )
        yield Utterance(
            one.id,
            cut.recording.id,
            one.speaker or one.id,
            spoken,
            source.source,
            cut.duration,
            cut.start,
        )
