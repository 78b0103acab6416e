"""The samplers of this process, in the order in which it made them: on all learners the same."""

import weakref
from typing import Any

samplers: list[weakref.ref[Any]] = []
_joined_at: list[int] = []  # epochs of the job's samplers when this learner joined


def register(sampler: Any) -> int:
    """Note one more sampler; return the epoch at which it begins."""
    samplers.append(weakref.ref(sampler))
    return dict(enumerate(_joined_at)).get(len(samplers) - 1, 0)


def epochs(is_between: bool) -> list[int]:
    """Return the next epochs, for a learner that joins; unless all are between two, those under way."""
    made = [each() for each in samplers]
    return [0 if s is None else s.epoch - (s.is_open and not is_between) for s in made]


def join_at(epochs: list[int]) -> None:
    """Begin at the epochs of the job that this learner has joined, with later samplers, too."""
    _joined_at[:] = epochs
    for made, epoch in zip(samplers, epochs, strict=False):
        if (sampler := made()) is not None:
            sampler.set_epoch(epoch)
