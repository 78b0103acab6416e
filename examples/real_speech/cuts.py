"""Minibatches of a Lhotse manifest, by its DynamicBucketingSampler; features are computed on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from examples.acoustic_model.speech.problem import Problem, require
from examples.real_speech import importers
from examples.real_speech.corpus import Batch, Split
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
        Problem: for another number of manifests, or one without text.
    """

    def __init__(
        self, manifests: list[Path], split: Split, rank: int, size: int, seconds: float, seed: int
    ) -> None:
        if len(manifests) not in (1, size):
            raise Problem(
                f"--cuts has {len(manifests)} manifests, allowed are 1 and {size}, one for each learner"
            )
        own = len(manifests) > 1
        path = manifests[rank] if own else manifests[0]
        self._dealt = {"rank": 0, "world_size": 1} if own else {"rank": rank, "world_size": size}
        self._cuts = importers.cuts(path).trim_to_supervisions(keep_overlapping=False)
        if not any(True for _ in importers.utterances_of(self._cuts)):
            raise Problem(
                f"{path} has no supervision with a text; add it, or leave the manifest out"
            )
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
            if found:
                sounds = [self._split.stacked(features(one)) for one in found]
                yield self._split.collated(sounds, [one.text for one in found])
