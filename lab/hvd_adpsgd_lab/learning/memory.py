"""Memory that torch and a simulated engine share: tensors as views into one array of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# bytes, as torch's allocator aligns: matrix products of tensors at other addresses may round otherwise
_ALIGNED = 64
_CHUNK_NBYTES = 256 * 1024  # the default of the option chunk_kib


class Layout:
    """Where each of some tensors of one dtype lies in an array of chunks.

    Args:
        tensors: the tensors; their shapes and strides count.
        chunks: least number of chunks.

    Attributes:
        chunks, elements: shape of the array.
        offsets: of each tensor its first element in the flat array.
        extent: elements from the first tensor to the end of the last one.
        dtype: of the tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], chunks: int = 1):
        self.dtype = tensors[0].dtype
        self.itemsize = tensors[0].element_size()
        step = _ALIGNED // self.itemsize
        self.offsets, end = [], 0
        for tensor in tensors:
            self.offsets.append(end)
            end += math.ceil(tensor.numel() / step) * step
        self.extent = end
        self.chunks = max(chunks, math.ceil(end * self.itemsize / _CHUNK_NBYTES))
        self.elements = math.ceil(end / self.chunks / step) * step

    def empty(self) -> npt.NDArray[Any]:
        """Return an array of zeros, shape (chunks, elements); its memory is aligned."""
        flat = torch.zeros(self.chunks * self.elements, dtype=self.dtype, device="cpu")
        return flat.numpy().reshape(self.chunks, self.elements)

    def bind(self, tensors: Sequence[torch.Tensor], array: npt.NDArray[Any]) -> None:
        """Move the tensors into an array; they keep values, shapes, and strides if these are dense."""
        for tensor, view in zip(tensors, self._views(tensors, array), strict=True):
            view.copy_(tensor.detach())
            tensor.data = view

    def write(self, tensors: Sequence[torch.Tensor], values: npt.NDArray[Any]) -> None:
        """Set tensors to the values of a flat array."""
        for tensor, view in zip(tensors, self._views(tensors, values), strict=True):
            tensor.detach().copy_(view)

    def read(self, tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.float64]:
        """Return the values of tensors as a flat array of `extent` elements."""
        values = np.zeros(self.extent, np.float64)
        for tensor, view in zip(tensors, self._views(tensors, values), strict=True):
            view.copy_(tensor.detach())
        return values

    def _views(
        self, tensors: Sequence[torch.Tensor], array: npt.NDArray[Any]
    ) -> list[torch.Tensor]:
        flat = torch.from_numpy(array.reshape(-1))
        return [
            flat.as_strided(t.shape, _strides(t), offset)
            for t, offset in zip(tensors, self.offsets, strict=True)
        ]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps, else those of a contiguous one."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()
