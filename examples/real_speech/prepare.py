"""Fetches recordings of people who speak Dutch or Czech, and makes features of them.

    python -m examples.real_speech.prepare                    Dutch: 1.6 h, out/real_speech/nl
    python -m examples.real_speech.prepare --language cs      Czech: 1.8 h
    python -m examples.real_speech.prepare --game FOLDER      files that are there already

The recordings are the dialogues of the game Fish Fillets NG, in Debian's packages fillets-ng-data-nl and -cs;
their texts are in fillets-ng-data (GPL-2). They are fetched by apt-get, without root, into --packages.
Without apt, unpack these packages elsewhere, and give the folder with `sound` and `script` as --game.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from examples.acoustic_model.speech.problem import Problem, new_parser, require, run
from examples.real_speech import dialogs

LANGUAGES = ("nl", "cs")
BINS, STACKED = 80, 3  # log-mel energies of a frame; frames that the model sees as one, 30 ms
HIGH_HZ = 8000.0
LONGEST_S = 16.0
SHARES = {"test": 0.1, "dev": 0.08}  # of the duration, by scenes
GAME = Path("usr/share/games/fillets-ng")


@dataclass(frozen=True)
class Utterance:
    """A recording with its text.

    Attributes:
        name: name of the recording.
        scene: scene of the game; a scene is in one split only.
        speaker: who says it.
        text: normalised text.
        sound: the file.
        seconds: duration.
    """

    name: str
    scene: str
    speaker: str
    text: str
    sound: str
    seconds: float


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--language", choices=LANGUAGES, default="nl")
    add("--game", type=Path, help="folder with `sound` and `script` (default: fetched)")
    add("--packages", type=Path, default=Path("out/real_speech/packages"))
    add("--out", type=Path, help="folder (default: out/real_speech/LANGUAGE)")
    options = parser.parse_args(argv)
    options.out = options.out or Path("out/real_speech") / options.language
    return options


# ---- recordings ---------------------------------------------------------------------------------


def fetched(language: str, folder: Path) -> Path:
    """Fetch and unpack the packages of a language, unless they are there; return the game's folder.

    Raises:
        Problem: if there is no apt, or it does not find the packages.
    """
    game = folder / GAME
    for package in ("fillets-ng-data", f"fillets-ng-data-{language}"):
        mark = folder / f"{package}.unpacked"
        if mark.exists():
            continue
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            raise Problem(
                f"no apt-get and dpkg here to fetch {package}. Unpack Debian's packages fillets-ng-data and "
                f"fillets-ng-data-{language} elsewhere, and give --game FOLDER with `sound` and `script`"
            )
        folder.mkdir(parents=True, exist_ok=True)
        print(f"fetching {package}", flush=True)
        _call(["apt-get", "download", package], folder)
        file = max(folder.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime)
        _call(["dpkg", "-x", file.name, "."], folder)
        file.unlink()
        mark.touch()
    return game


def _call(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing was said"]
        raise Problem(
            f"{' '.join(command)} ended with status {done.returncode}: {said[-1]}. Is the package in the "
            "sources of apt (Debian's or Ubuntu's main archive or universe)? Else give --game FOLDER"
        )


def utterances(game: Path, language: str) -> list[Utterance]:
    """Return all recordings that have a text, in a fixed order.

    Raises:
        Problem: if there are none.
    """
    soundfile = require("soundfile", "soundfile")
    said = {line.name: line for line in dialogs.lines(game / "script", language)}
    found = []
    for path in sorted((game / "sound").glob(f"**/{language}/*.ogg")):
        line = said.get(path.stem)
        seconds = soundfile.info(path).duration if line else 0.0
        if line and 0.2 < seconds <= LONGEST_S:
            scene = str(path.parent.parent.relative_to(game / "sound"))
            found.append(Utterance(line.name, scene, line.speaker, line.text, str(path), seconds))
    if not found:
        raise Problem(
            f"{game} has no recordings of language {language} with a text; --game must be the folder with "
            f"`sound/*/{language}` and `script`"
        )
    return found


def split(everything: list[Utterance], seed: int = 0) -> dict[str, list[Utterance]]:
    """Return the utterances of train, dev and test: each scene, and each text, is in one of them only.

    Scenes are drawn until a split has its share of the duration. Utterances of train whose text is also in
    dev or test are left out, and those of dev whose text is in test.
    """
    scenes = sorted({u.scene for u in everything})
    order = np.random.default_rng(seed).permutation(len(scenes))
    total, rest = sum(u.seconds for u in everything), [scenes[i] for i in order]
    parts: dict[str, list[Utterance]] = {}
    taken: set[str] = set()
    for name, share in SHARES.items():
        chosen: set[str] = set()
        while sum(u.seconds for u in everything if u.scene in chosen) < share * total:
            chosen.add(rest.pop())
        parts[name] = [u for u in everything if u.scene in chosen and u.text not in taken]
        taken |= {u.text for u in parts[name]}
    left = set(rest)
    parts["train"] = [u for u in everything if u.scene in left and u.text not in taken]
    return {name: parts[name] for name in ("train", "dev", "test")}


# ---- features -----------------------------------------------------------------------------------


def logmel(path: str) -> np.ndarray:
    """Return 80 log-mel energies per 10 ms, without their mean over the utterance: float16 (frames, 80)."""
    soundfile, fbank = (
        require("soundfile", "soundfile"),
        require("kaldi_native_fbank", "kaldi-native-fbank"),
    )
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    options = fbank.FbankOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.dither = 0.0  # dither is random, but features must be reproducible
    options.mel_opts.num_bins = BINS
    options.mel_opts.high_freq = HIGH_HZ
    online = fbank.OnlineFbank(options)
    online.accept_waveform(rate, (samples.mean(1) * 32768.0).tolist())
    online.input_finished()
    frames = np.stack([online.get_frame(t) for t in range(online.num_frames_ready)])
    return (frames - frames.mean(0)).astype(np.float16)


def prepare(game: Path, language: str, out: Path) -> bool:
    """Write the corpus to `out`, unless it is there; return whether it was written.

    FOLDER/corpus.json          letters, standard deviations of the features, utterances by split
    FOLDER/SPLIT.features.npy   float16 (frames, 80), utterance after utterance
    FOLDER/SPLIT.offsets.npy    int64 (utterances + 1,)
    """
    if (out / "corpus.json").exists():
        return False
    parts = split(utterances(game, language))
    out.mkdir(parents=True, exist_ok=True)
    squares, frames = np.zeros(BINS), 0
    for name, chosen in parts.items():
        with ProcessPoolExecutor() as workers:
            made = list(workers.map(logmel, [u.sound for u in chosen], chunksize=16))
        np.save(out / f"{name}.features.npy", np.concatenate(made))
        np.save(out / f"{name}.offsets.npy", np.cumsum([0, *map(len, made)]))
        if name == "train":
            squares = sum((m.astype(np.float64) ** 2).sum(0) for m in made)
            frames = sum(map(len, made))
        minutes = sum(u.seconds for u in chosen) / 60
        print(f"{name}: {len(chosen)} utterances, {minutes:.1f} min", flush=True)
    letters = sorted({c for u in parts["train"] for c in u.text})
    corpus = {
        "language": language,
        "letters": "".join(letters),
        "deviation": np.sqrt(squares / frames).tolist(),
        **{name: [asdict(u) for u in chosen] for name, chosen in parts.items()},
    }
    part = out / "corpus.part"
    part.write_text(json.dumps(corpus, ensure_ascii=False), "utf-8")
    part.replace(out / "corpus.json")
    return True


def main() -> None:
    """Fetch, unless --game is given, and prepare."""
    options = arguments()
    game = options.game or fetched(options.language, options.packages)
    if not prepare(game, options.language, options.out):
        print(f"{options.out} is prepared already")
    corpus = json.loads((options.out / "corpus.json").read_text("utf-8"))
    speakers = Counter(u["speaker"] for u in corpus["train"])
    print("speakers:", ", ".join(f"{who} {count}" for who, count in speakers.most_common(6)), "...")


if __name__ == "__main__":
    run(main)
