"""Mixing theory against brute force: eigenvalues, enumeration, and simulation with seeds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adpsgd.errors import TopologyError
from hvd_adpsgd.theory import mixing, topology

SIZES = st.integers(1, 17)
WEIGHTS = st.floats(0, 1)


def disagreement(models):
    return models - models.mean(axis=0)


def brute_second_eigenvalue(matrix):
    """Largest factor on disagreement, as the operator norm of T with the mean projected out."""
    n = len(matrix)
    away = np.eye(n) - np.ones((n, n)) / n
    return np.linalg.norm(away @ matrix @ away, 2)


def expected_square(n, orders, matrix_of):
    """E[T^2] over an enumeration."""
    return sum(matrix_of(order) @ matrix_of(order) for order in orders) / len(orders)


# ---- matrices


@given(st.integers(2, 17), WEIGHTS, st.data())
def test_pair_matrix_moves_two_towards_each_other(n, weight, data):
    i, j = data.draw(st.permutations(range(n)))[:2]
    models = np.random.default_rng(n).normal(size=(n, 3))
    mixed = mixing.pair_matrix(n, i, j, weight) @ models
    expected = models.copy()
    expected[i] += weight * (models[j] - models[i])
    expected[j] += weight * (models[i] - models[j])
    np.testing.assert_allclose(mixed, expected, atol=1e-14)
    np.testing.assert_allclose(mixed.mean(axis=0), models.mean(axis=0), atol=1e-14)


def test_pair_matrix_of_a_half_is_a_projection():
    matrix = mixing.pair_matrix(5, 4, 1)
    np.testing.assert_array_equal(matrix @ matrix, matrix)
    np.testing.assert_array_equal(matrix, matrix.T)


def test_ring_matrices_by_hand():
    np.testing.assert_array_equal(mixing.ring_matrix(1), [[1]])
    np.testing.assert_array_equal(mixing.ring_matrix(2), mixing.uniform_matrix(2))
    np.testing.assert_allclose(mixing.ring_matrix(3), mixing.uniform_matrix(3), atol=1e-16)
    third = 1 / 3
    np.testing.assert_allclose(
        mixing.ring_matrix(4),
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
    matrix = mixing.permuted_ring_matrix(topology.ring_order(n, seed, round_))
    for i in range(n):
        expected = {i, *topology.permuted_ring_neighbours(n, i, seed, round_)}
        assert set(np.flatnonzero(matrix[i])) == expected
        np.testing.assert_allclose(matrix[i, sorted(expected)], 1 / len(expected), atol=1e-15)


@given(SIZES, st.integers(0, 99))
def test_matching_matrix_averages_each_pair(n, seed):
    peers = topology.perfect_matching(n, seed, 0)
    models = np.random.default_rng(seed).normal(size=(n, 3))
    expected = [models[i] if j is None else (models[i] + models[j]) / 2
                for i, j in enumerate(peers)]  # fmt: skip
    mixed = mixing.matching_matrix(peers) @ models
    np.testing.assert_allclose(mixed, np.reshape(expected, (n, 3)), atol=1e-15)


# ---- spectra


@pytest.mark.parametrize("n", range(1, 18))
def test_spectrum_of_the_ring(n):
    matrix = mixing.ring_matrix(n)
    by_numpy = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(np.sort(mixing.ring_eigenvalues(n)), by_numpy, atol=1e-14)
    brute = brute_second_eigenvalue(matrix)
    assert mixing.second_eigenvalue(matrix) == pytest.approx(brute, abs=1e-14)
    assert mixing.spectral_gap(matrix) == pytest.approx(1 - brute, abs=1e-14)


@pytest.mark.parametrize(
    ("n", "second", "contraction"),
    [(4, 0.3333, 0.1111), (8, 0.8047, 0.2381), (16, 0.9492, 0.2889), (64, 0.9968, 0.3228)],
)
def test_ring_table(n, second, contraction):
    assert mixing.second_eigenvalue(mixing.ring_matrix(n)) == pytest.approx(second, abs=1e-4)
    assert mixing.randomised_ring_contraction(n) == pytest.approx(contraction, abs=1e-4)


@pytest.mark.parametrize("n", [5, 8, 13])
def test_slowest_fourier_mode_shrinks_by_the_second_eigenvalue(n):
    models = np.cos(2 * np.pi * np.arange(n) / n)[:, np.newaxis]
    mixed = mixing.ring_matrix(n) @ models
    np.testing.assert_allclose(mixed, mixing.ring_eigenvalues(n)[1] * models, atol=1e-15)


def test_second_eigenvalue_counts_negative_ones():
    swap = mixing.pair_matrix(2, 0, 1, 1.0)
    assert mixing.second_eigenvalue(swap) == pytest.approx(1)
    assert mixing.second_eigenvalue(mixing.uniform_matrix(5)) == pytest.approx(0, abs=1e-15)
    assert mixing.second_eigenvalue(np.eye(3)) == pytest.approx(1)
    assert mixing.second_eigenvalue([[1.0]]) == 0


# ---- expected contraction, by enumerating every permutation


@pytest.mark.parametrize("n", range(2, 7))
def test_randomised_ring_contraction_is_exact_for_every_state(n):
    orders = [np.array(order) for order in itertools.permutations(range(n))]
    square = expected_square(n, orders, mixing.permuted_ring_matrix)
    away = np.eye(n) - np.ones((n, n)) / n
    expected = mixing.randomised_ring_contraction(n) * away + np.ones((n, n)) / n
    np.testing.assert_allclose(square, expected, atol=1e-14)


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
def test_matching_contraction_is_exact_for_every_state(n):
    tables = []
    for pairs in all_matchings(list(range(n))):
        peers = [None] * n
        for i, j in pairs:
            peers[i], peers[j] = j, i
        tables.append(peers)
    assert len({tuple(t) for t in tables}) == len(tables)
    square = expected_square(n, tables, mixing.matching_matrix)
    away = np.eye(n) - np.ones((n, n)) / n
    expected = mixing.matching_contraction(n) * away + np.ones((n, n)) / n
    np.testing.assert_allclose(square, expected, atol=1e-14)


@given(st.integers(2, 17))
def test_closed_forms_follow_from_permuted_contraction(n):
    ring = mixing.permuted_contraction(mixing.ring_matrix(n))
    assert mixing.randomised_ring_contraction(n) == pytest.approx(ring, abs=1e-14)
    pairs = mixing.permuted_contraction(mixing.matching_matrix(topology.perfect_matching(n, 0, 0)))
    assert mixing.matching_contraction(n) == pytest.approx(pairs, abs=1e-14)


def test_contractions_for_one():
    assert mixing.permuted_contraction([[1.0]]) == 0
    assert mixing.randomised_ring_contraction(1) == mixing.matching_contraction(1) == 0


def test_randomised_ring_contraction_by_the_seeded_schedule():
    n, rounds = 16, 600
    start = disagreement(np.random.default_rng(3).normal(size=(n, 40)))
    factors = []
    for round_ in range(rounds):
        mixed = mixing.permuted_ring_matrix(topology.ring_order(n, 5, round_)) @ start
        factors.append(np.sum(mixed**2) / np.sum(start**2))
    assert np.mean(factors) == pytest.approx(mixing.randomised_ring_contraction(n), rel=0.02)


@pytest.mark.parametrize("n", [2, 4, 6, 8, 16, 32])
def test_odd_even_contraction_is_the_spectral_radius(n):
    first, second = (mixing.matching_matrix(topology.odd_even_matching(n, p)) for p in (0, 1))
    modes = np.abs(np.linalg.eigvals(second @ first - 1 / n))
    assert mixing.odd_even_contraction(n) == pytest.approx(modes.max(), abs=1e-7)


@pytest.mark.parametrize(("n", "factor"), [(8, 0.5), (16, 0.8536), (32, 0.9619), (64, 0.9904)])
def test_odd_even_table(n, factor):
    assert mixing.odd_even_contraction(n) == pytest.approx(factor, abs=5e-5)


# ---- one exchange at a time


def brute_event_contraction(n, edges, weight):
    """Largest eigenvalue on disagreement of the mean of T^T T over the edges."""
    square = sum(np.linalg.matrix_power(mixing.pair_matrix(n, i, j, weight), 2) for i, j in edges)
    basis = np.linalg.qr(np.hstack([np.ones((n, 1)), np.eye(n)[:, : n - 1]]))[0][:, 1:]
    return np.linalg.eigvalsh(basis.T @ square @ basis / len(edges)).max()


@settings(max_examples=60)
@given(st.integers(2, 12), WEIGHTS)
def test_event_contraction_on_ring_and_complete_graph(n, weight):
    ring, complete = topology.ring_edges(n), topology.complete_edges(n)
    for edges, closed in (
        (ring, mixing.ring_event_contraction(n, weight)),
        (complete, mixing.complete_event_contraction(n, weight)),
    ):
        brute = brute_event_contraction(n, edges, weight)
        assert mixing.event_contraction(n, edges, weight) == pytest.approx(brute, abs=1e-12)
        assert closed == pytest.approx(brute, abs=1e-12)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_event_contraction_for_a_half(n):
    assert mixing.complete_event_contraction(n) == pytest.approx(1 - 1 / (n - 1))
    expected = 1 - (1 - np.cos(2 * np.pi / n)) / n
    assert mixing.ring_event_contraction(n) == pytest.approx(expected)


def test_event_contraction_of_a_cut_graph_is_one():
    assert mixing.event_contraction(4, [(0, 1), (2, 3)]) == pytest.approx(1)


def test_complete_event_contraction_by_simulation():
    n, draws, generator = 7, 4000, np.random.default_rng(2)
    start = disagreement(generator.normal(size=(n, 5)))
    edges = topology.complete_edges(n)
    left = 0.0
    for choice in generator.integers(0, len(edges), size=draws):
        left += np.sum((mixing.pair_matrix(n, *edges[choice], 1 / 3) @ start) ** 2)
    expected = mixing.complete_event_contraction(n, 1 / 3)
    assert left / draws / np.sum(start**2) == pytest.approx(expected, rel=0.01)


# ---- stationary disagreement


@pytest.mark.parametrize(
    ("n", "fixed", "randomised", "uniform"),
    [
        (8, 1.386, 1.148, 0.875),
        (16, 2.410, 1.318, 0.9375),
        (32, 4.421, 1.408, 0.969),
        (64, 8.427, 1.453, 0.984),
        (128, 16.43, 1.477, 0.992),
    ],
)
def test_kappa_table(n, fixed, randomised, uniform):
    assert mixing.kappa_fixed(n) == pytest.approx(fixed, rel=5e-4)
    assert mixing.kappa_random(n) == pytest.approx(randomised, rel=5e-4)
    assert mixing.kappa_uniform(n) == pytest.approx(uniform, rel=5e-4)


@given(SIZES)
def test_kappas_of_one_matrix(n):
    assert mixing.kappa_fixed(n) == pytest.approx(
        mixing.stationary_kappa(mixing.ring_matrix(n)), abs=1e-12
    )
    assert mixing.kappa_uniform(n) == pytest.approx(
        mixing.stationary_kappa(mixing.uniform_matrix(n)), abs=1e-12
    )
    assert mixing.kappa_random(n, 0.0) == mixing.kappa_uniform(n)


def simulated_kappa(n, matrices, steps, width=400):
    """Mean squared distance to the mean per entry, under X <- T X - N, after a burn-in."""
    generator = np.random.default_rng(8)
    models, total = np.zeros((n, width)), 0.0
    for matrix in itertools.islice(itertools.cycle(matrices), 2 * steps):
        models = disagreement(matrix @ models - generator.normal(size=models.shape))
        steps -= 1
        if steps < 0:
            total += mixing.consensus_distance(models) ** 2 / width
    return total


@pytest.mark.parametrize("n", [5, 8])
def test_kappas_by_simulation(n):
    steps = 400
    rings = [
        mixing.permuted_ring_matrix(topology.ring_order(n, 1, round_)) for round_ in range(800)
    ]
    pairs = [
        mixing.matching_matrix(topology.perfect_matching(n, 1, round_)) for round_ in range(800)
    ]
    measured = [
        simulated_kappa(n, matrices, steps) / steps
        for matrices in ([mixing.ring_matrix(n)], rings, pairs, [mixing.uniform_matrix(n)])
    ]
    expected = [
        mixing.kappa_fixed(n),
        mixing.kappa_random(n),
        mixing.kappa_random(n, mixing.matching_contraction(n)),
        mixing.kappa_uniform(n),
    ]
    np.testing.assert_allclose(measured, expected, rtol=0.03)


# ---- measured


@given(st.integers(1, 9), st.integers(0, 11))
def test_consensus_distance_is_the_root_mean_square(n, length):
    models = np.random.default_rng(n).normal(size=(n, length))
    squares = [np.linalg.norm(x - models.mean(axis=0)) ** 2 for x in models]
    assert mixing.consensus_distance(models) == pytest.approx(np.sqrt(np.mean(squares)))


def test_consensus_distance_in_float64():
    models = np.array([[0.0], [60000.0]], dtype=np.float16)
    assert mixing.consensus_distance(models) == 30000  # its square overflows float16


@given(st.integers(2, 9), st.integers(1, 11))
def test_consensus_from_all_pairs_is_the_consensus_distance(n, length):
    models = np.random.default_rng(n).normal(size=(n, length))
    pairs = [np.sum((models[i] - models[j]) ** 2) for i, j in itertools.combinations(range(n), 2)]
    got = mixing.consensus_from_exchanges(float(np.mean(pairs)), n)
    assert got == pytest.approx(mixing.consensus_distance(models))


def test_straggler():
    assert mixing.straggler_epoch_factor(16, 2) == pytest.approx(1.032, abs=5e-4)
    assert mixing.straggler_epoch_factor(8, 100) == pytest.approx(1.141, abs=5e-4)
    assert mixing.straggler_epoch_factor(4, 1) == 1
    assert mixing.straggler_epoch_factor(4, float("inf")) == 4 / 3
    assert mixing.straggler_epoch_factor(1, 5) == pytest.approx(5)


def test_straggler_by_counting_steps():
    n, slowdown, time = 5, 4, 1000
    done = (n - 1) * time + time // slowdown
    assert mixing.straggler_epoch_factor(n, slowdown) == pytest.approx(n * time / done)


# ---- refusals


@pytest.mark.parametrize(
    "call",
    [
        lambda: mixing.pair_matrix(3, 1, 1),
        lambda: mixing.pair_matrix(3, 0, 3),
        lambda: mixing.pair_matrix(3, 0, 1, 1.1),
        lambda: mixing.pair_matrix(3, 0, 1, float("nan")),
        lambda: mixing.ring_matrix(0),
        lambda: mixing.uniform_matrix(0),
        lambda: mixing.permuted_ring_matrix([0, 2]),
        lambda: mixing.permuted_ring_matrix([[0, 1]]),
        lambda: mixing.matching_matrix([1, 2, 0]),
        lambda: mixing.matching_matrix([1, None]),
        lambda: mixing.matching_matrix([0]),
        lambda: mixing.matching_matrix([5]),
        lambda: mixing.second_eigenvalue(np.ones((2, 2))),
        lambda: mixing.second_eigenvalue([[0.5, 0.5]]),
        lambda: mixing.second_eigenvalue(np.full((2, 2), np.nan)),
        lambda: mixing.second_eigenvalue(np.roll(np.eye(3), 1, axis=0)),
        lambda: mixing.second_eigenvalue([[2.0, -1.0], [-1.0, 2.0]]),
        lambda: mixing.stationary_kappa(np.eye(2)),
        lambda: mixing.ring_eigenvalues(0),
        lambda: mixing.kappa_random(4, 1.0),
        lambda: mixing.kappa_random(0),
        lambda: mixing.kappa_uniform(0),
        lambda: mixing.odd_even_contraction(5),
        lambda: mixing.event_contraction(3, []),
        lambda: mixing.event_contraction(3, [(0, 1)], -0.1),
        lambda: mixing.complete_event_contraction(1),
        lambda: mixing.consensus_distance([1.0, 2.0]),
        lambda: mixing.consensus_distance(np.empty((0, 3))),
        lambda: mixing.consensus_from_exchanges(-1.0, 3),
        lambda: mixing.consensus_from_exchanges(float("nan"), 3),
        lambda: mixing.straggler_epoch_factor(4, 0.5),
        lambda: mixing.straggler_epoch_factor(1, float("inf")),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises(TopologyError):
        call()
