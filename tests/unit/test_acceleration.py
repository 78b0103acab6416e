"""Constants of A2CiD2 on the ring, against the pseudoinverse of its Laplacian."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies.a2cid2 import ring_constants
from tests.theorems import ring_edges


@pytest.mark.parametrize(
    ("n", "eta", "alpha_tilde"),
    [(8, 0.2893, 0.988), (16, 0.1425, 1.872), (32, 0.0704, 3.665), (64, 0.0350, 7.262)],
)
def test_the_table_of_the_ring(n, eta, alpha_tilde):
    assert ring_constants(n) == pytest.approx((eta, alpha_tilde), abs=5e-4)


@given(st.integers(4, 40))
def test_the_constants_by_the_pseudoinverse(n):
    """Of Lap = I - W: each super learner takes part in one exchange per step, with either neighbour alike."""
    edges = [np.eye(n)[i] - np.eye(n)[j] for i, j in ring_edges(n)]
    pull = sum(np.outer(edge, edge) for edge in edges) / 2
    chi1 = 1 / np.sort(np.linalg.eigvalsh(pull))[1]
    chi2 = max(edge @ np.linalg.pinv(pull) @ edge for edge in edges) / 2
    expected = 1 / (2 * (chi1 * chi2) ** 0.5), 0.5 * (chi1 / chi2) ** 0.5
    np.testing.assert_allclose(ring_constants(n), expected, rtol=1e-9)


@pytest.mark.parametrize("n", [2, 3])
def test_complete_graphs_are_refused(n):
    with pytest.raises(ConfigError, match=f"nothing to accelerate: on a ring of {n}"):
        ring_constants(n)
