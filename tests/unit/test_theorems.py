"""The closed forms of tests/theorems.py against brute force: enumeration, and simulation with seeds."""

import itertools

import numpy as np
import pytest
import theorems
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.theory import topology

SIZES = st.integers(1, 17)
WEIGHTS = st.floats(0, 1)


def away(n):
    return np.eye(n) - np.ones((n, n)) / n


@given(st.integers(2, 17), WEIGHTS, st.data())
def test_an_exchange_moves_two_towards_each_other(n, weight, data):
    i, j = data.draw(st.permutations(range(n)))[:2]
    models = np.random.default_rng(n).normal(size=(n, 3))
    mixed = theorems.pair_matrix(n, i, j, weight) @ models
    expected = models.copy()
    expected[i] += weight * (models[j] - models[i])
    expected[j] += weight * (models[i] - models[j])
    np.testing.assert_allclose(mixed, expected, atol=1e-14)


@pytest.mark.parametrize("n", range(1, 18))
def test_spectrum_of_the_ring(n):
    by_numpy = np.linalg.eigvalsh(theorems.ring_matrix(n))
    np.testing.assert_allclose(np.sort(theorems.ring_eigenvalues(n)), by_numpy, atol=1e-14)


@pytest.mark.parametrize("n", [5, 8, 13])
def test_slowest_fourier_mode_shrinks_by_the_second_eigenvalue(n):
    models = np.cos(2 * np.pi * np.arange(n) / n)[:, np.newaxis]
    mixed = theorems.ring_matrix(n) @ models
    np.testing.assert_allclose(mixed, theorems.ring_eigenvalues(n)[1] * models, atol=1e-15)


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


def test_randomised_ring_contraction_by_the_seeded_schedule():
    n, rounds = 16, 600
    start = away(n) @ np.random.default_rng(3).normal(size=(n, 40))
    factors = []
    for round_ in range(rounds):
        mixed = theorems.permuted_ring_matrix(topology.ring_order(n, 5, round_)) @ start
        factors.append(np.sum(mixed**2) / np.sum(start**2))
    assert np.mean(factors) == pytest.approx(theorems.randomised_ring_contraction(n), rel=0.02)


def brute_event_contraction(n, edges, weight):
    """Largest eigenvalue on disagreement of the mean of T^T T over the edges."""
    square = sum(np.linalg.matrix_power(theorems.pair_matrix(n, *e, weight), 2) for e in edges)
    basis = np.linalg.qr(np.hstack([np.ones((n, 1)), np.eye(n)[:, : n - 1]]))[0][:, 1:]
    return np.linalg.eigvalsh(basis.T @ square @ basis / len(edges)).max()


@given(st.integers(2, 12), WEIGHTS)
def test_event_contraction_on_ring_and_complete_graph(n, weight):
    for edges in (theorems.ring_edges(n), theorems.complete_edges(n)):
        brute = brute_event_contraction(n, edges, weight)
        assert theorems.event_contraction(n, edges, weight) == pytest.approx(brute, abs=1e-12)
    assert theorems.complete_event_contraction(n, weight) == pytest.approx(brute, abs=1e-12)


def test_event_contraction_of_a_cut_graph_is_one():
    assert theorems.event_contraction(4, [(0, 1), (2, 3)]) == pytest.approx(1)


def drawn_seconds(n, seed):
    """Symmetric seconds of exchanges, some of them equal."""
    seconds = np.random.default_rng(seed).choice([1.0, 2.0, 10.0], size=(n, n))
    return np.minimum(seconds, seconds.T)


@given(st.integers(2, 9), WEIGHTS, st.integers(0, 10**6))
def test_each_row_is_a_distribution_with_a_floor(n, prefer, seed):
    asked = theorems.asking(drawn_seconds(n, seed), prefer)
    np.testing.assert_allclose(asked.sum(axis=1), 1.0)
    assert not asked.diagonal().any()
    assert asked[~np.eye(n, dtype=bool)].min() >= (1 - prefer) / (n - 1) - 1e-12


def test_frequencies_of_draws():
    seconds, prefer, n, draws = drawn_seconds(6, 3), 0.8, 6, 200_000
    random = np.random.default_rng(5)
    rows = random.choice(np.arange(1, n), (draws, 3))
    fastest = rows[np.arange(draws), np.argmin(seconds[0][rows], axis=1)]  # the first of equal ones
    chosen = np.where(random.random(draws) < prefer, fastest, rows[:, 0])
    counts = np.bincount(chosen, minlength=n) / draws
    np.testing.assert_allclose(counts, theorems.asking(seconds, prefer)[0], atol=0.01)


def simulated_kappa(n, updates, steps=400, width=400):
    """Mean squared distance to the mean per entry, under X <- T X - N, after a burn-in."""
    generator = np.random.default_rng(8)
    models, total = np.zeros((n, width)), 0.0
    for k, matrix in enumerate(itertools.islice(itertools.cycle(updates), 2 * steps)):
        models = away(n) @ (matrix @ models - generator.normal(size=models.shape))
        if k >= steps:
            total += theorems.consensus_distance(models) ** 2 / width
    return total / steps


@pytest.mark.parametrize("n", [5, 8])
def test_kappas_by_simulation(n):
    rounds = range(800)
    rings = [theorems.permuted_ring_matrix(topology.ring_order(n, 1, k)) for k in rounds]
    pairs = [theorems.matching_matrix(topology.perfect_matching(n, 1, k)) for k in rounds]
    schemes = ([theorems.ring_matrix(n)], rings, pairs, [theorems.uniform_matrix(n)])
    laws = (theorems.randomised_ring_contraction(n), theorems.matching_contraction(n), 0.0)
    expected = [theorems.kappa_fixed(n), *(theorems.kappa_random(n, law) for law in laws)]
    measured = [simulated_kappa(n, matrices) for matrices in schemes]
    np.testing.assert_allclose(measured, expected, rtol=0.03)


@given(st.integers(1, 9), st.integers(0, 11))
def test_consensus_distance_is_the_root_mean_square(n, length):
    models = np.random.default_rng(n).normal(size=(n, length))
    squares = [np.linalg.norm(x - models.mean(axis=0)) ** 2 for x in models]
    assert theorems.consensus_distance(models) == pytest.approx(np.sqrt(np.mean(squares)))
