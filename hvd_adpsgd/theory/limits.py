"""What theory predicts for the schemes: step limits, spread, rates, stragglers.

Closed forms to set against a run, as in `mixing`, which holds the matrices and their spectra; gossip at
the times of Poisson processes is in `continuous`.
Everything is float64 and small; nothing here runs inside training.

Legend: n super learners (flat: learners), models x_i, mean m, mixing matrix T (n, n) with
eigenvalues lambda_j, lambda_1 = 1 being the mean's; learning rate alpha, curvature h of a
quadratic loss h x^2 / 2, and a = alpha h, a pure number, called the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.theory.mixing import require_mixing, straggler_epoch_factor, uniform_matrix
from hvd_adpsgd.theory.topology import require_size

__all__ = [
    "Noise",
    "adapt_then_combine_limit",
    "adapt_while_communicate_limit",
    "adpsgd_bound",
    "adpsgd_rate",
    "allreduce_share",
    "averaging_speedup",
    "delay_by_one_limit",
    "delayed_limit",
    "effective_rate",
    "expected_staleness",
    "kappa_delay_by_one",
    "kappa_on_quadratic",
    "loss_gap",
    "rounds_to_shrink",
    "straggler_epoch_time",
    "straggler_staleness",
    "straggler_throughput",
]

Matrix = npt.NDArray[np.float64]

# ---- how large a step a quadratic bears ---------------------------------------------------------


def adapt_while_communicate_limit(matrix: npt.ArrayLike) -> float:
    """Step at which descent that mixes meanwhile stops being stable: X <- T X - alpha g(X).

    Mode j follows x <- (lambda_j - a) x, stable for |lambda_j - a| < 1. The binding mode has the
    smallest eigenvalue, hence a < 1 + lambda_n: 2/3 on a fixed ring of even n, 1 for an exact
    average. The mean alone would bear a < 2.

    Args:
        matrix: T, shape (n, n), symmetric and doubly stochastic.

    Returns:
        The limit on a = alpha h, in [0, 2]; 2 for n = 1 (plain SGD).

    Raises:
        TopologyError: if T is not symmetric and doubly stochastic.

    Source: the law is derived above, for the update of D-PSGD, arXiv:1705.09056.
    """
    return float(1 + np.linalg.eigvalsh(require_mixing(matrix)).min())


def adapt_then_combine_limit(matrix: npt.ArrayLike) -> float:
    """Step at which descent that mixes afterwards stops being stable: X <- T (X - alpha g(X)).

    Mode j follows x <- lambda_j (1 - a) x. Since |lambda_j| <= 1, the mean binds: a < 2, whatever
    T, as for synchronous SGD (T = 11^T / n).

    Args:
        matrix: T, shape (n, n), symmetric and doubly stochastic.

    Returns:
        2.

    Raises:
        TopologyError: if T is not symmetric and doubly stochastic.

    Source: Sayed, Adaptation, learning, and optimization over networks, 2014, for the order; the
        limit derived here; the tests hold it against brute force.
    """
    require_mixing(matrix)
    return 2.0


def delayed_limit(delay: int) -> float:
    """Step at which SGD on gradients that are `delay` steps old stops being stable.

    x_{k+1} = x_k - a x_{k-tau} has its first root on the unit circle at
    a = 2 sin(pi / (2 (2 tau + 1))): 2 without delay, 1 for tau = 1, near pi / (2 tau) for large.

    Args:
        delay: tau >= 0, in steps.

    Returns:
        The limit on a = alpha h.

    Raises:
        ConfigError: if the delay is negative.

    Source: the characteristic equation z^(d+1) = z^d - a of a delayed quadratic; derived here;
        the tests hold it against brute force.
    """
    _require(delay >= 0, "delayed_limit", f"delay = {delay}", ">= 0", "Pass steps of delay.")
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def delay_by_one_limit(n: int, gradient_at: Literal["own", "mean"] = "own") -> float:
    """Step at which delay-by-one stops being stable: the mean is taken while the gradient is.

    With "own", x_i <- m - alpha g(x_i): the gradient belongs to the model that has not been
    averaged yet. Disagreement follows x <- -a x, hence a < 1 (for n = 1, plain SGD: 2). With
    "mean", all learners hold the same model and m <- m - alpha g(previous m): a < 1 by
    `delayed_limit(1)`.

    Args:
        n: number of learners.
        gradient_at: where the gradient is taken.

    Returns:
        The limit on a = alpha h.

    Raises:
        TopologyError: if n < 1.
        ConfigError: if `gradient_at` is neither "own" nor "mean".

    Source: the law is derived above. The scheme is named in Zhang et al., arXiv:2002.01119 and
        arXiv:2110.11199; which of the two forms is theirs is not settled here.
    """
    _require(
        gradient_at in ("own", "mean"),
        "delay_by_one_limit",
        f"gradient_at = {gradient_at!r}",
        '"own" or "mean"',
        "Pass the model at which the gradient is taken.",
    )
    if gradient_at == "mean":
        require_size(n)
        return delayed_limit(1)
    return adapt_while_communicate_limit(uniform_matrix(n))


# ---- how far the models stay apart --------------------------------------------------------------


def kappa_on_quadratic(
    matrix: npt.ArrayLike, step: float, order: Literal["while", "then"] = "while"
) -> float:
    """Stationary disagreement under gradient noise on a quadratic.

    As `mixing.stationary_kappa`, in which (1/n) sum_i E|x_i - m|^2 / d = alpha^2 s^2 kappa, with
    curvature. Adapt-while-communicate, T X - alpha (h X + N):
        kappa = (1/n) sum over j >= 2 of 1 / (1 - (lambda_j - a)^2);
    adapt-then-combine, T (X - alpha (h X + N)):
        kappa = (1/n) sum over j >= 2 of lambda_j^2 / (1 - lambda_j^2 (1 - a)^2).

    Args:
        matrix: T, shape (n, n), symmetric and doubly stochastic.
        step: a = alpha h >= 0; 0 for no curvature.
        order: "while" or "then", as above.

    Returns:
        kappa, a pure number; 0 for n = 1.

    Raises:
        TopologyError: if T is not symmetric and doubly stochastic.
        ConfigError: if the order is unknown, the step is negative, or disagreement diverges.

    Source: the law is derived above, for the update of D-PSGD, arXiv:1705.09056.
    """
    _require(
        order in ("while", "then"),
        "kappa_on_quadratic",
        f"order = {order!r}",
        '"while" or "then"',
        "Say whether gradients are added while mixing, or mixed with the models.",
    )
    modes = _disagreement_modes(matrix)
    factors, noise = (modes - step, 1.0) if order == "while" else (modes * (1 - step), modes**2)
    largest = float(np.abs(factors).max(initial=0))
    _require(
        step >= 0 and largest < 1 - 1e-12,
        "kappa_on_quadratic",
        f"step = {step}, by which the largest factor on disagreement is {largest:.6g}",
        "step >= 0 and a factor < 1",
        "Lower the learning rate, or connect all learners.",
    )
    return float(np.sum(noise / (1 - factors**2)) / (len(modes) + 1))


def kappa_delay_by_one(n: int, step: float = 0.0) -> float:
    """Stationary disagreement of delay-by-one; see `kappa_on_quadratic`.

    x_i - m is alpha times what the last gradient had of its own: kappa = (n - 1) / (n (1 - a^2)),
    which without curvature is one step of noise, (n - 1) / n.

    Args:
        n: number of learners.
        step: a = alpha h in [0, 1).

    Raises:
        TopologyError: if n < 1.
        ConfigError: if the step is not in [0, 1).

    Source: derived here; the tests hold it against brute force.
    """
    require_size(n)
    _require(
        0 <= step < 1,
        "kappa_delay_by_one",
        f"step = {step}",
        ">= 0 and < 1",
        "Lower the learning rate.",
    )
    return (n - 1) / (n * (1 - step**2))


def loss_gap(hessian: npt.ArrayLike, models: npt.ArrayLike) -> float:
    """By how much disagreement raises the mean loss of the models above the loss of their mean.

    (1/n) sum_i f(x_i) - f(m) = Tr(H Xi) / 2 with Xi = (1/n) sum_i (x_i - m)(x_i - m)^T; exact for
    a quadratic f, of third order in x_i - m otherwise. It is the term by which the mean model of
    decentralised SGD descends a flattened loss, f + Tr(H Xi) / 2.

    Args:
        hessian: H at the mean, shape (d, d).
        models: X, shape (n, d), one model per row.

    Returns:
        The gap, in the unit of the loss.

    Raises:
        TopologyError: if the shapes do not fit.

    Source: "Decentralized SGD and average-direction SAM are asymptotically equivalent", ICML 2023.
    """
    rows, curvature = np.asarray(models, np.float64), np.asarray(hessian, np.float64)
    if rows.ndim != 2 or len(rows) == 0 or curvature.shape != (rows.shape[1],) * 2:
        raise TopologyError(
            f"shapes do not fit: loss_gap got hessian {curvature.shape} and models {rows.shape}, "
            "needed are (d, d) and (n, d) with n >= 1. Stack one flat model per row."
        )
    away = rows - rows.mean(axis=0)
    return float(np.sum(away @ curvature * away) / (2 * len(rows)))


def effective_rate(rate: float, gradients: npt.ArrayLike, at_mean: npt.ArrayLike) -> float:
    """The learning rate with which the mean model seems to descend: alpha <g_a, g> / |g|^2.

    g_a = (1/n) sum_i g(x_i) is what moves the mean model, g = g(m) the gradient there. On a quadratic
    both are equal, and so are the rates, however far the models are apart. Elsewhere it falls where the
    models see a rougher loss than their mean, and so adjusts itself.

    Args:
        rate: alpha > 0.
        gradients: g(x_i), shape (n, d), one row per model.
        at_mean: g(m), shape (d,), not zero.

    Returns:
        alpha_e, in the unit of alpha.

    Raises:
        TopologyError: if the shapes do not fit.
        ConfigError: if g(m) is zero.

    Source: "Loss landscape dependent self-adjusting learning rates in decentralized SGD",
        arXiv:2112.01433.
    """
    rows, g = np.asarray(gradients, np.float64), np.asarray(at_mean, np.float64)
    if rows.ndim != 2 or len(rows) == 0 or g.shape != rows.shape[1:]:
        raise TopologyError(
            f"shapes do not fit: effective_rate got gradients {rows.shape} and at_mean {g.shape}, needed "
            "are (n, d) and (d,) with n >= 1. Stack one flat gradient per row."
        )
    square = float(g @ g)
    _require(square > 0, "effective_rate", "|g(m)| = 0", "> 0", "At a minimum no rate can be seen.")
    return rate * float(rows.mean(axis=0) @ g) / square


# ---- how fast it converges, in the order of things ----------------------------------------------


@dataclass(frozen=True)
class Noise:
    """What the AD-PSGD theorem knows of a task.

    Attributes:
        batch: M, samples per gradient, >= 1.
        smoothness: L > 0, the Lipschitz constant of the gradients.
        within: s^2 >= 0, variance of one sample's gradient within a learner's data.
        between: z^2 >= 0, variance of the learners' own gradients.

    Raises:
        ConfigError: for a value out of range.
    """

    batch: int
    smoothness: float
    within: float
    between: float

    def __post_init__(self) -> None:
        for name, low in {"batch": 1, "within": 0, "between": 0}.items():
            value = getattr(self, name)
            _require(value >= low, "Noise", f"{name} = {value}", f">= {low}", "Correct it.")
        told = f"smoothness = {self.smoothness}"
        _require(self.smoothness > 0, "Noise", told, "> 0", "Give a Lipschitz constant.")

    @property
    def spread(self) -> float:
        """sqrt(s^2 + 6 M z^2)."""
        return math.sqrt(self.within + 6 * self.batch * self.between)


def adpsgd_rate(n: int, noise: Noise, updates: int) -> float:
    """The learning rate of the AD-PSGD theorem, n / (10 M L + sqrt(s^2 + 6 M z^2) sqrt(K M)).

    For K so large that staleness and the spectral gap no longer matter (K >> n^2 times a polynomial in
    them). The constants are as remembered from the paper, not checked against its text: expect orders.

    Args:
        n: learners, >= 1.
        noise: M, L, s and z.
        updates: K >= 1, of all learners together.

    Raises:
        TopologyError: if n < 1.
        ConfigError: if K < 1.

    Source: Lian et al., Asynchronous decentralized parallel SGD, ICML 2018, arXiv:1710.06952.
    """
    require_size(n)
    _require(updates >= 1, "adpsgd_rate", f"updates = {updates}", ">= 1", "Count all learners'.")
    step = 10 * noise.batch * noise.smoothness
    return n / (step + noise.spread * math.sqrt(updates * noise.batch))


def adpsgd_bound(noise: Noise, updates: int, to_minimum: float) -> float:
    """The order of (1/K) sum_k E|grad f(mean)|^2 at `adpsgd_rate`, without the theorem's constants.

        f_0 L / K  +  (f_0 + L) sqrt(s^2 / M + 6 z^2) / sqrt(K),    f_0 = f(start) - f(minimum)

    K counts updates of all learners, who make n times as many in the same time: the second term, which
    remains, speeds up linearly. Neither n, the spectral gap nor the staleness is in it; the latter two
    prolong the time until it holds.

    Args:
        noise: M, L, s and z.
        updates: K >= 1, of all learners together.
        to_minimum: f_0 >= 0.

    Raises:
        ConfigError: if K < 1.

    Source: Lian et al., arXiv:1710.06952, its corollary.
    """
    _require(updates >= 1, "adpsgd_bound", f"updates = {updates}", ">= 1", "Count all learners'.")
    slow = (to_minimum + noise.smoothness) * noise.spread / math.sqrt(noise.batch * updates)
    return to_minimum * noise.smoothness / updates + slow


def rounds_to_shrink(factor: float, by: float = 10.0) -> int:
    """Rounds of mixing after which disagreement is `by` times smaller.

    The least k with factor^k <= 1 / by, that is ceil(ln by / -ln factor).

    Args:
        factor: on disagreement per round, in [0, 1), as `mixing.second_eigenvalue(T)`. Take the
            root of a factor on squared disagreement, as sqrt(randomised_ring_contraction(n)).
        by: how many times smaller, >= 1.

    Raises:
        ConfigError: if the factor is not in [0, 1) or `by` is less than 1.

    Source: ceil(ln by / -ln factor).
    """
    _require(
        0 <= factor < 1,
        "rounds_to_shrink",
        f"factor = {factor}",
        ">= 0 and < 1",
        "Connect all super learners, else disagreement stays.",
    )
    _require(1 <= by < math.inf, "rounds_to_shrink", f"by = {by}", ">= 1", "Pass a ratio.")
    if by == 1 or factor == 0:
        return int(by > 1)
    return math.ceil(math.log(by) / -math.log(factor) - 1e-9)  # 1/8 by halves is 3, not 4


# ---- one slow learner ---------------------------------------------------------------------------


def straggler_throughput(
    learners: int, slowdown: float, *, super_learners: int | None = None, waits: bool = False
) -> float:
    """Gradients per unit of time of all learners when one of them is s times slower.

    The slow one holds up its super learner, which waits for its gradient, and nobody else: with n
    super learners of G learners, G (n - 1 + 1/s). If all wait for all (synchronous SGD, model
    averaging, delay-by-one), learners / s.

    Args:
        learners: number of learners, each with a pace of 1.
        slowdown: s >= 1; may be infinite (it stopped).
        super_learners: how many equal super learners they form; None: each is its own (flat).
        waits: whether super learners wait for each other.

    Raises:
        TopologyError: if learners < 1, the super learners are not equal, or s < 1 (or infinite
            for a single super learner that nobody waits for).

    Source: ideal model of the straggler experiments of AD-PSGD, arXiv:1710.06952.
    """
    return learners / straggler_epoch_time(
        learners, slowdown, super_learners=super_learners, waits=waits
    )


def straggler_epoch_time(
    learners: int, slowdown: float, *, super_learners: int | None = None, waits: bool = False
) -> float:
    """How much longer an epoch takes when one learner is s times slower.

    n / (n - 1 + 1/s) with n super learners that do not wait for each other, and s if they do:
    learners / `straggler_throughput`, where arguments and errors are explained.

    Returns:
        The ratio to an epoch without a slow learner, in [1, s].

    Source: the straggler model of mixing.straggler_epoch_factor; derived here; the tests hold it
        against brute force.
    """
    n = learners if super_learners is None else super_learners
    require_size(n)
    if learners % n or learners < n:
        raise TopologyError(
            f"no equal super learners: got {learners} learners in {n} super learners, needed is "
            "a multiple. Pass learners = super_learners x learners of one."
        )
    free_running = straggler_epoch_factor(n, slowdown)  # checks the slowdown for both
    return float(slowdown) if waits else free_running


def expected_staleness(paces: Sequence[float]) -> Matrix:
    """Updates of others that a gradient misses, for learners of given paces that do not wait.

    While i computes one gradient, for a time 1 / r_i, the others apply sum over j != i of r_j / r_i
    updates. Averaged over all gradients that is n - 1, whatever the paces.

    Args:
        paces: r_i > 0, gradients per unit of time, length n >= 1.

    Returns:
        Mean staleness of each one's gradients, in updates, shape (n,).

    Raises:
        ConfigError: if there is no pace, or one is not positive and finite.

    Source: derived here; the tests hold it against brute force.
    """
    rates = np.asarray(paces, dtype=np.float64)
    _require(
        rates.ndim == 1 and rates.size > 0 and bool(np.all((rates > 0) & np.isfinite(rates))),
        "expected_staleness",
        f"paces = {rates.tolist()}",
        "> 0 and finite, at least one",
        "Pass gradients per second.",
    )
    return (rates.sum() - rates) / rates


def straggler_staleness(n: int, slowdown: float) -> float:
    """Updates that the others apply while a learner that is s times slower computes one gradient.

    s (n - 1); see `expected_staleness`, also for the others' own, n - 2 + 1/s.

    Args:
        n: number of (super) learners.
        slowdown: s >= 1.

    Raises:
        TopologyError: if n < 1.
        ConfigError: if s < 1.

    Source: derived here; the tests hold it against brute force.
    """
    require_size(n)
    _require(
        slowdown >= 1,
        "straggler_staleness",
        f"slowdown = {slowdown}",
        ">= 1",
        "Pass how many times slower the learner is.",
    )
    return slowdown * (n - 1)


# ---- averaging now and then ---------------------------------------------------------------------


def averaging_speedup(n: int, period: int, step_s: float, allreduce_s: float) -> float:
    """How many times faster n learners go through the data that average every `period` steps.

    S(n) = n K t / (K t + t_allreduce(n)).

    Args:
        n: number of learners.
        period: K >= 1, local steps between two averages.
        step_s: t > 0, seconds of a local step.
        allreduce_s: seconds of one average over n learners, >= 0.

    Raises:
        TopologyError: if n < 1.
        ConfigError: if an argument is out of its range.

    Source: the model behind the speed-ups of Su and Chen, arXiv:1507.01239; not a formula of
        theirs.
    """
    require_size(n)
    _require(
        period >= 1 and 0 < step_s < math.inf and 0 <= allreduce_s < math.inf,
        "averaging_speedup",
        f"period = {period}, step_s = {step_s}, allreduce_s = {allreduce_s}",
        "period >= 1, step_s > 0, allreduce_s >= 0, all finite",
        "Pass measured seconds.",
    )
    return n * period * step_s / (period * step_s + allreduce_s)


def allreduce_share(n: int, speedup: float) -> float:
    """What a measured speed-up says about the cost of averaging: t_allreduce / (K t) = n/S - 1.

    The inverse of `averaging_speedup`.

    Args:
        n: number of learners.
        speedup: S in (0, n].

    Raises:
        TopologyError: if n < 1.
        ConfigError: if the speed-up is not in (0, n].

    Source: `averaging_speedup`, solved for the all-reduce.
    """
    require_size(n)
    _require(
        0 < speedup <= n,
        "allreduce_share",
        f"speedup = {speedup} of n = {n}",
        "> 0 and <= n",
        "A speed-up above n has another cause than this model knows.",
    )
    return n / speedup - 1


# ---- checks -------------------------------------------------------------------------------------


def _disagreement_modes(matrix: npt.ArrayLike) -> Matrix:
    """Eigenvalues of T without the mean's, shape (n - 1,)."""
    mixing = require_mixing(matrix)
    # the mean's is moved from 1 to 3, behind all others, and cut off
    return np.asarray(np.linalg.eigvalsh(mixing + 2 / len(mixing))[:-1], dtype=np.float64)


def _require(holds: bool, where: str, value: str, allowed: str, cure: str) -> None:
    if not holds:
        raise ConfigError(f"bad argument: {where} got {value}, allowed is {allowed}. {cure}")
