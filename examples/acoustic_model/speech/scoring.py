"""Word error rates, computed by jiwer, with bootstrap intervals from resampled utterances."""

from __future__ import annotations

import numpy as np

from .problem import require


def word_errors(said: list[str], heard: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return errors (substitutions + deletions + insertions) and number of words by utterance, both (n,)."""
    jiwer = require("jiwer", "jiwer")
    errors, words = [], []
    for truth, guess in zip(said, heard, strict=True):
        found = jiwer.process_words(truth, guess)
        errors.append(found.substitutions + found.deletions + found.insertions)
        words.append(len(truth.split()))
    return np.array(errors), np.array(words)


def rate(errors: np.ndarray, words: np.ndarray) -> float:
    """Return the word error rate as a fraction."""
    return float(errors.sum() / words.sum())


def bootstrap(
    errors: np.ndarray, words: np.ndarray, seed: int = 0, draws: int = 2000
) -> tuple[float, float]:
    """Return the 95 % interval of the word error rate, from utterances drawn with replacement.

    Utterances of one speaker are treated as independent, which makes the interval too narrow.
    """
    chosen = _draw(len(words), seed, draws)
    rates = errors[chosen].sum(1) / words[chosen].sum(1)
    low, high = np.quantile(rates, (0.025, 0.975))
    return float(low), float(high)


def paired_bootstrap(
    one: np.ndarray, other: np.ndarray, words: np.ndarray, seed: int = 0, draws: int = 2000
) -> dict[str, float]:
    """Return the difference of two models' error rates on the same utterances, `one` minus `other`.

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
