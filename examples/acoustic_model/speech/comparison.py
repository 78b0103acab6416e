"""Compares trainings by scheme: means over seeds, confidence intervals over utterances."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import scoring
from .launch import Training


def by_scheme(runs: list[Training]) -> Iterator[tuple[str, list[int]]]:
    """Yield each scheme with the indices of its runs, in the order of the schemes' first runs."""
    for scheme in dict.fromkeys(one.scheme for one in runs):
        yield scheme, [index for index, one in enumerate(runs) if one.scheme == scheme]


def summary(runs: list[Training], decoded: list[dict], curves: list[list[dict]]) -> dict:
    """Return word error rate, training time and held-out loss by scheme, as means over seeds.

    The interval of the word error rate is over utterances; with several seeds an utterance counts with its
    mean number of errors over the seeds.

    Args:
        runs: the trainings.
        decoded: results of decode.py, per training.
        curves: entries of heldout.jsonl, per training.
    """
    result: dict = {
        name: {} for name in ("wer", "wer_interval", "wer_by_seed", "seconds", "heldout")
    }
    for scheme, chosen in by_scheme(runs):
        errors = _mean_errors(decoded, chosen)
        words = np.array(decoded[chosen[0]]["utterance_words"])
        result["wer"][scheme] = scoring.rate(errors, words)
        result["wer_interval"][scheme] = scoring.bootstrap(errors, words)
        result["wer_by_seed"][scheme] = [decoded[i]["wer"] for i in chosen]
        result["seconds"][scheme] = float(np.mean([curves[i][-1]["seconds"] for i in chosen]))
        result["heldout"][scheme] = float(np.mean([curves[i][-1]["heldout_loss"] for i in chosen]))
    return result


def difference(runs: list[Training], decoded: list[dict], one: str, other: str) -> dict:
    """Return the paired comparison of two schemes' word error rates, `one` minus `other`."""
    chosen = dict(by_scheme(runs))
    words = np.array(decoded[0]["utterance_words"])
    errors = (_mean_errors(decoded, chosen[scheme]) for scheme in (one, other))
    return scoring.paired_bootstrap(*errors, words)


def _mean_errors(decoded: list[dict], chosen: list[int]) -> np.ndarray:
    return np.mean([decoded[index]["utterance_errors"] for index in chosen], axis=0)
