"""The memory of a tensor: its bytes, as they travel between learners, and an array that lends the memory."""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd.errors import ModelMismatchError


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a uint8 vector: its own memory, or a copy if it is not contiguous."""
    # as_strided, since view() refuses some strides that a tensor of at most one element may have
    tensor = tensor.resolve_conj().resolve_neg()  # torch evaluates conj() and its imag lazily
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def lent(tensor: torch.Tensor) -> NDArray[Any]:
    """Return an array of the memory of a contiguous CPU tensor, which the array keeps alive.

    Tensor.numpy() would do the same, and forbid the script for good to resize the tensor's storage.
    """
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.numel():
        return np.empty(tensor.shape, _dtype(tensor.dtype))
    return np.asarray(_Lender(tensor))


def overwrite(name: str | None, tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy a root learner's `values` to a tensor; to the one number of several elements of an expanded one.

    Raises:
        ModelMismatchError: if the tensor is expanded, and `values` differ where it has one number.
    """
    kept, given = tensor, values
    for dim, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if n > 1 and step == 0:
            kept, given = kept.narrow(dim, 0, 1), given.narrow(dim, 0, 1)
    same = given is values or torch.equal(bytes_of(given.expand_as(values)), bytes_of(values))
    if not same:
        raise ModelMismatchError(
            f"{name or 'a tensor'} of shape {list(tensor.shape)} is expanded: several elements share "
            "memory, and the root learner has different numbers there. Make it a clone() everywhere."
        )
    kept.copy_(given)


class _Lender:
    """The base of the array that NumPy makes of it: it holds the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": _dtype(tensor.dtype).str,
            "data": (tensor.data_ptr(), False),
        }


@functools.cache
def _dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
