"""Fetches recordings of people who speak Czech or Dutch, and makes features of them.

    python -m examples.real_speech.prepare                    Czech: 1.8 h, out/real_speech/cs
    python -m examples.real_speech.prepare --language nl      Dutch: 1.6 h
    python -m examples.real_speech.prepare --game FOLDER      files that are there already
    python -m examples.real_speech.prepare --kaldi train=data/train dev=data/dev test=data/test --out OUT
    python -m examples.real_speech.prepare --lhotse train=cuts_train.jsonl.gz dev=... test=... --out OUT

The recordings are the dialogues of the game Fish Fillets NG, in Debian's packages fillets-ng-data-cs and -nl;
their texts are in fillets-ng-data (GPL-2). They are fetched by apt-get, without root, into --packages.
Without apt, unpack these packages elsewhere, and give the folder with `sound` and `script` as --game.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np

from examples.acoustic_model.speech.problem import Problem, new_parser, require, run
from examples.real_speech import dialogs, importers
from examples.real_speech.utterances import BINS, Utterance, features

LANGUAGES = ("cs", "nl")
SPLITS = ("train", "dev", "test")
SHORTEST_S, LONGEST_S = 0.1, 16.0  # of an utterance
SHARES = {"test": 0.1, "dev": 0.08}  # of the duration, by scenes
GAME = Path("usr/share/games/fillets-ng")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--language", choices=LANGUAGES, default=LANGUAGES[0])
    add("--game", type=Path, help="folder with `sound` and `script` (default: fetched)")
    corpora = parser.add_mutually_exclusive_group()
    corpora.add_argument("--kaldi", nargs=3, metavar="SPLIT=DIR", help="data directories of Kaldi")
    corpora.add_argument("--lhotse", nargs=3, metavar="SPLIT=FILE", help="manifests of cuts")
    add("--packages", type=Path, default=Path("out/real_speech/packages"))
    add("--out", type=Path, help="folder (default: out/real_speech/LANGUAGE)")
    options = parser.parse_args(argv)
    if (options.kaldi or options.lhotse) and not options.out:
        raise Problem("--out is missing: give a folder for your corpus")
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
    said = {(line.scene, line.name): line for line in dialogs.lines(game / "script", language)}
    found = []
    for path in sorted((game / "sound").glob(f"**/{language}/*.ogg")):
        line = said.get((path.relative_to(game / "sound").parts[0], path.stem))
        if line:
            seconds = soundfile.info(path).duration
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

    Raises:
        Problem: if there are too few scenes.
    """
    scenes = sorted({u.scene for u in everything})
    order = np.random.default_rng(seed).permutation(len(scenes))
    total, rest = sum(u.seconds for u in everything), [scenes[i] for i in order]
    parts: dict[str, list[Utterance]] = {}
    taken: set[str] = set()
    for name, share in SHARES.items():
        chosen: set[str] = set()
        while sum(u.seconds for u in everything if u.scene in chosen) < share * total:
            if len(rest) == 1:
                raise Problem(
                    f"{len(scenes)} scenes are too few for three splits; give a whole game"
                )
            chosen.add(rest.pop())
        parts[name] = [u for u in everything if u.scene in chosen and u.text not in taken]
        taken |= {u.text for u in parts[name]}
    left = set(rest)
    parts["train"] = [u for u in everything if u.scene in left and u.text not in taken]
    return {name: parts[name] for name in SPLITS}


def imported(
    read: Callable[[Path], list[Utterance]], given: list[str]
) -> dict[str, list[Utterance]]:
    """Return the utterances of a corpus that is split already.

    Args:
        read: returns the utterances of a split.
        given: SPLIT=PATH for each split.

    Raises:
        Problem: if a split is missing.
    """
    paths = dict(item.partition("=")[::2] for item in given)
    if sorted(paths) != sorted(SPLITS) or not all(paths.values()):
        raise Problem(f"{' '.join(given)} is not train=PATH dev=PATH test=PATH")
    return {name: read(Path(paths[name])) for name in SPLITS}


# ---- the corpus ----------------------------------------------------------------------------------


def is_prepared(out: Path) -> bool:
    """Return whether the corpus is in `out`."""
    return (out / "corpus.json").exists()


def prepare(parts: dict[str, list[Utterance]], out: Path) -> None:
    """Write the utterances of all splits to `out`, but for those that are too short or too long.

    FOLDER/corpus.json          letters, standard deviations of the features, utterances by split
    FOLDER/SPLIT.features.npy   float16 (frames, 80), utterance after utterance
    FOLDER/SPLIT.offsets.npy    int64 (utterances + 1,)

    Raises:
        Problem: if nothing is left of a split, or a sound cannot be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    squares, kept = np.zeros(BINS), {}
    for name, given in parts.items():
        kept[name], made = usable(name, given)
        np.save(out / f"{name}.features.npy", np.concatenate(made))
        np.save(out / f"{name}.offsets.npy", np.cumsum([0, *map(len, made)]))
        if name == "train":
            squares = mean_squares(made)
    corpus = {
        "letters": "".join(sorted({c for u in kept["train"] for c in u.text})),
        "deviation": np.sqrt(squares).tolist(),
        **{name: [asdict(u) for u in chosen] for name, chosen in kept.items()},
    }
    part = out / "corpus.part"  # a corpus.json that is there is whole
    part.write_text(json.dumps(corpus, ensure_ascii=False), "utf-8")
    part.replace(out / "corpus.json")


def usable(name: str, given: list[Utterance]) -> tuple[list[Utterance], list[np.ndarray]]:
    """Return the utterances of a split that are neither too short nor too long, and their features.

    Raises:
        Problem: if none is left, or a sound cannot be read.
    """
    with ProcessPoolExecutor() as workers:
        pairs = list(zip(given, workers.map(features, given, chunksize=16), strict=True))
    fit = [(u, m) for u, m in pairs if SHORTEST_S <= len(m) / 100 <= LONGEST_S]
    if not fit:
        raise Problem(
            f"{name} has no utterance of {SHORTEST_S:g} to {LONGEST_S:g} s with a text; "
            f"it had {len(given)}"
        )
    minutes, left_out = sum(len(m) for _, m in fit) / 6000, len(given) - len(fit)
    out_of_range = f", {left_out} too short or too long" if left_out else ""
    print(f"{name}: {len(fit)} utterances, {minutes:.1f} min{out_of_range}", flush=True)
    return [u for u, _ in fit], [m for _, m in fit]


def mean_squares(made: list[np.ndarray]) -> np.ndarray:
    """Return the mean over all frames of the squared features, shape (BINS,), float64."""
    return sum((m.astype(np.float64) ** 2).sum(0) for m in made) / sum(map(len, made))


def game_of(language: str, game: Path | None, packages: Path) -> dict[str, list[Utterance]]:
    """Return the splits of the game's recordings, which are fetched unless `game` has them."""
    return split(utterances(game or fetched(language, packages), language))


def main() -> None:
    """Fetch or import, and prepare."""
    options = arguments()
    if is_prepared(options.out):
        print(f"{options.out} is prepared already")
    elif options.kaldi:
        prepare(imported(importers.from_kaldi, options.kaldi), options.out)
    elif options.lhotse:
        prepare(imported(importers.from_lhotse, options.lhotse), options.out)
    else:
        prepare(game_of(options.language, options.game, options.packages), options.out)
    corpus = json.loads((options.out / "corpus.json").read_text("utf-8"))
    speakers = Counter(u["speaker"] for u in corpus["train"])
    print("speakers:", ", ".join(f"{who} {count}" for who, count in speakers.most_common(6)), "...")


if __name__ == "__main__":
    run(main)
