"""Minibatches of a Lhotse manifest, by its DynamicBucketingSampler; features are computed on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech.problem import Problem, require
from examples.real_speech import importers
from examples.real_speech.corpus import Batch, Split
from examples.real_speech.dialogs import normalised
from examples.real_speech.prepare import LONGEST_S, SHORTEST_S
from examples.real_speech.utterances import features

_BUCKETS = 10


class CutBatches:
    """Minibatches of cuts of similar duration.

    With one manifest the sampler deals its minibatches to all learners. With one for each learner, a learner
    reads its own, and learners may make different numbers of steps: for strategies in which none waits.

    Args:
        manifests: one, or one for each learner.
        split: gives the letters, and the scale of the features.
        rank, size: of this learner.
        seconds: most speech in a minibatch.
        seed: of the order; equal on all learners.

    Raises:
        Problem: for a manifest without utterances that can be used.
    """

    def __init__(
        self, manifests: list[Path], split: Split, rank: int, size: int, seconds: float, seed: int
    ) -> None:
        own = len(manifests) > 1
        path = manifests[rank] if own else manifests[0]
        self._dealt = {"rank": 0, "world_size": 1} if own else {"rank": rank, "world_size": size}
        self._cuts = usable(path)
        self._split, self._seconds, self._seed = split, seconds, seed
        durations = [cut.duration for cut in self._cuts]
        self._buckets = min(_BUCKETS, max(2, len(durations) // 4))
        duration = sum(durations) / self._dealt["world_size"]
        self.steps = max(1, round(duration / seconds))  # of an epoch, about

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the minibatches of an epoch; all learners call this with the same number."""
        sampling = require("lhotse.dataset", "lhotse")
        sampler = sampling.DynamicBucketingSampler(
            self._cuts,
            max_duration=self._seconds,
            num_buckets=self._buckets,
            shuffle=True,
            seed=self._seed,
            **self._dealt,
        )
        sampler.set_epoch(epoch)
        for cuts in sampler:
            found = list(importers.utterances_of(cuts))
            sounds = [self._split.stacked(features(one)) for one in found]
            yield self._split.collated(sounds, [one.text for one in found])


def usable(path: Path) -> Any:
    """Return a cut for each supervision of a manifest that has a text and a length that fits.

    Raises:
        Problem: if there are none, or an audio cannot be used.
    """
    cuts = importers.cuts(path).trim_to_supervisions(keep_overlapping=False)
    cuts = cuts.filter(_is_usable)
    if not any(True for _ in importers.utterances_of(cuts)):
        raise Problem(
            f"{path} has no supervision of {SHORTEST_S:g} to {LONGEST_S:g} s with a text; add some, or leave "
            "the manifest out"
        )
    return cuts


def _is_usable(cut: Any) -> bool:
    return SHORTEST_S <= cut.duration <= LONGEST_S and bool(
        normalised(cut.supervisions[0].text or "")
    )


def check(manifests: list[Path], learners: int) -> None:
    """Check all manifests: every learner does, so that all find the same.

    Raises:
        Problem: for another number of manifests than 1 or that of the learners, or one that cannot be used.
    """
    if len(manifests) not in (1, learners):
        raise Problem(
            f"--cuts has {len(manifests)} manifests, allowed are 1 and {learners}, one for each learner"
        )
    for path in manifests:
        usable(path)
