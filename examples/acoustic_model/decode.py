"""Decodes the test split with a trained model: word error rate with a bootstrap interval.

    python -m examples.acoustic_model.decode out/runs/random-pairs/model.pt
    python -m examples.acoustic_model.decode out/runs/random-pairs/model.pt --against out/runs/ssgd/model.pt

Word penalty and prior scale are chosen on the dev split; the test split is decoded once.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from examples.acoustic_model.speech import corpus, journal, scoring, viterbi
from examples.acoustic_model.speech.model import Shape, make
from examples.acoustic_model.speech.problem import Problem, new_parser, run

PRIOR_SCALES = (0.0, 0.3, 0.6, 0.9, 1.2, 1.5, 1.8)
FIRST_PENALTY, LAST_PENALTY = 0.0, 640.0
_USUAL_SCALE = 0.6  # of equally good prior scales the one nearest to this is taken
_BATCH = 32
# Least count of frames of a state, so that a state without frames has a finite score.
_PRIOR_FLOOR = 1.0


@dataclass(frozen=True)
class Posteriors:
    """Log-posteriors of utterances, in batches of similar length.

    Attributes:
        batches: (indices of utterances, scores float32 (batch, time, states), lengths) of each batch.
        said: text of each utterance, by index.
    """

    batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    said: list[str]


def load_model(path: Path) -> torch.nn.Module:
    """Return the model in a model.pt that train.py has written."""
    saved = journal.load(path)
    if "shape" not in saved:
        raise Problem(f"{path} is a checkpoint, not a model; pass the model.pt beside it")
    model = make(Shape(**saved["shape"]))
    model.load_state_dict(saved["model"])
    return model.eval()


def posteriors(model: torch.nn.Module, data: Path, split: str) -> Posteriors:
    """Compute the log-posteriors of all whole utterances of a split."""
    source = corpus.Split(data, split, model.shape.context)
    lengths = np.diff(source.offsets)
    order = np.argsort(-lengths, kind="stable")
    batches = []
    for begin in range(0, len(order), _BATCH):
        chosen = order[begin : begin + _BATCH]
        batches.append((chosen, _forward(model, source, chosen, lengths), lengths[chosen]))
    return Posteriors(batches, source.texts())


def _forward(
    model: torch.nn.Module, source: corpus.Split, chosen: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    frames = [torch.from_numpy(source.utterance(int(index))) for index in chosen]
    padded = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)
    with torch.no_grad():
        scores = model(padded, torch.from_numpy(lengths[chosen]))
    return scores.log_softmax(-1).numpy()


class Recogniser:
    """A recogniser with the lexicon and the state priors of one data folder."""

    def __init__(self, data: Path) -> None:
        self.graph = viterbi.word_loop(corpus.read_json(data / "lexicon.json")["states"])
        counts = np.load(data / "counts.npy").astype(np.float64)
        self.log_prior = np.log(np.maximum(counts, _PRIOR_FLOOR) / counts.sum()).astype(np.float32)

    def hear(self, given: Posteriors, penalty: float, prior_scale: float) -> list[str]:
        """Return the recognised text of each utterance."""
        heard = [""] * len(given.said)
        for indices, scores, lengths in given.batches:
            likelihood = scores - np.float32(prior_scale) * self.log_prior
            found = viterbi.decode(self.graph, likelihood, lengths, penalty)
            for index, words in zip(indices, found, strict=True):
                heard[index] = " ".join(words)
        return heard

    def errors(self, given: Posteriors, penalty: float, prior_scale: float) -> float:
        """Return the word error rate of the recognised texts."""
        return scoring.rate(
            *scoring.word_errors(given.said, self.hear(given, penalty, prior_scale))
        )


def tune(recogniser: Recogniser, dev: Posteriors) -> dict[str, float]:
    """Return the word penalty and prior scale with the fewest errors on the dev split.

    The penalties of each scale double until the errors have passed their minimum, so that the best penalty
    is not the last one tried; `interior` is False if it is the first or last one, as with a model that has
    learned next to nothing, or if the prior scale is the largest. A prior scale of 0 is no edge of the grid,
    because smaller ones make no sense.
    """
    tried: dict[tuple[float, float], float] = {}
    for scale in PRIOR_SCALES:
        for penalty in _penalties():
            tried[scale, penalty] = recogniser.errors(dev, penalty, scale)
            if _is_past_best([rate for (s, _), rate in tried.items() if s == scale]):
                break
    scale, penalty = min(tried, key=lambda key: (tried[key], abs(key[0] - _USUAL_SCALE), key[1]))
    interior = FIRST_PENALTY < penalty < LAST_PENALTY and scale < PRIOR_SCALES[-1]
    return {
        "prior_scale": scale,
        "penalty": penalty,
        "interior": interior,
        "dev_wer": tried[scale, penalty],
    }


def _penalties() -> list[float]:
    doubling = itertools.accumulate(
        itertools.repeat(2.0), lambda value, by: value * by, initial=2.5
    )
    return [
        FIRST_PENALTY,
        *itertools.takewhile(lambda penalty: penalty <= LAST_PENALTY, doubling),
    ]


def _is_past_best(rates: list[float]) -> bool:
    return len(rates) > 2 and min(rates[-2:]) > min(rates) and rates[-1] >= rates[-2]


def decode(model_path: Path, data: Path) -> dict:
    """Tune on the dev split, and decode the test split.

    Returns:
        a dictionary with wer, wer_interval, tuning, and by utterance: errors, words, said, heard.
    """
    began = time.perf_counter()
    model, recogniser = load_model(model_path), Recogniser(data)
    tuned = tune(recogniser, posteriors(model, data, "dev"))
    test = posteriors(model, data, "test")
    heard = recogniser.hear(test, tuned["penalty"], tuned["prior_scale"])
    errors, words = scoring.word_errors(test.said, heard)
    return {
        "model": str(model_path),
        "wer": scoring.rate(errors, words),
        "wer_interval": scoring.bootstrap(errors, words),
        "words": int(words.sum()),
        "tuning": tuned,
        "seconds": time.perf_counter() - began,
        "utterance_errors": errors.tolist(),
        "utterance_words": words.tolist(),
        "said": test.said,
        "heard": heard,
    }


def describe(result: dict) -> str:
    """Return the line that describes a result."""
    low, high = result["wer_interval"]
    doubt = "" if result["tuning"]["interior"] else ", tuned to the edge of the grid"
    return (
        f"{result['model']}: WER {100 * result['wer']:.1f} % "
        f"({100 * low:.1f} to {100 * high:.1f}), {result['words']} words, {result['seconds']:.1f} s{doubt}"
    )


def main() -> None:
    """Decode a model; with --against, also a second one, and compare both."""
    parser = new_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=Path("out/speech/easy"))
    parser.add_argument("--against", type=Path, help="second model, for a paired comparison")
    parser.add_argument("--out", type=Path, help="JSON file (default: MODEL's folder/wer.json)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = decode(options.model, options.data)
    print(describe(result))
    if options.against:
        other = decode(options.against, options.data)
        print(describe(other))
        result["against"] = {"model": other["model"], "wer": other["wer"]}
        result["against"] |= scoring.paired_bootstrap(
            *(np.array(r["utterance_errors"]) for r in (result, other)),
            np.array(result["utterance_words"]),
        )
        print(
            "first minus second: {difference:+.3f} ({low:+.3f} to {high:+.3f})".format(
                **result["against"]
            )
        )
    path = options.out or options.model.parent / "wer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    print(f"written to {path}")


if __name__ == "__main__":
    run(main)
