"""The rows x of a minibatch in an affine map W x + b, without storing them as a matrix.

A Fisher estimate needs three products of the rows X (n x D) only: X W^T, H^T X and tr X X^T. For a linear
map X is in memory, except for its column of ones. For a convolution X is the unfolded input, many times
as large as the input itself: there the three products are computed by convolutions.
"""

from typing import Any

import torch
from torch import Tensor


class Rows:
    """Rows of a matrix in memory; with `one`, each row x becomes [x, 1].

    Args:
        x: matrix of shape (n, D), or (n, D - 1) with `one`; floating point.
        one: whether to append a one to every row; the ones are never stored.

    Attributes:
        count: number of rows, n.
        dim: number of columns, D, the appended column of ones included.
        like: a tensor of the rows' device and dtype.
    """

    def __init__(self, x: Tensor, one: bool = False) -> None:
        self.like = x
        self.one = one
        self.count = x.shape[0]
        self.dim = x.shape[1] + one

    def project(self, basis: Tensor) -> Tensor:
        """Return X W^T, shape (n, R), for a basis W of shape (R, D)."""
        if not self.one:
            return self.like @ basis.T
        return torch.addmm(basis[:, -1], self.like, basis[:, :-1].T)

    def moment(self, projected: Tensor) -> Tensor:
        """Return H^T X, shape (R, D), for H = `projected` of shape (n, R)."""
        if not self.one:
            return projected.T @ self.like
        moment = projected.new_empty(projected.shape[1], self.dim)
        torch.mm(projected.T, self.like, out=moment[:, :-1])
        torch.sum(projected, 0, out=moment[:, -1])
        return moment

    def trace(self) -> Tensor:
        """Return tr X X^T, the sum of all squares, a scalar in float64."""
        return square_sum(self.like) + (self.count if self.one else 0)

    def without(self, projected: Tensor, basis: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return X - H W, H = `projected`, W = `basis`: the columns of x and, with `one`, the last column."""
        if not self.one:
            return torch.addmm(self.like, projected, basis, alpha=-1), None
        ones = 1 - projected @ basis[:, -1]
        return torch.addmm(self.like, projected, basis[:, :-1], alpha=-1), ones


class Patches:
    """Rows of the unfolded input of a convolution, as `Rows`: one row per position of the output.

    Args:
        x: input of the convolution, shape (B, C, *size).
        kernel: shape of a filter, (C, *kernel).
        stride, padding, dilation: parameters of the convolution, as tuples.
        one: whether to append a one to every row.
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
    """Return a tensor of shape (B, C, *size) as rows, shape (B * positions, C)."""
    return y.flatten(2).transpose(1, 2).reshape(-1, y.shape[1])


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of the squares of all elements, a scalar in float64."""
    flat = x.reshape(-1)
    return torch.dot(flat, flat).double()


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, geometry: tuple[Any, ...], wanted: tuple[bool, ...]
) -> Any:
    """Return a convolution's derivatives by input, weight and bias; None for each that is not wanted.

    `geometry` is (stride, padding, dilation), `dy` the derivative by the output.
    """
    stride, padding, dilation = geometry
    none = [0] * len(stride)
    return torch.ops.aten.convolution_backward(
        dy, x, weight, [weight.shape[0]], stride, padding, dilation, False, none, 1, wanted
    )
