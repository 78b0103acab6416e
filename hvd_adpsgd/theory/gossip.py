"""Gossip in continuous time, accelerated by A2CiD2: its constants, which a plan needs.

Every edge of a graph exchanges at the times of its own Poisson process. Everything is float64 and small.

Legend: n super learners, models x_i, mean m, weights 1/2; in one unit of time each super learner takes part
in `rate` exchanges.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.theory.topology import edge_vector, require_size

Matrix = npt.NDArray[np.float64]
Edges = Iterable[tuple[int, int]]


@dataclass(frozen=True)
class Acceleration:
    """Constants of A2CiD2, the continuous momentum that accelerates gossip on sparse graphs.

    Each super learner keeps a second model xt beside its model x. Between events dx = eta (xt - x) dt and
    dxt = eta (x - xt) dt; a gradient moves both alike; an exchange with peer j moves x by -(x - x_j)/2
    and xt by -alpha_tilde (x - x_j).

    Attributes:
        chi1: 1 / (smallest eigenvalue > 0 of the Laplacian), in units of time.
        chi2: half of the largest effective resistance of an edge, in units of time; chi2 <= chi1.
        eta: 1 / (2 sqrt(chi1 chi2)), per unit of time.
        alpha_tilde: sqrt(chi1 / chi2) / 2, a pure number >= 1/2.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023.
    """

    chi1: float
    chi2: float
    eta: float
    alpha_tilde: float


def laplacian(n: int, edges: Edges, rate: float = 1.0) -> Matrix:
    """Laplacian of random exchanges on a graph: dE[x]/dt = -(1/2) Lap x for weights 1/2.

    Lap = sum over edges of r_ij (e_i - e_j)(e_i - e_j)^T with r_ij = (rate/2)(1/deg_i + 1/deg_j):
    each super learner asks a uniformly random neighbour, at such a rate that it takes part in `rate`
    exchanges per unit of time on average. If all have equally many neighbours, Lap = rate (I - W) with W
    uniform over the neighbours.

    Args:
        n: number of super learners, n >= 2.
        edges: pairs of super learners that may exchange.
        rate: exchanges per super learner and unit of time, active and passive ones together, > 0.

    Returns:
        Lap, shape (n, n), symmetric, of zero row sums.

    Raises:
        TopologyError: if n < 2, there is no edge, or a rank is out of range.
        ConfigError: if the rate is not positive and finite.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023.
    """
    vectors, rates = _rated(n, edges, rate)
    return vectors * rates @ vectors.T


def acceleration(n: int, edges: Edges, rate: float = 1.0) -> Acceleration:
    """Return the constants of A2CiD2 on a graph, from its Laplacian; the arguments are those of `laplacian`.

    chi1 = 1 / lambda_2(Lap), chi2 = (1/2) max over edges of (e_i - e_j)^T Lap^+ (e_i - e_j).

    Raises:
        TopologyError: if the graph is not connected, or as `laplacian`.
        ConfigError: if the rate is not positive and finite.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023, and their code for the constants.
    """
    edges = list(edges)
    pull = laplacian(n, edges, rate)
    slowest = float(np.linalg.eigvalsh(pull)[1])
    if slowest <= 1e-12 * rate:
        raise TopologyError(
            f"not connected: the {len(edges)} edges given leave {n} super learners in several "
            "parts, needed is one. Pass topology.ring_edges(n)."
        )
    # adding 1/n to all entries shifts the mean's eigenvalue from 0 to 1: Lap becomes invertible, and its
    # inverse acts on e_i - e_j as Lap^+ does
    inverse = np.linalg.inv(pull + 1 / n)
    vectors, _ = _rated(n, edges, rate)
    chi1, chi2 = 1 / slowest, float(np.sum(vectors * (inverse @ vectors), axis=0).max()) / 2
    return Acceleration(chi1, chi2, 0.5 / math.sqrt(chi1 * chi2), 0.5 * math.sqrt(chi1 / chi2))


def require_acceleration(n: int, edges: Edges, rate: float = 1.0) -> Acceleration:
    """Return the constants of `acceleration`; raise ConfigError unless they accelerate gossip: chi1 > chi2.

    chi1 = chi2 on graphs where every exchange shrinks every mode alike, as on complete graphs, to which the
    rings of two and three belong.

    Raises:
        ConfigError: if chi1 = chi2, as on complete graphs: accelerated gossip is then no faster
            than plain gossip; or as `acceleration`.
        TopologyError: as `acceleration`.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023, whose code refuses complete graphs.
    """
    constants = acceleration(n, edges, rate)
    if constants.chi1 <= constants.chi2 * (1 + 1e-9):
        raise ConfigError(
            f"nothing to accelerate: among {n} super learners on this graph chi1 = "
            f"{constants.chi1:.6g} and chi2 = {constants.chi2:.6g}, needed is chi1 > chi2. Every "
            "pair meets often enough; average without acceleration, or on a ring of 4 or more."
        )
    return constants


def _rated(n: int, edges: Edges, rate: float) -> tuple[Matrix, Matrix]:
    """Return the directions e_i - e_j as columns, shape (n, edges), and the rates r_ij; see `laplacian`."""
    require_size(n, 2)
    if not 0 < rate < math.inf:
        raise ConfigError(
            f"bad argument: gossip in continuous time got rate = {rate}, allowed is > 0 and finite. Pass "
            "exchanges per super learner and unit of time."
        )
    vectors = np.array([edge_vector(n, i, j) for i, j in edges]).reshape(-1, n).T
    if vectors.size == 0:
        raise TopologyError(
            "no exchange possible: got 0 edges, needed is at least 1. Pass topology.ring_edges(n)."
        )
    ends = np.abs(vectors)
    return vectors, rate / 2 * ((1 / np.maximum(ends.sum(axis=1), 1)) @ ends)
