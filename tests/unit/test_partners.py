"""theory/partners: how often each peer is asked, and how slowly models can approach each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.theory import gossip, partners

SIZES = st.integers(2, 9)
PREFER = st.floats(0, 1)


def drawn_seconds(n: int, seed: int) -> np.ndarray:
    """Return symmetric seconds of exchanges, some of them equal."""
    random = np.random.default_rng(seed)
    seconds = random.choice([1.0, 2.0, 10.0], size=(n, n))
    return np.minimum(seconds, seconds.T)


@given(SIZES, PREFER, st.integers(0, 10**6))
def test_each_row_is_a_distribution_with_a_floor(n, prefer, seed):
    asked = partners.asking(drawn_seconds(n, seed), prefer)
    np.testing.assert_allclose(asked.sum(axis=1), 1.0)
    assert not asked.diagonal().any()
    assert asked[~np.eye(n, dtype=bool)].min() >= (1 - prefer) / (n - 1) - 1e-12


def test_frequencies_of_draws():
    seconds, prefer, n, draws = drawn_seconds(6, 3), 0.8, 6, 200_000
    random = np.random.default_rng(5)
    peers = np.arange(1, n)
    rows = random.choice(peers, (draws, partners.CANDIDATES))
    fastest = rows[np.arange(draws), np.argmin(seconds[0][rows], axis=1)]  # the first of equal ones
    chosen = np.where(random.random(draws) < prefer, fastest, rows[:, 0])
    counts = np.bincount(chosen, minlength=n) / draws
    np.testing.assert_allclose(counts, partners.asking(seconds, prefer)[0], atol=0.01)


@given(SIZES, PREFER, st.integers(0, 10**6))
def test_the_slowest_disagreement_keeps_its_share_of_the_rate_of_uniform_pairs(n, prefer, seed):
    asked = partners.asking(drawn_seconds(n, seed), prefer)
    per_ask = partners.rate_laplacian(asked, np.ones((n, n)))
    slowest = np.linalg.eigvalsh(per_ask)[1]
    assert slowest >= partners.slowest_rate_bound(n, prefer) - 1e-9


@pytest.mark.parametrize("n", [2, 3, 8])
def test_equal_seconds_are_uniform_pairs(n):
    asked = partners.asking(np.ones((n, n)), 0.9)
    edges = [(i, j) for j in range(n) for i in range(j)]
    # each super learner asks once per second, so it takes part in two exchanges
    np.testing.assert_allclose(
        partners.rate_laplacian(asked, np.ones((n, n))), gossip.laplacian(n, edges, rate=2.0)
    )


def test_bad_arguments():
    with pytest.raises(TopologyError):
        partners.asking([[0.0]], 0.5)
    with pytest.raises(ConfigError, match="prefer"):
        partners.asking(np.ones((3, 3)), 1.5)
    with pytest.raises(TopologyError):
        partners.slowest_rate_bound(1, 0.5)


def test_the_engine_has_as_many_candidates():
    source = Path(__file__).parents[2] / "ext/hvd_adpsgd/engine/partners.pyx"
    if not source.exists():
        pytest.skip("no checkout: the wheel holds no sources")
    assert f"CANDIDATES = {partners.CANDIDATES} " in source.read_text("utf-8")
