"""The rows of a minibatch as an affine map sees them, without writing them out.

An estimate needs three products of the rows X (n x D) and no more: X W^T, H^T X and tr X X^T. For a
linear map X lies in memory, but for its column of ones. For a convolution X is the unfolded input,
many times as large as the input itself: there the three products are convolutions.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Patches", "Rows", "RowsLike"]


class RowsLike(Protocol):
    """n rows of D numbers each.

    Attributes:
        count: n.
        dim: D, the appended one included.
        like: a tensor of the rows' device and dtype.
    """

    count: int
    dim: int
    like: Tensor

    def project(self, basis: Tensor) -> Tensor:
        """X W^T, shape (n, R), for a basis W of shape (R, D)."""
        ...

    def moment(self, projected: Tensor) -> Tensor:
        """H^T X, shape (R, D), for H of shape (n, R)."""
        ...

    def trace(self) -> Tensor:
        """tr X X^T, the sum of all squares, a scalar in float64."""
        ...


class Rows:
    """Rows of a matrix; with `one`, [x, 1] stands for each row x.

    Args:
        x: shape (n, D), or (n, D - 1) with `one`; floating point.
        one: append a one to every row. It is never stored.
    """

    def __init__(self, x: Tensor, one: bool = False) -> None:
        self.like = x
        self.one = one
        self.count = x.shape[0]
        self.dim = x.shape[1] + one

    def project(self, basis: Tensor) -> Tensor:
        if not self.one:
            return self.like @ basis.T
        return torch.addmm(basis[:, -1], self.like, basis[:, :-1].T)

    def moment(self, projected: Tensor) -> Tensor:
        if not self.one:
            return projected.T @ self.like
        moment = projected.new_empty(projected.shape[1], self.dim)
        torch.mm(projected.T, self.like, out=moment[:, :-1])
        torch.sum(projected, 0, out=moment[:, -1])
        return moment

    def trace(self) -> Tensor:
        return square_sum(self.like) + (self.count if self.one else 0)

    def without(self, projected: Tensor, basis: Tensor) -> tuple[Tensor, Tensor | None]:
        """X - H W: the part under x, shape (n, D - one), and that of the ones, shape (n,)."""
        if not self.one:
            return torch.addmm(self.like, projected, basis, alpha=-1), None
        ones = 1 - projected @ basis[:, -1]
        return torch.addmm(self.like, projected, basis[:, :-1], alpha=-1), ones


class Patches:
    """Rows of an unfolded input: one per position of the output, as a convolution multiplies them.

    Args:
        x: input, shape (B, C, *size).
        kernel: shape of a filter, (C, *kernel).
        stride, padding, dilation: of the convolution, as tuples.
        one: append a one to every row.
    """

    def __init__(
        self,
        x: Tensor,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        one: bool,
    ) -> None:
        self.like = x
        self.one = one
        self._kernel = kernel
        self._geometry: tuple[Any, ...] = (stride, padding, dilation)
        self._size = tuple(
            (s + 2 * p - d * (k - 1) - 1) // t + 1
            for s, k, t, p, d in zip(
                x.shape[2:], kernel[1:], stride, padding, dilation, strict=True
            )
        )
        self.count = x.shape[0] * torch.Size(self._size).numel()
        self.dim = torch.Size(kernel).numel() + one

    def project(self, basis: Tensor) -> Tensor:
        weight, bias = (basis[:, :-1], basis[:, -1]) if self.one else (basis, None)
        return as_rows(self._convolve(self.like, weight, bias))

    def moment(self, projected: Tensor) -> Tensor:
        rank = projected.shape[1]
        outputs = projected.view(self.like.shape[0], -1, rank).transpose(1, 2)
        outputs = outputs.reshape(self.like.shape[0], rank, *self._size)
        weight = projected.new_empty(1).expand(rank, *self._kernel)
        _, moment, _ = convolution_backward(
            outputs, self.like, weight, self._geometry, (False, True, False)
        )
        moment = moment.flatten(1)
        return torch.cat([moment, projected.sum(0).unsqueeze(1)], 1) if self.one else moment

    def trace(self) -> Tensor:
        weight = self.like.new_ones(1, self.dim - self.one)
        seen = self._convolve(self.like.square(), weight, None)
        return seen.sum(dtype=torch.float64) + (self.count if self.one else 0)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.reshape(-1, *self._kernel)
        stride, padding, dilation = self._geometry
        none = (0,) * len(stride)
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, none, 1)


def as_rows(y: Tensor) -> Tensor:
    """(B, C, *size) as rows (B * positions, C)."""
    return y.flatten(2).transpose(1, 2).reshape(-1, y.shape[1])


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares, a scalar in float64."""
    flat = x.reshape(-1)
    return torch.dot(flat, flat).double()


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, geometry: tuple[Any, ...], wanted: tuple[bool, ...]
) -> Any:
    """Derivatives by input, weight and bias; None for what is not wanted."""
    stride, padding, dilation = geometry
    none = [0] * len(stride)
    return torch.ops.aten.convolution_backward(
        dy, x, weight, [weight.shape[0]], stride, padding, dilation, False, none, 1, wanted
    )
