"""Compression of gradients and of tensors for an allreduce inside a super learner."""

from typing import Any

import torch


class NoneCompressor:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        half = tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor
        return half, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Compression of tensors for an allreduce: none, or float16."""

    none = NoneCompressor
    fp16 = FP16Compressor
