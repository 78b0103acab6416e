"""Gossip in continuous time, accelerated by A2CiD2: its constants, which a plan needs.

Every edge of a graph exchanges at the times of its own Poisson process. Everything is float64 and small.

Legend: n super learners, models x_i, mean m, weights 1/2; in one unit of time each super learner takes part
in `rate` exchanges.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError

Matrix = npt.NDArray[np.float64]
Edges = Sequence[tuple[int, int]]


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

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023.
    """
    vectors, rates = _rated(n, edges, rate)
    return vectors * rates @ vectors.T


def acceleration(n: int, edges: Edges, rate: float = 1.0) -> Acceleration:
    """Return the constants of A2CiD2 on a connected graph; the arguments are those of `laplacian`.

    chi1 = 1 / lambda_2(Lap), chi2 = (1/2) max over edges of (e_i - e_j)^T Lap^+ (e_i - e_j). chi1 = chi2 on
    graphs where every exchange shrinks every mode alike, as on complete graphs, to which the rings of two and
    three belong.

    Raises:
        ConfigError: if chi1 = chi2: accelerated gossip is then no faster than plain gossip.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023, and their code, which refuses complete graphs.
    """
    pull = laplacian(n, edges, rate)
    # adding 1/n to all entries shifts the mean's eigenvalue from 0 to 1: Lap becomes invertible, and its
    # inverse acts on e_i - e_j as Lap^+ does
    inverse = np.linalg.inv(pull + 1 / n)
    vectors, _ = _rated(n, edges, rate)
    chi1 = 1 / float(np.linalg.eigvalsh(pull)[1])
    chi2 = float(np.sum(vectors * (inverse @ vectors), axis=0).max()) / 2
    if chi1 <= chi2 * (1 + 1e-9):
        raise ConfigError(
            f"nothing to accelerate: among {n} super learners on this graph chi1 = {chi1:.6g} and chi2 = "
            f"{chi2:.6g}, needed is chi1 > chi2. Every pair meets often enough; average without "
            "acceleration, or on a ring of 4 or more."
        )
    return Acceleration(chi1, chi2, 0.5 / math.sqrt(chi1 * chi2), 0.5 * math.sqrt(chi1 / chi2))


def _rated(n: int, edges: Edges, rate: float) -> tuple[Matrix, Matrix]:
    """Return the directions e_i - e_j as columns, shape (n, edges), and the rates r_ij; see `laplacian`."""
    vectors = np.array([np.eye(n)[i] - np.eye(n)[j] for i, j in edges]).T
    ends = np.abs(vectors)
    return vectors, rate / 2 * ((1 / np.maximum(ends.sum(axis=1), 1)) @ ends)
