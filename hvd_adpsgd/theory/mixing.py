"""Mixing matrices: what one round of a strategy does to the models of all super learners.

Everything is float64 and small; nothing here runs inside training except `consensus_from_exchanges`.

Legend: n super learners (the papers' L), models x_i of length d as rows of X (n, d), mean m,
mixing matrix T (n, n), a round X <- T X. All matrices here are symmetric and doubly stochastic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import TopologyError
from hvd_adpsgd.theory.topology import require_rank, require_size, ring_edges

__all__ = [
    "consensus_from_exchanges",
    "edge_vector",
    "matching_matrix",
    "permuted_ring_matrix",
    "ring_matrix",
    "uniform_matrix",
]

Matrix = npt.NDArray[np.float64]


def ring_matrix(n: int) -> Matrix:
    """Mixing matrix of one round on the fixed ring.

    T = I - w sum over edges (e_i - e_j)(e_i - e_j)^T with w = 1/3: a third each of the own model, the left
    and the right neighbour's. A ring of two has one edge and takes w = 1/2, since weight 1/3 would leave the
    two models apart (and counting the edge twice would overshoot); n = 2 and n = 3 are then the exact mean.

    Returns:
        T, shape (n, n), symmetric and doubly stochastic.

    Raises:
        TopologyError: if n < 1.

    Source: Zhang et al., arXiv:1907.05701 and arXiv:2002.01119 (ring of learners).
    """
    weight = 1 / 2 if n == 2 else 1 / 3
    matrix = np.eye(n) if n > 0 else np.zeros((0, 0))
    for i, j in ring_edges(n):
        edge = edge_vector(n, i, j)
        matrix -= weight * np.outer(edge, edge)
    return matrix


def permuted_ring_matrix(order: npt.ArrayLike) -> Matrix:
    """Mixing matrix of one round on a ring of super learners in the given order.

    T = P^T T_1 P, with T_1 the fixed ring and P the permutation matrix of `order`.

    Args:
        order: permutation of 0..n-1, position to rank, shape (n,); see `topology.ring_order`.

    Returns:
        T, shape (n, n).

    Raises:
        TopologyError: if `order` is not a permutation.

    Source: randomised mixing of ADPSGD, Zhang et al., arXiv:2002.01119 and arXiv:2110.11199.
    """
    ranks = np.asarray(order)
    if ranks.ndim != 1 or not np.array_equal(np.sort(ranks), np.arange(ranks.size)):
        raise TopologyError(
            f"not a permutation: permuted_ring_matrix got {ranks.tolist()}, needed is every rank "
            "of 0..n-1 once. Pass the result of topology.ring_order."
        )
    place_of = np.argsort(ranks)
    return ring_matrix(ranks.size)[np.ix_(place_of, place_of)]


def matching_matrix(peers: Sequence[int | None], weight: float = 0.5) -> Matrix:
    """Mixing matrix of a round in which disjoint pairs average.

    T = I - w sum over pairs (e_i - e_j)(e_i - e_j)^T; a rank without a peer keeps its model.

    Args:
        peers: peer of each rank or None, length n; see `topology.perfect_matching`.
        weight: share w of the difference by which each side of a pair moves.

    Returns:
        T, shape (n, n).

    Raises:
        TopologyError: if the peers are not mutual, or a rank is out of range.

    Source: random pairs as in NoLoCo, Kolehmainen et al., arXiv:2506.10911.
    """
    n = len(peers)
    matrix = np.eye(n)
    for i, j in enumerate(peers):
        if j is None:
            continue
        edge = edge_vector(n, i, j)
        if peers[j] != i:
            raise TopologyError(
                f"not a matching: the peer of {i} is {j}, but that of {j} is {peers[j]}. "
                "Pass the result of topology.perfect_matching."
            )
        if i < j:
            matrix -= weight * np.outer(edge, edge)
    return matrix


def uniform_matrix(n: int) -> Matrix:
    """Mixing matrix of an exact average: every entry 1/n.

    Raises:
        TopologyError: if n < 1.

    Source: the matrix with which D-PSGD (arXiv:1705.09056) is synchronous SGD.
    """
    require_size(n)
    return np.full((n, n), 1 / n)


def consensus_from_exchanges(mean_squared_distance: float, n: int) -> float:
    """Estimate the consensus distance from the distances in exchanges between uniformly random pairs.

    sum over i != j of |x_i - x_j|^2 = 2 n sum_i |x_i - m|^2, hence
    D^2 = (n - 1) / (2 n) * E|x_i - x_j|^2 over pairs i != j. On a fixed ring the estimate is too small,
    because the models of neighbours are closer to each other than those of other pairs.

    Args:
        mean_squared_distance: mean of |x_i - x_j|^2 over the exchanges, >= 0.
        n: number of super learners.

    Returns:
        D = sqrt((1/n) sum_i |x_i - m|^2).

    Raises:
        TopologyError: if n < 1 or the distance is negative or NaN.

    Source: the identity above; the tests compare it with brute force.
    """
    require_size(n)
    if not mean_squared_distance >= 0:
        raise TopologyError(
            f"no distance: consensus_from_exchanges got {mean_squared_distance}, needed is >= 0. "
            "Pass a mean of squared distances."
        )
    return float(np.sqrt((n - 1) / (2 * n) * mean_squared_distance))


def edge_vector(n: int, i: int, j: int) -> Matrix:
    """The direction e_i - e_j along which an exchange between i and j moves the models, shape (n,).

    Raises:
        TopologyError: if i = j or a rank is out of range.

    Source: e_i - e_j.
    """
    require_rank(n, i)
    require_rank(n, j)
    if i == j:
        raise TopologyError(
            f"no such pair: super learner {i} was paired with itself among n = {n}. "
            "Pass two distinct outer ranks."
        )
    vector = np.zeros(n)
    vector[i], vector[j] = 1.0, -1.0
    return vector
