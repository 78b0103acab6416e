"""Figures of several trainings: means over seeds, intervals over utterances."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import scoring
from .launch import Training


def by_scheme(runs: list[Training]) -> Iterator[tuple[str, list[int]]]:
    """Schemes in the order of their first run, each with the indices of its runs."""
    for scheme in dict.fromkeys(one.scheme for one in runs):
        yield scheme, [index for index, one in enumerate(runs) if one.scheme == scheme]


def summary(runs: list[Training], decoded: list[dict], curves: list[list[dict]]) -> dict:
    """Figures per scheme: means over seeds; the interval is over utterances.

    With several seeds an utterance counts with its mean number of errors over the seeds.

    Args:
        runs: the trainings.
        decoded: what decode.py wrote, per training.
        curves: lines of heldout.jsonl, per training.
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
    """Paired comparison of two schemes on the same utterances, `one` minus `other`."""
    chosen = dict(by_scheme(runs))
    words = np.array(decoded[0]["utterance_words"])
    errors = (_mean_errors(decoded, chosen[scheme]) for scheme in (one, other))
    return scoring.paired_bootstrap(*errors, words)


def _mean_errors(decoded: list[dict], chosen: list[int]) -> np.ndarray:
    return np.mean([decoded[index]["utterance_errors"] for index in chosen], axis=0)
