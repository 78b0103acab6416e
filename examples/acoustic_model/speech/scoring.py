"""Word error rate with jiwer; its uncertainty by resampling utterances."""

from __future__ import annotations

import numpy as np

from .problem import require


def word_errors(said: list[str], heard: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Errors (substitutions, deletions, insertions) and words of each utterance, shape (n,) each."""
    jiwer = require("jiwer", "jiwer")
    errors, words = [], []
    for truth, guess in zip(said, heard, strict=True):
        found = jiwer.process_words(truth, guess)
        errors.append(found.substitutions + found.deletions + found.insertions)
        words.append(len(truth.split()))
    return np.array(errors), np.array(words)


def rate(errors: np.ndarray, words: np.ndarray) -> float:
    """Word error rate as a fraction."""
    return float(errors.sum() / words.sum())


def bootstrap(
    errors: np.ndarray, words: np.ndarray, seed: int = 0, draws: int = 2000
) -> tuple[float, float]:
    """95 % interval of the word error rate: utterances drawn with replacement.

    Utterances of one speaker are treated as independent, so the interval is on the narrow side.
    """
    chosen = _draw(len(words), seed, draws)
    rates = errors[chosen].sum(1) / words[chosen].sum(1)
    low, high = np.quantile(rates, (0.025, 0.975))
    return float(low), float(high)


def paired_bootstrap(
    one: np.ndarray, other: np.ndarray, words: np.ndarray, seed: int = 0, draws: int = 2000
) -> dict[str, float]:
    """Difference of two models on the same utterances, `one` minus `other`.

    Returns:
        difference of the rates, its 95 % interval (low, high), and `one_better`: the share of draws in
        which `one` makes fewer errors.
    """
    chosen = _draw(len(words), seed, draws)
    rates = (one - other)[chosen].sum(1) / words[chosen].sum(1)
    low, high = np.quantile(rates, (0.025, 0.975))
    return {
        "difference": rate(one - other, words),
        "low": float(low),
        "high": float(high),
        "one_better": float((rates < 0).mean()),
    }


def _draw(utterances: int, seed: int, draws: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(utterances, size=(draws, utterances))
