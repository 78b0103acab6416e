"""Closed forms that tests set against the engine, and the engine against them.

Legend: n super learners, models X (n, d), mean m, a round X <- T X with a mixing matrix T, symmetric
and doubly stochastic.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from hvd_adpsgd.strategies import FixedRing, GossipPGA, NoLoCo, RandomPairs, RandomRing, Strategy
from hvd_adpsgd.strategies.synchronous_gossip import ROUNDS_OF_PEERS, SynchronousGossip
from hvd_adpsgd.theory import topology


def ring_edges(n: int) -> list[tuple[int, int]]:
    """None for n = 1, one for n = 2, n for n >= 3."""
    return [(0, 1)][: n - 1] if n <= 2 else [(i, (i + 1) % n) for i in range(n)]


def pair_matrix(n: int, i: int, j: int, weight: float = 0.5) -> np.ndarray:
    """One exchange between i and j: T = I - w (e_i - e_j)(e_i - e_j)^T."""
    edge = np.eye(n)[i] - np.eye(n)[j]
    return np.eye(n) - weight * np.outer(edge, edge)


def ring_matrix(n: int) -> np.ndarray:
    """A round on the fixed ring: a third each of the own, the left and the right model; of two the mean."""
    weight = 1 / 2 if n == 2 else 1 / 3
    return sum((pair_matrix(n, i, j, weight) - np.eye(n) for i, j in ring_edges(n)), np.eye(n))


def permuted_ring_matrix(order: Sequence[int] | np.ndarray) -> np.ndarray:
    """A round on a ring in that order, position to rank: P^T T P, T the fixed ring's."""
    place_of = np.argsort(order)
    return ring_matrix(len(place_of))[np.ix_(place_of, place_of)]


def matching_matrix(peers: Sequence[int | None], weight: float = 0.5) -> np.ndarray:
    """A round in which disjoint pairs average; a rank without a peer keeps its model."""
    matrix = np.eye(len(peers))
    for i, j in enumerate(peers):
        if j is not None:
            assert peers[j] == i
            matrix[i, [i, j]] += [-weight, weight]
    return matrix


def uniform_matrix(n: int) -> np.ndarray:
    """An exact average."""
    return np.full((n, n), 1 / n)


def mixing_matrix(strategy: Strategy, n: int, round: int) -> np.ndarray:
    """A lock-step round of one of the library's strategies, without outer steps and second models."""
    if isinstance(strategy, SynchronousGossip):
        return mixing_matrix(strategy.base, n, round % ROUNDS_OF_PEERS)
    if isinstance(strategy, GossipPGA) and (round + 1) % strategy.period == 0:
        return uniform_matrix(n)
    if hasattr(strategy, "base"):
        return mixing_matrix(strategy.base, n, round)
    if isinstance(strategy, FixedRing):
        return ring_matrix(n)
    if isinstance(strategy, RandomRing):
        return permuted_ring_matrix(topology.ring_order(n, strategy.seed, round))
    if isinstance(strategy, RandomPairs | NoLoCo):
        return matching_matrix(topology.perfect_matching(n, strategy.seed, round))
    return uniform_matrix(n)


def consensus_distance(models: np.ndarray) -> float:
    """D = sqrt((1/n) sum_i |x_i - m|^2), in float64."""
    rows = np.asarray(models, dtype=np.float64)
    return float(np.sqrt(np.sum((rows - rows.mean(axis=0)) ** 2) / len(rows)))


# ---- factors on disagreement


def permuted_contraction(matrix: np.ndarray) -> float:
    """E |P^T T P x|^2 / |x|^2 = (|T|_F^2 - 1) / (n - 1) for every x of mean zero, P random.

    P^T T^2 P averages to a I + b 11^T over all permutations, and its trace fixes a.
    """
    n = len(matrix)
    return float((np.sum(matrix**2) - 1) / (n - 1)) if n > 1 else 0.0


def randomised_ring_contraction(n: int) -> float:
    """On squared disagreement, per round of a ring permuted anew: (n/3 - 1) / (n - 1) for n >= 3."""
    return (n / 3 - 1) / (n - 1) if n >= 3 else 0.0


def matching_contraction(n: int) -> float:
    """On squared disagreement, per random matching: (n/2 - 1) / (n - 1), 1/2 for odd n >= 3."""
    if n == 1:
        return 0.0
    return 0.5 if n % 2 else (n / 2 - 1) / (n - 1)


def event_contraction(n: int, edges: Iterable[tuple[int, int]], weight: float = 0.5) -> float:
    """Largest expected factor on squared disagreement per exchange over a random edge.

    T^2 = I - 2 w (1 - w) e e^T; the largest eigenvalue on disagreement of its mean over the edges.
    """
    vectors = np.array([np.eye(n)[i] - np.eye(n)[j] for i, j in edges])
    law = np.eye(n) - 2 * weight * (1 - weight) * vectors.T @ vectors / len(vectors)
    # moving the mean's eigenvalue from 1 to 0 cannot hide a mode: all of them lie in [0, 1]
    return float(max(np.linalg.eigvalsh(law - 1 / n).max(), 0.0))


def complete_event_contraction(n: int, weight: float = 0.5) -> float:
    """`event_contraction` on the complete graph: 1 - 4 w (1 - w) / (n - 1)."""
    return 1 - 4 * weight * (1 - weight) / (n - 1)


# ---- asking the fastest of three peers


def asking(seconds: np.ndarray, prefer: float, candidates: int = 3) -> np.ndarray:
    """Probability q_ij with which i asks j next, if prefer_fast = p and an exchange takes c_ij seconds.

    With probability p the fastest of d = `candidates` peers is asked, which are drawn independently and
    uniformly; of equally fast ones the first. With probability 1 - p it is the first. So, over the k = n - 1
    peers of i, with G_ij = #{m: c_im > c_ij} and E_ij = #{m: c_im >= c_ij},

        q_ij = (1 - p) / k + p / k sum over t < d of (G_ij / k)^t (E_ij / k)^(d - 1 - t)  >=  (1 - p) / k.
    """
    n = len(seconds)
    q = np.zeros((n, n))
    for i, j in itertools.permutations(range(n), 2):
        others = np.delete(seconds[i], i)
        above, least = np.mean(others > seconds[i, j]), np.mean(others >= seconds[i, j])
        wins = sum(above**t * least ** (candidates - 1 - t) for t in range(candidates))
        q[i, j] = (1 - prefer + prefer * wins) / (n - 1)
    return q
