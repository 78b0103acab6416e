"""Decodes the test split: the best path, and the best path under n-grams of the training texts.

    python -m examples.real_speech.decode out/real_speech/runs/random-pairs/model.pt

The weight of the n-grams and the gain of each letter are chosen on dev, by letter errors. Written beside the
model, or to --out: decoded.json with word and letter errors by utterance.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.acoustic_model.speech import journal, scoring
from examples.acoustic_model.speech.problem import Problem, new_parser, require, run, within
from examples.real_speech import ngram
from examples.real_speech.corpus import Split
from examples.real_speech.model import Recogniser, Shape, greedy
from examples.real_speech.scoring import letter_errors

WEIGHTS, BONUSES = (0.25, 0.5, 0.75, 1.0), (0.0, 0.5, 1.0)
BEAM, MOST_ACTIVE = 12.0, 2000
_FLOOR = -30.0  # of log-probabilities: the decoder adds costs up


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("model", type=Path, help="model.pt, written by train.py")
    add("--data", type=Path, default=Path("out/real_speech/cs"), help="folder of prepare.py")
    add("--out", type=Path, help="file (default: decoded.json beside the model)")
    add("--order", type=int, default=5, help="letters of the longest n-gram (default: 5)")
    options = parser.parse_args(argv)
    within("--order", options.order, 1, 12)
    options.out = options.out or options.model.with_name("decoded.json")
    return options


@torch.no_grad()
def scored(model: Recogniser, split: Split) -> list[np.ndarray]:
    """Return the log-probabilities of each utterance, float32 (frames, letters + 1)."""
    model.eval()
    found = []
    for start in range(0, len(split), 16):
        batch = split.batch(list(range(start, min(start + 16, len(split)))))
        scores = model(batch.frames, batch.lengths)
        found += [s[:n].numpy() for s, n in zip(scores, batch.lengths.tolist(), strict=True)]
    return found


class Decoder:
    """The search for the best path in a decoding graph, by kaldi-decoder.

    Args:
        graph: outputs of CTC to letters; see ngram.graph.
        letters: all letters.
    """

    def __init__(self, graph: Any, letters: str) -> None:
        self._kaldi = require("kaldi_decoder", "kaldi-decoder")
        self._fst = require("kaldifst", "kaldifst")
        options = self._kaldi.FasterDecoderOptions(beam=BEAM, max_active=MOST_ACTIVE)
        self._graph, self._letters = graph, letters  # the decoder does not keep the graph alive
        self._decoder = self._kaldi.FasterDecoder(graph, options)

    def text(self, scores: np.ndarray) -> str:
        """Return the text of the best path; "" if no path ends."""
        self._decoder.decode(self._kaldi.DecodableCtc(np.maximum(scores, _FLOOR)))
        found, path = self._decoder.get_best_path()
        if not found:
            return ""
        _, _, codes, _ = self._fst.get_linear_symbol_sequence(path)
        return " ".join("".join(self._letters[code - 1] for code in codes).split())


def tuned(
    letters: ngram.LetterModel, scores: list[np.ndarray], split: Split
) -> tuple[float, float]:
    """Return the weight and the bonus with the fewest letter errors."""

    def errors(setting: tuple[float, float]) -> int:
        decoder = Decoder(ngram.graph(letters, *setting), split.letters)
        wrong, _ = letter_errors(split.texts, [decoder.text(one) for one in scores])
        return int(wrong.sum())

    return min(itertools.product(WEIGHTS, BONUSES), key=errors)


def counted(said: list[str], heard: list[str]) -> dict[str, Any]:
    """Return word and letter error rates with their 95 % intervals, and errors by utterance."""
    found: dict[str, Any] = {}
    for name, count in (("wer", scoring.word_errors), ("cer", letter_errors)):
        errors, units = count(said, heard)
        found[name] = scoring.rate(errors, units)
        found[f"{name}_interval"] = scoring.bootstrap(errors, units)
        found[f"{name}_errors"], found[f"{name}_units"] = errors.tolist(), units.tolist()
    return found


def decode(path: Path, data: Path, order: int) -> dict[str, Any]:
    """Return the errors on test, of the best path ("greedy") and under n-grams ("ngram").

    Raises:
        Problem: if the model's letters are not those of the data.
    """
    saved = journal.load(path)
    dev, test, train = (Split(data, name) for name in ("dev", "test", "train"))
    if saved.get("letters") != test.letters:
        raise Problem(
            f"{path} has the letters {saved.get('letters', '(none)')!r}, {data} {test.letters!r}; give the "
            "--data that it was trained on"
        )
    model = Recogniser(Shape(**saved["shape"]))
    model.load_state_dict(saved["model"])
    letters = ngram.LetterModel(train.texts, train.letters, order)
    weight, bonus = tuned(letters, scored(model, dev), dev)
    scores = scored(model, test)
    lengths = [torch.tensor([len(s)]) for s in scores]
    best = [
        greedy(torch.from_numpy(s)[None], n, test.letters)[0]
        for s, n in zip(scores, lengths, strict=True)
    ]
    decoder = Decoder(ngram.graph(letters, weight, bonus), test.letters)
    heard = [decoder.text(one) for one in scores]
    return {
        "greedy": counted(test.texts, best),
        "ngram": counted(test.texts, heard) | {"weight": weight, "bonus": bonus, "order": order},
        "heard": heard,
        "said": test.texts,
    }


def main() -> None:
    """Decode, write and print."""
    options = arguments()
    found = decode(options.model, options.data, options.order)
    options.out.write_text(json.dumps(found, ensure_ascii=False) + "\n", "utf-8")
    for how in ("greedy", "ngram"):
        one = found[how]
        rates = "  ".join(
            f"{name.upper()} {100 * one[name]:.1f} % ({100 * one[f'{name}_interval'][0]:.1f} to "
            f"{100 * one[f'{name}_interval'][1]:.1f})"
            for name in ("wer", "cer")
        )
        print(f"{how:7}{rates}")


if __name__ == "__main__":
    run(main)
