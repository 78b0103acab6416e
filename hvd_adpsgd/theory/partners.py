"""Asking the fastest of three peers: how often each pair exchanges, and how slowly the models can approach.

Everything is float64 and small; nothing here runs inside training.

Legend: n super learners, seconds c_ij of an exchange between i and j, probability p (the option
prefer_fast). Each super learner draws peers uniformly, as `random_pairs` does.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.theory.topology import require_size

__all__ = ["CANDIDATES", "asking", "rate_laplacian", "slowest_rate_bound"]

Matrix = npt.NDArray[np.float64]
CANDIDATES = 3  # as in ext/hvd_adpsgd/engine/partners.pyx


def asking(seconds: npt.ArrayLike, prefer: float) -> Matrix:
    """Return the probability q_ij with which super learner i asks j next.

    With probability p the fastest of CANDIDATES = d peers is asked, which are drawn independently and
    uniformly; of equally fast ones the first. With probability 1 - p it is the first. So, over the k = n - 1
    peers of i, with G_ij = #{m: c_im > c_ij} and E_ij = #{m: c_im >= c_ij},

        q_ij = (1 - p) / k + p / k sum over t < d of (G_ij / k)^t (E_ij / k)^(d - 1 - t)  >=  (1 - p) / k.

    Args:
        seconds: c, shape (n, n), n >= 2; the diagonal is not read.
        prefer: p, in [0, 1].

    Returns:
        q, shape (n, n), of row sums 1 and diagonal 0.

    Raises:
        TopologyError: if n < 2.
        ConfigError: if p is out of range.

    Source: derived here; the tests compare it with draws.
    """
    c = np.asarray(seconds, dtype=np.float64)
    n = len(c)
    require_size(n, 2)
    if not 0 <= prefer <= 1:
        raise ConfigError(
            f"bad argument: asking got prefer = {prefer}, allowed is 0 to 1. Pass the "
            "strategy's prefer_fast."
        )
    q = np.zeros((n, n))
    for i, j in itertools.permutations(range(n), 2):
        others = np.delete(c[i], i)
        above, least = np.mean(others > c[i, j]), np.mean(others >= c[i, j])
        wins = sum(above**t * least ** (CANDIDATES - 1 - t) for t in range(CANDIDATES))
        q[i, j] = (1 - prefer + prefer * wins) / (n - 1)
    return q


def rate_laplacian(asked: Matrix, seconds: npt.ArrayLike) -> Matrix:
    """Return the Laplacian of exchanges per second, if each super learner asks without a pause.

    Lap = sum over i, j of r_ij (e_i - e_j)(e_i - e_j)^T with r_ij = q_ij / sum_k q_ik c_ik. With weights 1/2
    dE[x]/dt = -(1/2) Lap x, so the slowest disagreement decays at half of the second smallest eigenvalue.
    That peers are busy, and that both exchanges of a super learner share its link, is left out.

    Args:
        asked: q, see `asking`.
        seconds: c, of an exchange; the diagonal is not read.

    Returns:
        Lap, shape (n, n), symmetric, of zero row sums.

    Source: the definition; for equal seconds it is `gossip.laplacian` of the complete graph.
    """
    c = np.array(seconds, dtype=np.float64)
    np.fill_diagonal(c, 0.0)
    rates = asked / np.sum(asked * c, axis=1, keepdims=True)
    both = rates + rates.T
    return np.asarray(np.diag(both.sum(axis=1)) - both)


def slowest_rate_bound(n: int, prefer: float) -> float:
    """Return a lower bound of the second smallest eigenvalue per ask: (1 - p) times that of uniform pairs.

    q_ij >= (1 - p) / (n - 1) for any seconds, so the Laplacian of q + q^T is at least (1 - p) times that of
    uniform pairs, whose eigenvalues but one are 2 n / (n - 1), asked by both sides.

    Raises:
        TopologyError: if n < 2.

    Source: Weyl's inequality.
    """
    require_size(n, 2)
    return (1 - prefer) * 2 * n / (n - 1)
