"""Gossip in continuous time, plain and accelerated by A2CiD2: constants, and the decay rate of disagreement.

Every edge of a graph exchanges at the times of its own Poisson process. The closed forms and the equation of
second moments are meant for comparison with a run. Everything is float64 and small; nothing here runs inside
training, except A2CiD2's constants, which a plan needs.

Legend: n super learners, models x_i, mean m, weights 1/2; in one unit of time each super learner takes part
in `rate` exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.theory.mixing import edge_vector
from hvd_adpsgd.theory.topology import require_size

__all__ = [
    "Acceleration",
    "acceleration",
    "drift_gain",
    "gossip_decay",
    "laplacian",
    "require_acceleration",
    "slowest_disagreement",
]

Matrix = npt.NDArray[np.float64]
Edges = Iterable[tuple[int, int]]

# ---- constants ----------------------------------------------------------------------------------


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


def drift_gain(constants: Acceleration) -> float:
    """How many times less squared disagreement A2CiD2 leaves under a constant drift than plain gossip.

    Under a constant drift b_i of each super learner (because their data differ), the expected distance of the
    models from their mean converges to 2 Lap^+ b / (1/2 + alpha_tilde), with plain gossip (alpha_tilde = 1/2)
    to 2 Lap^+ b: the ratio of squares is (1/2 + alpha_tilde)^2.

    Returns:
        The ratio, >= 1.

    Source: derived here; the tests compare it with brute force.
    """
    return (0.5 + constants.alpha_tilde) ** 2


# ---- decay --------------------------------------------------------------------------------------


def gossip_decay(n: int, edges: Edges, constants: Acceleration | None = None) -> float:
    """Rate at which the expected squared disagreement of gossip decays in the long run.

    E[sum_i |x_i - m|^2] ~ exp(-decay t), where every edge exchanges at the times of a Poisson
    process, at the rates of `laplacian` for rate 1, with weights 1/2. Plain gossip on complete graphs
    has decay n / (2 (n - 1)). A typical single run decays at least as fast, and on small rings a tenth
    faster, because rare slow runs dominate the expectation.

    Args:
        n: number of super learners, 2 <= n <= 24, or up to 64 if the graph is circulant (unchanged when
            every rank i becomes i + 1 mod n, as the ring is).
        edges: pairs of super learners that may exchange.
        constants: constants of A2CiD2 for rate 1; None: plain gossip.

    Returns:
        The decay per unit of time; 0 if the graph is not connected, negative if the constants make
        disagreement grow.

    Raises:
        TopologyError: as `laplacian`, or if n is too large.

    Source: the equation of second moments, see `_moment_rates`; averaging by Poisson clocks is
        Boyd, Ghosh, Prabhakar, Shah, Randomized gossip algorithms, IEEE Trans. Inf. Theory 52(6).
    """
    return _slowest(n, list(edges), constants)[0]


def slowest_disagreement(n: int, edges: Edges, constants: Acceleration | None = None) -> Matrix:
    """Return the slowest mode of gossip: second moments of disagreement with E M(t) = exp(-gossip_decay t) M.

    A run that starts with these moments decays with `gossip_decay` from the beginning; from other starts
    faster modes decay first. Arguments and errors are those of `gossip_decay`.

    Returns:
        M, shape (copies, copies, n, n), M[a, b] = E[z_a z_b^T] with z_0 = x, and z_1 = xt with
        A2CiD2; scaled so that E|x|^2 = n.
    """
    return _slowest(n, list(edges), constants)[1]


# ---- the equation of second moments -------------------------------------------------------------


def _slowest(
    n: int, edges: list[tuple[int, int]], constants: Acceleration | None
) -> tuple[float, Matrix]:
    """Return minus the largest eigenvalue of `_moment_rates` on disagreement, and its eigenvector.

    The eigenvalue is real, with a positive semidefinite eigenvector. The eigenvector may be averaged over
    the symmetries of the graph, so on circulant graphs only moments that depend on i - j matter.
    """
    coupling, weights = np.zeros((1, 1)), np.array([0.5])
    if constants is not None:
        coupling = constants.eta * np.array([[-1.0, 1.0], [1.0, -1.0]])
        weights = np.array([0.5, constants.alpha_tilde])
    vectors, rates = _rated(n, edges, 1.0)
    circulant = _is_circulant(n, edges)
    if n > (most := 64 if circulant else 24):
        raise TopologyError(
            f"too many super learners: the decay of gossip was asked for n = {n}, allowed is "
            f"<= {most} on such a graph. Take a smaller one, or a ring."
        )
    patterns = list(_patterns(n, len(weights), circulant))
    away = np.eye(n) - 1 / n
    # moments of the mean do not decay, and would hide the decay of disagreement: let them decay fastest
    sink = 10 * (rates.sum() * (1 + weights @ weights) + np.abs(coupling).sum())
    columns = []
    for pattern in patterns:
        apart = away @ pattern @ away
        changed = _moment_rates(apart, vectors, rates, coupling, weights) - sink * (pattern - apart)
        columns.append([changed[tuple(np.argwhere(p)[0])] for p in patterns])
    values, shapes = np.linalg.eig(np.array(columns).T)
    slowest = int(values.real.argmax())
    moments = np.einsum("p,pabij->abij", shapes[:, slowest].real, np.array(patterns))
    return float(-values[slowest].real), moments * (n / np.trace(moments[0, 0]))


def _moment_rates(
    moments: Matrix, vectors: Matrix, rates: Matrix, coupling: Matrix, weights: Matrix
) -> Matrix:
    """Return dM/dt of the second moments M[a, b] = E[z_a z_b^T] of copies z_a of all models.

    Copies drift by dz_a = sum_b coupling_ab z_b dt; at rate r_e the exchange over e = e_i - e_j
    moves z_a by -weights_a e (e^T z_0). With U_a = M[a, 0] e and q = e^T M[0, 0] e,
    dM[a, b] = (coupling M)[a, b] + (M coupling^T)[a, b]
               + sum over e of r_e (w_a w_b q e e^T - w_b U_a e^T - w_a e U_b^T).

    Args:
        moments: M, shape (copies, copies, n, n).
        vectors: e as columns, shape (n, edges).
        rates: r_e, shape (edges,).
        coupling: coupling_ab, shape (copies, copies).
        weights: weights_a, shape (copies,).
    """
    drift = np.einsum("ac,cbij->abij", coupling, moments)
    seen = moments[:, 0] @ vectors
    square = np.sum(vectors * seen[0], axis=0)
    lost = np.einsum("b,aij->abij", weights, seen * rates @ vectors.T)
    kept = np.multiply.outer(np.outer(weights, weights), vectors * (rates * square) @ vectors.T)
    return drift + _turned(drift) + kept - lost - _turned(lost)


def _turned(moments: Matrix) -> Matrix:
    """Transpose second moments as one large matrix: [a, b, i, j] becomes [b, a, j, i]."""
    return moments.transpose(1, 0, 3, 2)


def _patterns(n: int, copies: int, circulant: bool) -> Iterator[Matrix]:
    """Yield a basis of the symmetric second moments: matrices of zeros and ones that do not overlap."""
    placement = np.arange(n)
    turns = (placement[:, None] - placement) % n
    if circulant:
        labels = np.minimum(turns, n - turns)
    else:
        labels = placement[:, None] * n + placement
    for a in range(copies):
        for b in range(a, copies):
            own = np.minimum(labels, labels.T) if a == b else labels
            for label in np.unique(own):
                pattern = np.zeros((copies, copies, n, n))
                pattern[a, b] = own == label
                pattern[b, a] = pattern[a, b].T
                yield pattern


def _is_circulant(n: int, edges: Sequence[tuple[int, int]]) -> bool:
    """Whether the graph is unchanged when every rank i becomes i + 1 mod n."""
    here, turned = ([sorted((i + k) % n for i in edge) for edge in edges] for k in (0, 1))
    return sorted(here) == sorted(turned)


# ---- graphs and checks --------------------------------------------------------------------------


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
