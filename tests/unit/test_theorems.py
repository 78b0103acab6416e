"""The closed forms of tests/theorems.py against brute force."""

import itertools

import numpy as np
import pytest
import theorems
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.theory import topology

WEIGHTS = st.floats(0, 1)


def away(n):
    return np.eye(n) - np.ones((n, n)) / n


def assert_exact_for_every_state(n, factor, matrices):
    """E[T^2] over the enumeration is the factor on disagreement, and 1 on the mean."""
    square = sum(matrix @ matrix for matrix in matrices) / len(matrices)
    np.testing.assert_allclose(square, factor * away(n) + np.ones((n, n)) / n, atol=1e-14)


@pytest.mark.parametrize("n", range(2, 7))
def test_randomised_ring_contraction(n):
    matrices = [theorems.permuted_ring_matrix(order) for order in itertools.permutations(range(n))]
    assert_exact_for_every_state(n, theorems.randomised_ring_contraction(n), matrices)


def all_matchings(ranks):
    """Every matching of the ranks in which at most one sits out."""
    if len(ranks) < 2:
        return [()]
    first, rest = ranks[0], ranks[1:]
    found = [((first, j), *m) for j in rest for m in all_matchings([r for r in rest if r != j])]
    if len(ranks) % 2:
        found += all_matchings(rest)
    return found


@pytest.mark.parametrize("n", range(2, 8))
def test_matching_contraction(n):
    tables = []
    for pairs in all_matchings(list(range(n))):
        peers = [None] * n
        for i, j in pairs:
            peers[i], peers[j] = j, i
        tables.append(peers)
    assert len({tuple(t) for t in tables}) == len(tables)
    matrices = [theorems.matching_matrix(table) for table in tables]
    assert_exact_for_every_state(n, theorems.matching_contraction(n), matrices)


@given(st.integers(1, 17))
def test_closed_forms_follow_from_permuted_contraction(n):
    ring = theorems.permuted_contraction(theorems.ring_matrix(n))
    assert theorems.randomised_ring_contraction(n) == pytest.approx(ring, abs=1e-14)
    matrix = theorems.matching_matrix(topology.perfect_matching(n, 0, 0))
    pairs = theorems.permuted_contraction(matrix)
    assert theorems.matching_contraction(n) == pytest.approx(pairs, abs=1e-14)


def brute_event_contraction(n, edges, weight):
    """Largest eigenvalue on disagreement of the mean of T^T T over the edges."""
    square = sum(np.linalg.matrix_power(theorems.pair_matrix(n, *e, weight), 2) for e in edges)
    basis = np.linalg.qr(np.hstack([np.ones((n, 1)), np.eye(n)[:, : n - 1]]))[0][:, 1:]
    return np.linalg.eigvalsh(basis.T @ square @ basis / len(edges)).max()


@given(st.integers(2, 12), WEIGHTS)
def test_event_contraction_on_ring_and_complete_graph(n, weight):
    for edges in (theorems.ring_edges(n), list(itertools.combinations(range(n), 2))):
        brute = brute_event_contraction(n, edges, weight)
        assert theorems.event_contraction(n, edges, weight) == pytest.approx(brute, abs=1e-12)
    assert theorems.complete_event_contraction(n, weight) == pytest.approx(brute, abs=1e-12)
