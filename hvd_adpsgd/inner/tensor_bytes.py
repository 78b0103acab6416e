"""The bytes of a tensor, as they travel between learners."""

from __future__ import annotations

import torch

__all__ = ["bytes_of"]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a uint8 vector: its own memory, or a copy if it is not contiguous."""
    # as_strided, since view() refuses some strides that a tensor of at most one element may have
    tensor = tensor.resolve_conj().resolve_neg()  # torch evaluates conj() and its imag lazily
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
