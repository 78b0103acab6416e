"""An online estimate of a Fisher matrix, low rank plus a multiple of the identity, and its inverse.

Rows x are preconditioned with the inverse of F = E[x x^T], smoothed. The estimate of F is stored as
    F_t = R_t^T diag(d_t) R_t + rho_t I
with R orthonormal rows, so that memory is O(R D) and work O(n R D). The method is that of Povey, Zhang
and Khudanpur, arXiv:1410.7455, and of Kaldi's nnet3/natural-gradient-online.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.optim.natural_gradient.rows import Patches, Rows, square_sum

EPSILON = 1e-10  # least eigenvalue, relative to the mean eigenvalue
DELTA = 5e-4  # least eigenvalue, relative to the largest eigenvalue
FIRST_UPDATES = 10  # number of first minibatches that each update the Fisher estimate
FIRST_PASSES = 3  # number of updates with the first minibatch, which start the Fisher estimate
CONDITION = 1e6  # condition number of C above which R's rows are made orthonormal again
STRAIGHT = 1e-9  # largest difference of R R^T from I that is not corrected


@dataclass
class Gathered:
    """Sums over rows of a minibatch for a Fisher estimate; `+` adds the sums over two sets of rows.

    Attributes:
        count: number of rows, n.
        trace: tr X X^T, float64.
        remaining: tr Xhat Xhat^T with Xhat = X - X W^T W, float64.
        moment: (X W^T)^T X, shape (R, D), of the rows that enter the Fisher estimate; None without such rows,
            or if no update is due.
    """

    count: int = 0
    trace: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu")
    )
    remaining: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu")
    )
    moment: Tensor | None = None

    def __add__(self, other: Gathered) -> Gathered:
        if self.count == 0:
            return other
        moments = [m for m in (self.moment, other.moment) if m is not None]
        return Gathered(
            self.count + other.count,
            self.trace + other.trace,
            self.remaining + other.remaining,
            sum(moments[1:], moments[0]) if moments else None,
        )

    def scale(self) -> Tensor:
        """Return gamma = sqrt(tr X X^T / tr Xhat Xhat^T), which restores the rows' norm; 1 for 0 / 0."""
        ratio = (self.trace / self.remaining).sqrt()
        return torch.where(self.remaining == 0, torch.ones_like(ratio), ratio)


class OnlineFisher:
    """The estimate F_t of the Fisher matrix of an affine map's inputs or output derivatives, and its inverse.

    With G = F + (alpha / D) tr(F) I, rows are multiplied by beta G^-1, which is (Woodbury)
        Xhat = X - (X R^T) diag(e) R,   e_i = 1 / (beta / d_i + 1),
        beta = rho (1 + alpha) + (alpha / D) sum d,
    and then by gamma = sqrt(tr X X^T / tr Xhat Xhat^T), which restores their norm. The estimate
    moves towards the scatter S = X^T X / n of the minibatch by eta = min(0.9, 1 - exp(-n / history)):
        Y = eta R S + (1 - eta) diag(d + rho) R,   Y Y^T = U C U^T   (in float64),
        R' = C^-1/2 U^T Y,   d' = C^1/2 - rho',
        rho' = (eta tr S + (1 - eta)(D rho + sum d) - sum C^1/2) / (D - R),
    so that tr F' = eta tr S + (1 - eta) tr F unless a floor holds: C >= (rho (1 - eta))^2, and d' and
    rho' >= 5e-4 max C^1/2. The first ten minibatches each make an update, later every
    `update_period`-th. The first minibatch starts the estimate, by three updates from rows that share
    all coordinates.

    Kaldi's other floor, 1e-10, and its start value are absolute, and made for derivatives of a sum
    over the minibatch. Here both are relative to the mean square of a coordinate, because
    derivatives of a mean are smaller by n: the estimate adapts to any scale of the rows. A minibatch
    of zeros, or with an Inf or a NaN, leaves the estimate unchanged. The rows of R are made orthonormal
    again at errors of 1e-9, not 1e-3, since they are float64; by QR, not by Cholesky's factor, from which
    the result differs in signs only.

    Args:
        dim: number of coordinates of a row, D >= 1; with D = 1 rows are not changed.
        rank: rank of the estimate, R >= 1; limited to D - 1.
        alpha: weight of the smoothing identity, >= 0.
        history: number of rows over which the estimate averages, > 0: older rows decay exponentially.
        update_period: minibatches per update after the first ten, >= 1; math.inf: no further updates.

    Attributes:
        directions: R, shape (rank, dim), float64, orthonormal rows; None before the first minibatch.
        strengths: d, shape (rank,), float64, on the CPU, in decreasing order.
        floor: rho, float.
        updates: number of updates of the estimate.

    Raises:
        ConfigError: for an argument out of its range.

    Source: arXiv:1410.7455, sections 3 to 5; the first minibatch, the floors and the period as in Kaldi.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        *,
        alpha: float = 4.0,
        history: float = 2000.0,
        update_period: float = 4,
    ) -> None:
        require_options(alpha=alpha, history=history, update_period=update_period)
        _require(dim >= 1, "dim", dim, ">= 1")
        _require(rank >= 1, "rank", rank, ">= 1")
        self.dim, self.rank = dim, min(rank, dim - 1)
        self.alpha, self.history, self.update_period = alpha, history, update_period
        self.directions: Tensor | None = None
        self.strengths = torch.zeros(self.rank, dtype=torch.float64, device="cpu")
        self.floor = 0.0
        self.updates = 0
        self._skipped = 0
        # diag(e)^1/2 R, in the dtype and on the device of the rows
        self._basis: Tensor | None = None

    # ---- methods for an optimizer, per minibatch

    @property
    def due(self) -> bool:
        """Whether the present minibatch will update the Fisher estimate."""
        return self.updates < FIRST_UPDATES or self._skipped + 1 >= self.update_period

    def start(self, rows: Rows | Patches, unit: Callable[[], float] = lambda: 1.0) -> bool:
        """Start the Fisher estimate from the first minibatch, if it is not started yet.

        Args:
            rows: the rows of the minibatch.
            unit: returns 1 / loss scale, the factor that makes the rows independent of the loss scale.

        Returns:
            Whether the estimate is started: not if all rows so far were zero or not finite, never for D = 1.
        """
        if self.rank == 0 or self.directions is not None:
            return self.rank > 0
        trace = float(rows.trace())
        if not 0 < trace < math.inf:
            return False
        self._begin(rows.like.device, EPSILON * trace / (rows.count * self.dim))
        for _ in range(FIRST_PASSES):
            basis = self.basis(rows.like)
            self._move(rows.count, trace, rows.moment(rows.project(basis)))
        # scales the Fisher estimate alone: the basis W does not depend on the rows' scale
        factor = unit() ** 2
        self.strengths, self.floor = self.strengths * factor, self.floor * factor
        return True

    def basis(self, like: Tensor) -> Tensor:
        """Return W = diag(e)^1/2 R, in the dtype and on the device of `like`; Xhat = X - X W^T W."""
        assert self.directions is not None
        if self._basis is None or self._basis.dtype != like.dtype:
            root = self._suppression().sqrt().unsqueeze(1)
            basis = root.to(self.directions.device) * self.directions
            self._basis = basis.to(like.device, like.dtype)
        elif self._basis.device != like.device:
            self._basis = self._basis.to(like.device)
        return self._basis

    def gather(
        self, rows: Rows | Patches, projected: Tensor, remaining: Tensor | None = None
    ) -> Gathered:
        """Return the sums over `rows`, to be added to the sums over the minibatch's other rows.

        Args:
            rows: X.
            projected: X W^T, shape (n, R).
            remaining: tr Xhat Xhat^T if it is known. Else it is computed from `projected`, with a loss of
                digits if almost all of X is suppressed.
        """
        trace = rows.trace()
        if remaining is None:
            e = self._suppression()
            factor = (2 - e).to(projected.device, projected.dtype)
            remaining = trace - (projected.square().sum(0) @ factor).double()
            # rounding could make the difference smaller than its least possible value
            remaining = remaining.clamp(min=float((1 - e).min()) ** 2 * trace)
        return Gathered(rows.count, trace, remaining, rows.moment(projected) if self.due else None)

    def finish(self, gathered: Gathered, unit: Callable[[], float] = lambda: 1.0) -> None:
        """Update the Fisher estimate at the end of a minibatch, if an update is due.

        Args:
            gathered: the sums over all rows of the minibatch.
            unit: returns the factor by which the rows must be multiplied, 1 / loss scale.
        """
        if gathered.count == 0 or self.directions is None:
            return
        if not self.due:
            self._skipped += 1
            return
        trace = float(gathered.trace)
        if gathered.moment is None or not (
            0 < trace < math.inf and bool(gathered.moment.isfinite().all())
        ):
            return
        factor = unit() ** 2
        self._move(gathered.count, trace * factor, gathered.moment.double() * factor)
        self.updates += 1
        self._skipped = 0

    # ---- all in one call

    def precondition(self, x: Tensor) -> tuple[Tensor, float]:
        """Precondition a minibatch's rows with the present Fisher estimate, then update that by the rows.

        Args:
            x: rows, shape (n, dim), floating point.

        Returns:
            The preconditioned rows gamma Xhat, of the shape and norm of `x`, and gamma. For rows with an Inf
            or a NaN both hold NaN, and the estimate does not change.

        Raises:
            ConfigError: for another shape.
        """
        _require(x.ndim == 2 and x.shape[1] == self.dim, "x.shape", tuple(x.shape),
                 f"(rows, {self.dim})")  # fmt: skip
        rows = Rows(x)
        if not self.start(rows):
            return x.clone(), 1.0
        basis = self.basis(x)
        projected = rows.project(basis)
        hat, _ = rows.without(projected, basis)
        gathered = self.gather(rows, projected, square_sum(hat))
        scale = gathered.scale()
        self.finish(gathered)
        return hat * scale.to(hat.dtype), float(scale)

    def dense(self) -> Tensor:
        """Return the Fisher estimate as a dense matrix, shape (D, D), float64; to inspect small estimates."""
        assert self.directions is not None
        strengths = self.strengths.to(self.directions.device).unsqueeze(1)
        eye = torch.eye(self.dim, dtype=torch.float64, device=self.directions.device)
        return self.directions.T @ (strengths * self.directions) + self.floor * eye

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Fisher estimate, with which a resumed run is bitwise the same."""
        return {
            "directions": self.directions,
            "strengths": self.strengths,
            "floor": self.floor,
            "updates": self.updates,
            "skipped": self._skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a Fisher estimate's state that `state_dict` has returned, with tensors of any device.

        Raises:
            ConfigError: if the state is of an estimate of another rank or dimension.
        """
        directions = state["directions"]
        if directions is not None:
            found, needed = tuple(directions.shape), (self.rank, self.dim)
            _require(found == needed, "shape of the saved directions", found, f"{needed}")
            directions = directions.to(dtype=torch.float64, copy=True)
        self.directions = directions
        self.strengths = state["strengths"].to("cpu", torch.float64, copy=True)
        self.floor = float(state["floor"])
        self.updates, self._skipped = int(state["updates"]), int(state["skipped"])
        self._basis = None

    # ---- the equations of the estimate

    def _begin(self, device: torch.device, level: float) -> None:
        """Set the estimate's R to a start value without zero rows or columns, and d and rho to `level`.

        Row r of R has equal entries in columns r, r + R, r + 2R, ... and zeros elsewhere.
        """
        columns = torch.arange(self.dim, device="cpu")
        rows = torch.zeros(self.rank, self.dim, dtype=torch.float64, device="cpu")
        rows[columns % self.rank, columns] = 1.0
        self.directions = (rows / rows.norm(dim=1, keepdim=True)).to(device)
        self.strengths = torch.full((self.rank,), level, dtype=torch.float64, device="cpu")
        self.floor = level
        self._basis = None

    def _suppression(self) -> Tensor:
        """Return e, shape (R,): by how much each direction of R is suppressed in the rows, in (0, 1)."""
        beta = self.floor * (1 + self.alpha) + self.alpha / self.dim * float(self.strengths.sum())
        return self.strengths / (beta + self.strengths)

    def _move(self, count: int, trace: float, moment: Tensor) -> None:
        """Make one update of the Fisher estimate: of R, d and rho.

        Args:
            count: number of rows, n.
            trace: tr X X^T.
            moment: (X W^T)^T X = diag(e)^1/2 R X^T X; R moves to its device, if a loaded R is elsewhere.
        """
        assert self.directions is not None
        directions = self.directions.to(moment.device)
        eta = min(0.9, -math.expm1(-count / self.history))
        old = self.dim * self.floor + float(self.strengths.sum())
        total = eta * trace / count + (1 - eta) * old
        new = (eta / count) * self._suppression().rsqrt()
        kept = (1 - eta) * (self.strengths + self.floor)
        y = _column(new, moment) * moment.double() + _column(kept, moment) * directions
        values, vectors, floored = self._eigen(y @ y.T, (self.floor * (1 - eta)) ** 2)
        roots = values.sqrt()
        directions = (vectors / roots).to(y.device).T @ y
        if floored or values[0] > CONDITION * values[-1]:
            directions = _straightened(directions)
        floor = (total - float(roots.sum())) / (self.dim - self.rank)
        least = max(EPSILON * total / self.dim, DELTA * float(roots[0]))
        self.directions = directions
        self.strengths = (roots - floor).clamp_(min=least)
        self.floor = max(floor, least)
        self._basis = None

    @staticmethod
    def _eigen(z: Tensor, least: float) -> tuple[Tensor, Tensor, bool]:
        """Return the eigenvalues of `z`, its eigenvectors as columns, and whether an eigenvalue was raised.

        The eigenvalues are in decreasing order; those below `least` are raised to `least`.
        """
        values, vectors = torch.linalg.eigh(z.cpu())
        values, vectors = values.flip(0), vectors.flip(1)
        floored = bool(values[-1] < least)
        return values.clamp_(min=least), vectors, floored


def _column(factors: Tensor, like: Tensor) -> Tensor:
    return factors.to(like.device).unsqueeze(1)


def _straightened(rows: Tensor) -> Tensor:
    """Return the rows made orthonormal, in order, so that the first rows change least.

    Rows R are returned unchanged if R R^T differs from I by no more than STRAIGHT.
    """
    error = rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    if float(error.abs().max()) <= STRAIGHT:
        return rows
    q, _ = torch.linalg.qr(rows.T)
    return q.T.contiguous()


def require_options(*, alpha: float, history: float, update_period: float) -> None:
    """Check the options that all Fisher estimates of an optimizer share.

    Raises:
        ConfigError: for a value out of its range.
    """
    _require(0 <= alpha < math.inf, "alpha", alpha, ">= 0")
    _require(0 < history < math.inf, "history", history, "> 0 rows")
    _require(update_period >= 1, "update_period", update_period, ">= 1 minibatches")


def _require(holds: bool, name: str, value: Any, bound: str) -> None:
    if not holds:
        raise ConfigError(f"natural gradient: {name}={value} must be {bound}. Correct it.")
