"""Mixing matrices and what follows from them: contraction, stationary disagreement, stragglers.

Theory as code, to predict what a run should show and to test the engine against. Everything is
float64 and small; nothing here runs inside training except `consensus_from_exchanges`.

Legend: n super learners (the papers' L), models x_i of length d as rows of X (n, d), mean m,
mixing matrix T (n, n), a round X <- T X. Disagreement is X - 1 m^T; T leaves the mean alone when
it is doubly stochastic, and shrinks disagreement when it is also symmetric with a spectral gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import TopologyError
from hvd_adpsgd.theory.topology import require_rank, require_size, ring_edges

__all__ = [
    "complete_event_contraction",
    "consensus_distance",
    "consensus_from_exchanges",
    "edge_vector",
    "event_contraction",
    "kappa_fixed",
    "kappa_random",
    "kappa_uniform",
    "matching_contraction",
    "matching_matrix",
    "odd_even_contraction",
    "pair_matrix",
    "permuted_contraction",
    "permuted_ring_matrix",
    "randomised_ring_contraction",
    "require_mixing",
    "ring_eigenvalues",
    "ring_event_contraction",
    "ring_matrix",
    "second_eigenvalue",
    "spectral_gap",
    "stationary_kappa",
    "straggler_epoch_factor",
    "uniform_matrix",
]

Matrix = npt.NDArray[np.float64]


# ---- matrices -----------------------------------------------------------------------------------


def pair_matrix(n: int, i: int, j: int, weight: float = 0.5) -> Matrix:
    """Mixing matrix of one exchange between super learners i and j.

    T = I - w (e_i - e_j)(e_i - e_j)^T: symmetric, doubly stochastic; a projection for w = 1/2.

    Args:
        n: number of super learners, n >= 2.
        i: outer rank in [0, n).
        j: the other one, distinct from i.
        weight: share w of the difference that each side moves, in [0, 1].

    Returns:
        T, shape (n, n).

    Raises:
        TopologyError: if i = j, a rank is out of range, or the weight is.

    Source: Lian et al., AD-PSGD, arXiv:1710.06952, section 3.
    """
    _require_weight(weight)
    edge = edge_vector(n, i, j)
    return np.eye(n) - weight * np.outer(edge, edge)


def ring_matrix(n: int) -> Matrix:
    """Mixing matrix of one round on the fixed ring.

    T = I - w sum over edges (e_i - e_j)(e_i - e_j)^T with w = 1/3: a third each for itself, left
    and right. A ring of two has one edge and takes w = 1/2, since weight 1/3 would leave the two
    apart (and counting the edge twice would overshoot); n = 2 and n = 3 are then the exact mean.

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
    """Mixing matrix of the ring on which the ranks sit in the given order.

    T = P^T T_1 P, with T_1 the fixed ring and P the permutation matrix of `order`.

    Args:
        order: permutation of 0..n-1, placement to rank, shape (n,); see `topology.ring_order`.

    Returns:
        T, shape (n, n).

    Raises:
        TopologyError: if `order` is not a permutation.

    Source: randomised mixing of ADPSGD, Zhang et al., arXiv:2002.01119 and arXiv:2110.11199.
    """
    placements = np.asarray(order)
    if placements.ndim != 1 or not np.array_equal(np.sort(placements), np.arange(placements.size)):
        raise TopologyError(
            f"not a permutation: permuted_ring_matrix got {placements.tolist()}, needed is every rank "
            "of 0..n-1 once. Pass the result of topology.ring_order."
        )
    seat_of = np.argsort(placements)
    return ring_matrix(placements.size)[np.ix_(seat_of, seat_of)]


def matching_matrix(peers: Sequence[int | None], weight: float = 0.5) -> Matrix:
    """Mixing matrix of a round in which disjoint pairs average.

    The product (in any order) of the pair matrices; who has no peer keeps its model.

    Args:
        peers: peer of each rank or None, length n; see `topology.perfect_matching`.
        weight: as in `pair_matrix`.

    Returns:
        T, shape (n, n).

    Raises:
        TopologyError: if the peers are not mutual, or a rank or the weight is out of range.

    Source: random pairs as in NoLoCo, Kolehmainen et al., arXiv:2506.10911.
    """
    n = len(peers)
    matrix = np.eye(n)
    for i, j in enumerate(peers):
        if j is None:
            continue
        _require_mutual(peers, i, j)
        if i < j:
            matrix = matrix @ pair_matrix(n, i, j, weight)
    return matrix


def uniform_matrix(n: int) -> Matrix:
    """Mixing matrix of an exact average: every entry 1/n.

    Raises:
        TopologyError: if n < 1.

    Source: the matrix with which D-PSGD (arXiv:1705.09056) is synchronous SGD.
    """
    require_size(n)
    return np.full((n, n), 1 / n)


# ---- one matrix ---------------------------------------------------------------------------------


def second_eigenvalue(matrix: npt.ArrayLike) -> float:
    """Largest factor by which one round of T can leave disagreement, in absolute value.

    rho = max |lambda| over the eigenvalues of T - 11^T/n, that is max(|lambda_2|, |lambda_n|).

    Args:
        matrix: T, shape (n, n), symmetric and doubly stochastic.

    Returns:
        rho in [0, 1]; 0 for n = 1.

    Raises:
        TopologyError: if T is not symmetric and doubly stochastic.

    Source: Lian et al., D-PSGD, arXiv:1705.09056, assumption 1.
    """
    mixing = require_mixing(matrix)
    return float(np.abs(np.linalg.eigvalsh(mixing - 1 / len(mixing))).max())


def spectral_gap(matrix: npt.ArrayLike) -> float:
    """1 - second_eigenvalue(T): the larger, the faster a round brings models together.

    Raises:
        TopologyError: if T is not symmetric and doubly stochastic.

    Source: 1 - second_eigenvalue.
    """
    return 1.0 - second_eigenvalue(matrix)


def permuted_contraction(matrix: npt.ArrayLike) -> float:
    """Expected factor on squared disagreement when T's ranks are permuted at random each round.

    E |P^T T P x|^2 / |x|^2 = c = (|T|_F^2 - 1) / (n - 1) for every x of mean zero: averaging
    P^T T^2 P over all permutations leaves a I + b 11^T, and the trace fixes a on mean-zero x.

    Args:
        matrix: T, shape (n, n), symmetric and doubly stochastic.

    Returns:
        c in [0, 1]; 0 for n = 1.

    Raises:
        TopologyError: if T is not symmetric and doubly stochastic.

    Source: the law is derived above; the scheme is Zhang et al., arXiv:2002.01119.
    """
    mixing = require_mixing(matrix)
    n = len(mixing)
    return float((np.sum(mixing**2) - 1) / (n - 1)) if n > 1 else 0.0


def stationary_kappa(matrix: npt.ArrayLike) -> float:
    """Stationary disagreement under gradient noise, for a fixed T.

    Under X <- T X - a N, N iid of variance s^2 per entry, each eigenmode j of disagreement
    settles at a^2 s^2 / (1 - lambda_j^2), so that (1/n) sum_i E|x_i - m|^2 / d = a^2 s^2 kappa with
    kappa = (1/n) sum over j >= 2 of 1 / (1 - lambda_j^2).

    Args:
        matrix: T, shape (n, n), symmetric and doubly stochastic, with a spectral gap.

    Returns:
        kappa, a pure number; 0 for n = 1.

    Raises:
        TopologyError: if T is not symmetric and doubly stochastic, or has no spectral gap.

    Source: the law is derived above, for the update of D-PSGD, arXiv:1705.09056.
    """
    mixing = require_mixing(matrix)
    n = len(mixing)
    modes = np.linalg.eigvalsh(mixing - 1 / n)
    if np.abs(modes).max() > 1 - 1e-12:
        raise TopologyError(
            "no stationary disagreement: stationary_kappa got a matrix of spectral gap 0, needed "
            "is > 0. Connect all super learners, or average the law over rounds."
        )
    # the mean's own mode was shifted to 0 and adds exactly 1 to the sum
    return float((np.sum(1 / (1 - modes**2)) - 1) / n)


# ---- closed forms -------------------------------------------------------------------------------


def ring_eigenvalues(n: int) -> Matrix:
    """Eigenvalues of `ring_matrix(n)` by Fourier mode.

    lambda_j = (1 + 2 cos(2 pi j / n)) / 3 for n >= 3, j = 0..n-1; (1, 0) for n = 2, (1) for n = 1.

    Returns:
        Shape (n,), in the order of j.

    Raises:
        TopologyError: if n < 1.

    Source: circulant matrices; D-PSGD on rings, arXiv:1705.09056.
    """
    require_size(n)
    if n <= 2:
        return np.array([1.0, 0.0])[:n]
    modes = np.arange(n, dtype=np.float64)
    return (1 + 2 * np.cos(2 * np.pi * modes / n)) / 3


def randomised_ring_contraction(n: int) -> float:
    """Expected factor on squared disagreement per round of a freshly permuted ring.

    c = (n/3 - 1) / (n - 1) for n >= 3, towards 1/3 for large n; 0 for n <= 3 (the exact mean).

    Raises:
        TopologyError: if n < 1.

    Source: `permuted_contraction` with |T|_F^2 = n/3; scheme of arXiv:2002.01119.
    """
    require_size(n)
    return (n / 3 - 1) / (n - 1) if n >= 3 else 0.0


def matching_contraction(n: int) -> float:
    """Expected factor on squared disagreement per round of a random perfect matching.

    c = (n/2 - 1) / (n - 1) for even n, towards 1/2 for large n; 1/2 for odd n >= 3, where one
    sits out; 0 for n = 1.

    Raises:
        TopologyError: if n < 1.

    Source: `permuted_contraction` with |T|_F^2 = n/2 (n even) or (n+1)/2 (n odd).
    """
    require_size(n)
    if n == 1:
        return 0.0
    return 0.5 if n % 2 else (n / 2 - 1) / (n - 1)


def odd_even_contraction(n: int) -> float:
    """Factor on the slowest disagreement mode per two half rounds of the odd/even ring.

    cos^2(2 pi / n) for even n >= 4; 0 for n = 2. After the first half round the n/2 pairs sit on
    a ring of their own, on which the second one mixes with weights 1/4, 1/2, 1/4.

    Raises:
        TopologyError: if n is odd or less than 2.

    Source: derived here; the tests hold it against brute force.
    """
    require_size(n, 2)
    if n % 2:
        raise TopologyError(
            f"no odd/even matching: odd_even_contraction got n = {n}, allowed are even n. "
            "Use matching_contraction."
        )
    return float(np.cos(2 * np.pi / n) ** 2) if n > 2 else 0.0


def event_contraction(n: int, edges: Iterable[tuple[int, int]], weight: float = 0.5) -> float:
    """Largest expected factor on squared disagreement per exchange over a random edge.

    With T = I - w e e^T and e = e_i - e_j, T^2 = I - 2 w (1 - w) e e^T. The factor is the largest
    eigenvalue, on disagreement, of I - 2 w (1 - w) * mean over edges of e e^T: the slowest mode.

    Args:
        n: number of super learners, n >= 2.
        edges: the pairs that exchange, each as likely as the others.
        weight: as in `pair_matrix`.

    Returns:
        The factor, in [0, 1]; 1 if the graph is not connected.

    Raises:
        TopologyError: if there is no edge, or a rank or the weight is out of range.

    Source: Boyd, Ghosh, Prabhakar, Shah, Randomized gossip algorithms, IEEE Trans. Inf. Theory
        52(6), 2006; AD-PSGD's event view, arXiv:1710.06952.
    """
    _require_weight(weight)
    vectors = np.array([edge_vector(n, i, j) for i, j in edges])
    if vectors.size == 0:
        raise TopologyError(
            "no exchange possible: event_contraction got 0 edges, needed is at least 1. "
            "Pass topology.ring_edges(n) or topology.complete_edges(n)."
        )
    law = np.eye(n) - 2 * weight * (1 - weight) * vectors.T @ vectors / len(vectors)
    # moving the mean's eigenvalue from 1 to 0 cannot hide a mode: all of them lie in [0, 1]
    return float(max(np.linalg.eigvalsh(law - 1 / n).max(), 0.0))


def complete_event_contraction(n: int, weight: float = 0.5) -> float:
    """Closed form of `event_contraction` on the complete graph, exact for every mode.

    1 - 4 w (1 - w) / (n - 1); for w = 1/2, 1 - 1/(n - 1).

    Raises:
        TopologyError: if n < 2 or the weight is out of range.

    Source: Boyd et al., Randomized gossip algorithms, IEEE Trans. Inf. Theory 2006; derived here;
        the tests hold it against brute force.
    """
    require_size(n, 2)
    _require_weight(weight)
    return 1 - 4 * weight * (1 - weight) / (n - 1)


def ring_event_contraction(n: int, weight: float = 0.5) -> float:
    """Closed form of `event_contraction` on the ring.

    1 - 4 w (1 - w) (1 - cos(2 pi / n)) / n; for w = 1/2, 1 - (1 - cos(2 pi / n)) / n.

    Raises:
        TopologyError: if n < 2 or the weight is out of range.

    Source: Boyd et al., Randomized gossip algorithms, IEEE Trans. Inf. Theory 2006; derived here;
        the tests hold it against brute force.
    """
    require_size(n, 2)
    _require_weight(weight)
    return float(1 - 4 * weight * (1 - weight) * (1 - np.cos(2 * np.pi / n)) / n)


def kappa_fixed(n: int) -> float:
    """Stationary disagreement of the fixed ring; see `stationary_kappa`. Grows like n/8.

    kappa = (1/n) sum over j >= 1 of 1 / (1 - lambda_j^2), lambda_j of `ring_eigenvalues`.

    Raises:
        TopologyError: if n < 1.

    Source: `stationary_kappa` of the ring.
    """
    modes = ring_eigenvalues(n)[1:]
    return float(np.sum(1 / (1 - modes**2)) / n)


def kappa_random(n: int, contraction: float | None = None) -> float:
    """Stationary disagreement when peers are redrawn each round; see `stationary_kappa`.

    kappa = (n - 1) / (n (1 - c)), with c the expected factor on squared disagreement per round.

    Args:
        n: number of super learners.
        contraction: c in [0, 1); default: the randomised ring's, for which kappa tends to 3/2.

    Raises:
        TopologyError: if n < 1 or c is not in [0, 1).

    Source: derived here; the tests hold it against brute force.
    """
    factor = randomised_ring_contraction(n) if contraction is None else contraction
    require_size(n)
    if not 0 <= factor < 1:
        raise TopologyError(
            f"no stationary disagreement: kappa_random got contraction = {factor}, allowed is "
            ">= 0 and < 1. Pass the factor of one round, as matching_contraction(n)."
        )
    return (n - 1) / (n * (1 - factor))


def kappa_uniform(n: int) -> float:
    """Stationary disagreement under an exact average each round: (n - 1) / n.

    Raises:
        TopologyError: if n < 1.

    Source: `stationary_kappa` of the exact mean.
    """
    require_size(n)
    return (n - 1) / n


# ---- measured -----------------------------------------------------------------------------------


def consensus_distance(models: npt.ArrayLike) -> float:
    """Root mean square distance of the models from their mean.

    D = sqrt((1/n) sum_i |x_i - m|^2).

    Args:
        models: X, shape (n, d), one model per row; computed in float64.

    Raises:
        TopologyError: if X has no row or is not two-dimensional.

    Source: the definition in Koloskova et al., ICML 2020 (unified theory of decentralized SGD).
    """
    rows = np.asarray(models, dtype=np.float64)
    if rows.ndim != 2 or len(rows) == 0:
        raise TopologyError(
            f"no models: consensus_distance got shape {rows.shape}, needed is (n, d) with "
            "n >= 1. Stack one flat model per row."
        )
    away = rows - rows.mean(axis=0)
    return float(np.sqrt(np.sum(away**2) / len(rows)))


def consensus_from_exchanges(mean_squared_distance: float, n: int) -> float:
    """Consensus distance as seen by exchanges between uniformly random pairs.

    sum over i != j of |x_i - x_j|^2 = 2 n sum_i |x_i - m|^2, hence
    D^2 = (n - 1) / (2 n) * E|x_i - x_j|^2 over pairs i != j. On a fixed ring, whose neighbours are
    nearer than strangers, it is too small.

    Args:
        mean_squared_distance: mean of |x_i - x_j|^2 over the exchanges, >= 0.
        n: number of super learners.

    Returns:
        D, in the unit of `consensus_distance`.

    Raises:
        TopologyError: if n < 1 or the distance is negative or NaN.

    Source: the identity above; the tests hold it against brute force.
    """
    require_size(n)
    if not mean_squared_distance >= 0:
        raise TopologyError(
            f"no distance: consensus_from_exchanges got {mean_squared_distance}, needed is >= 0. "
            "Pass a mean of squared distances."
        )
    return float(np.sqrt((n - 1) / (2 * n) * mean_squared_distance))


def straggler_epoch_factor(n: int, slowdown: float) -> float:
    """How much longer an epoch takes when one of n learners is slower and nobody waits for it.

    n / (n - 1 + 1/s): the others keep their pace and share what the slow one does not do. A
    synchronous scheme takes s.

    Args:
        n: number of (super) learners.
        slowdown: s >= 1, how many times slower the one is; may be infinite (it stopped).

    Raises:
        TopologyError: if n < 1, s < 1, or a single learner has stopped.

    Source: ideal model of the straggler experiments of AD-PSGD, arXiv:1710.06952.
    """
    require_size(n)
    if not slowdown >= 1 or (n == 1 and slowdown == np.inf):
        raise TopologyError(
            f"no such straggler: straggler_epoch_factor got slowdown = {slowdown} of n = {n}, "
            "needed is >= 1, and finite if n = 1. Pass how many times slower the learner is."
        )
    return n / (n - 1 + 1 / slowdown)


# ---- checks -------------------------------------------------------------------------------------


def edge_vector(n: int, i: int, j: int) -> Matrix:
    """The direction in which an exchange between i and j moves: e_i - e_j, shape (n,).

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


def _require_mutual(peers: Sequence[int | None], i: int, j: int) -> None:
    require_rank(len(peers), j)
    if j == i or peers[j] != i:
        raise TopologyError(
            f"not a matching: the peer of {i} is {j}, but that of {j} is {peers[j]}. "
            "Pass the result of topology.perfect_matching."
        )


def _require_weight(weight: float) -> None:
    if not 0 <= weight <= 1:
        raise TopologyError(
            f"bad weight: got {weight}, allowed is >= 0 and <= 1. "
            "Pass the share of the difference that each side moves, 1/2 for the mean."
        )


def require_mixing(matrix: npt.ArrayLike) -> Matrix:
    """The matrix as float64, shape (n, n), once it is known to mix.

    Raises:
        TopologyError: if it is not symmetric and doubly stochastic.

    Source: the definition of a doubly stochastic matrix.
    """
    mixing = np.asarray(matrix, dtype=np.float64)
    if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1] or mixing.size == 0:
        raise TopologyError(
            f"not a mixing matrix: got shape {mixing.shape}, needed is (n, n). "
            "Pass a matrix of this module."
        )
    off = max(np.abs(mixing - mixing.T).max(), np.abs(mixing.sum(axis=0) - 1).max())
    if not (off <= 1e-9 and mixing.min() >= -1e-9):
        raise TopologyError(
            f"not a mixing matrix: got asymmetry or column sums off by {off:.3g}, smallest entry "
            f"{mixing.min():.3g}; allowed are 1e-9 and >= 0. Pass a symmetric, doubly stochastic "
            "matrix."
        )
    return mixing
