"""The study of memory per learner: what a learner holds, by counting."""

from argparse import Namespace

import pytest

from lab.studies import sharded_memory

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]


def test_a_learner_of_two_holds_half() -> None:
    """Parameters, gradients and two moments, 4 bytes each; and a count of steps for every tensor."""
    options = Namespace(layers=1, width=16, steps=3)
    whole = sharded_memory.job("ddp", options)
    numbers = whole[0]["numbers"]
    tensors = 1 + 12 + 2  # embedding, layer, head
    for facts in whole:
        assert facts["tensors"] == 16 * numbers + 4 * tensors
        assert facts["peak"] > 0
    parts = [facts["tensors"] for facts in sharded_memory.job("fully_shard", options)]
    assert parts[:2] == parts[2:], "counterparts hold equal parts"
    assert parts[0] + parts[1] == 16 * numbers + 2 * 4 * tensors
