"""Constants of A2CiD2 against pseudoinverses and random exchanges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.theory import gossip, topology
from tests.theorems import complete_edges, pair_matrix


def star(n):
    return [(0, i) for i in range(1, n)]


def path(n):
    return [(i, i + 1) for i in range(n - 1)]


def exponential(n):
    """Neighbours at distances 1, 2, 4, ...: circulant and not complete."""
    pairs = ((i, (i + 2**k) % n) for i in range(n) for k in range(n.bit_length() - 1))
    return sorted({tuple(sorted(pair)) for pair in pairs})


GRAPHS = {
    "ring": topology.ring_edges,
    "complete": complete_edges,
    "star": star,
    "path": path,
    "exponential": exponential,
}


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["ring", "complete"])
def test_laplacian_of_regular_graphs(n, name):
    edges = GRAPHS[name](n)
    neighbours = np.zeros((n, n))
    for i, j in edges:
        neighbours[i, j] = neighbours[j, i] = 1
    uniform = neighbours / neighbours.sum(axis=1)
    np.testing.assert_allclose(
        gossip.laplacian(n, edges, 1.7), 1.7 * (np.eye(n) - uniform), atol=1e-15
    )


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_laplacian_counts_one_exchange_each(name):
    """On average over the learners, at `rate`; and half of it is the drift of the mean model."""
    n, rate, generator = 6, 0.8, np.random.default_rng(1)
    edges = GRAPHS[name](n)
    pull = gossip.laplacian(n, edges, rate)
    assert np.trace(pull) / n == pytest.approx(rate)
    neighbours = [[j for e in edges for j in e if i in e and j != i] for i in range(n)]
    drawn, draws = np.zeros((n, n)), 20000
    for i in generator.integers(0, n, size=draws):
        drawn += pair_matrix(n, i, generator.choice(neighbours[i])) - np.eye(n)
    # n learners, each asking at rate / 2: so many exchanges per unit of time
    np.testing.assert_allclose(-0.5 * pull, drawn / draws * n * rate / 2, atol=0.02)


@pytest.mark.parametrize(
    ("n", "eta", "alpha_tilde", "chi1"),
    [(8, 0.2893, 0.988, 3.41), (16, 0.1425, 1.872, 13.1), (32, 0.0704, 3.665, 52), (64, 0.0350, 7.262, 208)],
)  # fmt: skip
def test_acceleration_table_of_the_ring(n, eta, alpha_tilde, chi1):
    constants = gossip.acceleration(n, topology.ring_edges(n))
    assert constants.eta == pytest.approx(eta, abs=5e-5)
    assert constants.alpha_tilde == pytest.approx(alpha_tilde, abs=5e-4)
    assert constants.chi1 == pytest.approx(chi1, rel=5e-3)
    assert constants.chi2 == pytest.approx(1 - 1 / n)  # resistance of n - 1 edges beside one


@given(st.integers(2, 9), st.sampled_from(sorted(GRAPHS)), st.floats(0.1, 10))
def test_acceleration_by_the_pseudoinverse_and_none_on_complete_graphs(n, name, rate):
    edges = GRAPHS[name](n)
    if len(edges) == len(complete_edges(n)):
        with pytest.raises(ConfigError, match=r"nothing to accelerate: among \d+ .* chi1 > chi2"):
            gossip.acceleration(n, edges, rate)
        return
    pull = gossip.laplacian(n, edges, rate)
    resistances = [edge @ np.linalg.pinv(pull) @ edge
                   for edge in (np.eye(n)[i] - np.eye(n)[j] for i, j in edges)]  # fmt: skip
    chi1, chi2 = 1 / np.sort(np.linalg.eigvalsh(pull))[1], max(resistances) / 2
    got = gossip.acceleration(n, edges, rate)
    expected = (chi1, chi2, 1 / (2 * (chi1 * chi2) ** 0.5), 0.5 * (chi1 / chi2) ** 0.5)
    np.testing.assert_allclose((got.chi1, got.chi2, got.eta, got.alpha_tilde), expected, rtol=1e-9)
