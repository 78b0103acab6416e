"""Mixing matrices of whole rounds against what each super learner does, by hand."""

import itertools

import numpy as np
import pytest
import theorems
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.engine.metrics import consensus_distance as estimated
from hvd_adpsgd.theory import topology
from tests.theorems import consensus_distance

SIZES = st.integers(1, 17)


def test_ring_matrices_by_hand():
    np.testing.assert_array_equal(theorems.ring_matrix(1), [[1]])
    np.testing.assert_array_equal(theorems.ring_matrix(2), theorems.uniform_matrix(2))
    np.testing.assert_allclose(theorems.ring_matrix(3), theorems.uniform_matrix(3), atol=1e-16)
    third = 1 / 3
    np.testing.assert_allclose(
        theorems.ring_matrix(4),
        [
            [third, third, 0, third],
            [third, third, third, 0],
            [0, third, third, third],
            [third, 0, third, third],
        ],
        atol=1e-15,
    )


@given(SIZES, st.integers(0, 99), st.integers(0, 99))
def test_permuted_ring_matrix_joins_permuted_neighbours(n, seed, round_):
    matrix = theorems.permuted_ring_matrix(topology.ring_order(n, seed, round_))
    for i in range(n):
        expected = {i, *topology.permuted_ring_neighbours(n, i, seed, round_)}
        assert set(np.flatnonzero(matrix[i])) == expected
        np.testing.assert_allclose(matrix[i, sorted(expected)], 1 / len(expected), atol=1e-15)


@given(SIZES, st.integers(0, 99), st.floats(0, 1))
def test_matching_matrix_moves_each_pair_together(n, seed, weight):
    peers = topology.perfect_matching(n, seed, 0)
    models = np.random.default_rng(seed).normal(size=(n, 3))
    expected = [models[i] + weight * (0 if j is None else models[j] - models[i])
                for i, j in enumerate(peers)]  # fmt: skip
    mixed = theorems.matching_matrix(peers, weight) @ models
    np.testing.assert_allclose(mixed, np.reshape(expected, (n, 3)), atol=1e-14)


@given(st.integers(2, 9), st.integers(1, 11))
def test_consensus_from_all_pairs_is_the_consensus_distance(n, length):
    models = np.random.default_rng(n).normal(size=(n, length))
    pairs = [np.sum((models[i] - models[j]) ** 2) for i, j in itertools.combinations(range(n), 2)]
    before = {"compared": 0, "square": 0.0}
    now = {"compared": len(pairs), "square": float(np.sum(pairs)), "means": 0}
    assert estimated(before, now, n) == pytest.approx(consensus_distance(models))
