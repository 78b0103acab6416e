"""The passes over the moments of an adaptive optimizer, of several parameters at once; see shared_moments.

Contiguous tensors in host memory take the compiled loops of ext/c/moments.c, one pass each; others torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvd_adpsgd.training import moments

__all__ = ["NEEDED", "Product", "Second", "copy_all", "correct", "multiply"]

Tensors = list[torch.Tensor]
NEEDED = ("_foreach_sign", "_foreach_lerp", "_foreach_norm", "_foreach_clamp_min")  # of torch
_COMPILED = (torch.float32, torch.float64)


class Second(NamedTuple):
    """Numbers of `correct`, as in SharedMoments.

    Attributes:
        decay: b, decay of the second moment per step.
        known: 1 - b^steps.
        share: 1 / n.
        l2: factor of the parameter in the gradient.
        first: a, decay of the first moment per step; 1 if that includes the gradient already.
        bound: own gradients give no first moment whose square is larger than bound v_i.
        haste: h.
    """

    decay: float
    known: float
    share: float
    l2: float
    first: float
    bound: float
    haste: float


class Product(NamedTuple):
    """Numbers of `multiply`, as in SharedMoments.

    Attributes:
        rate: 1 - b.
        scale: 1 / (r w).
        known: (1 - a^steps)^2, with a the decay of the first moment.
    """

    rate: float
    scale: float
    known: float


def copy_all(targets: Tensors, values: Tensors) -> None:
    """Copy each value to its target."""
    if hasattr(torch, "_foreach_copy_") and targets:
        torch._foreach_copy_(targets, values)
        return
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def correct(
    law: Second,
    second: Tensors,
    own: Tensors,
    gradients: Tensors,
    parameters: Tensors,
    moment: Tensors,
    cross: Tensors,
    lacking: Tensors,
) -> None:
    """Give the optimizer a second moment of which its update makes v; `own` gets that of this super learner.

    Args:
        law: see Second.
        second: the optimizer's second moments, changed.
        own: overwritten with b second + (1 - b) g^2.
        gradients: without l2.
        parameters: their parameters.
        moment: first moments, without this step's gradients.
        cross: x, raised where the moment cannot be of own gradients.
        lacking: q, a tensor of one number for each parameter.
    """
    left = []
    for i, arrays in enumerate(zip(second, own, gradients, parameters, moment, cross, strict=True)):
        if not _is_compiled(arrays):
            left.append(i)
            continue
        v, u, g, p, m, x = (array.data_ptr() for array in arrays)
        count, q = second[i].numel(), float(lacking[i])
        w = q**law.haste
        known = law.known * (1 - w) / (1 - q) if q < 1 else 0.0
        bound = law.bound if known else math.inf
        is_double = second[i].dtype is torch.float64
        moments.correct(
            is_double,
            count,
            v,
            u,
            g,
            p,
            m,
            x,
            w,
            law.decay,
            known,
            law.share,
            law.l2,
            law.first,
            bound,
        )
    if left:
        every = (second, own, gradients, parameters, moment, cross, lacking)
        _correct_by_torch(law, *([tensors[i] for i in left] for tensors in every))


def _correct_by_torch(
    law: Second,
    second: Tensors,
    own: Tensors,
    gradients: Tensors,
    parameters: Tensors,
    moment: Tensors,
    cross: Tensors,
    lacking: Tensors,
) -> None:
    square = torch._foreach_add(gradients, parameters, alpha=law.l2)
    received = torch._foreach_lerp(square, moment, law.first)
    torch._foreach_mul_(received, received)
    torch._foreach_mul_(square, square)
    torch._foreach_mul_(square, 1 - law.decay)
    copy_all(own, second)
    torch._foreach_mul_(own, law.decay)
    torch._foreach_add_(own, square)
    missing = torch.stack(lacking)
    weight = missing**law.haste
    known = law.known * (1 - weight) / (1 - missing).clamp(min=1e-30)
    mean = []
    for x, square_m, v, k, w in zip(cross, received, own, known, weight, strict=True):
        least = torch.maximum(x, square_m / (law.bound * k))
        x.copy_(torch.where((square_m > law.bound * v) & (k > 0), least, x))
        mean.append(torch.addcmul(k * x, w, v))
    torch._foreach_clamp_min_(mean, 0)
    torch._foreach_lerp_(mean, own, law.share)
    torch._foreach_sub_(mean, square)
    torch._foreach_div_(mean, law.decay)
    for v, given, mine in zip(second, mean, own, strict=True):
        v.copy_(torch.where(torch.isfinite(mine), given, v))


def multiply(
    law: Product,
    cross: Tensors,
    lacking: Tensors,
    moment: Tensors,
    before: Tensors,
    offered: Tensors,
) -> None:
    """Add products with the moments of peers to x where exchanges have added to moments; reduce q.

    Args:
        law: see Product.
        cross: x, changed.
        lacking: q, changed: by the share of elements with a product, of those that have a moment.
        moment: first moments with what exchanges have added.
        before: without.
        offered: as peers had them.
    """
    left = []
    for i, arrays in enumerate(zip(cross, moment, before, offered, strict=True)):
        if not _is_compiled(arrays):
            left.append(i)
            continue
        x, m, b, o = (array.data_ptr() for array in arrays)
        is_double, count = cross[i].dtype is torch.float64, cross[i].numel()
        arrived, live = moments.multiply(
            is_double, count, x, m, b, o, law.rate, law.scale, law.known
        )
        lacking[i].mul_(1 - law.rate * arrived / max(live, 1))
    if left:
        every = (cross, lacking, moment, before, offered)
        _multiply_by_torch(law, *([tensors[i] for i in left] for tensors in every))


def _multiply_by_torch(
    law: Product,
    cross: Tensors,
    lacking: Tensors,
    moment: Tensors,
    before: Tensors,
    offered: Tensors,
) -> None:
    product = torch._foreach_sub(moment, before)
    arrived = torch._foreach_sign(product)
    torch._foreach_abs_(arrived)
    torch._foreach_mul_(product, law.scale)
    torch._foreach_add_(product, offered)
    torch._foreach_mul_(product, offered)
    torch._foreach_div_(product, law.known)
    torch._foreach_sub_(product, cross)
    torch._foreach_mul_(product, arrived)
    torch._foreach_add_(cross, product, alpha=law.rate)
    torch._foreach_mul_(lacking, list(_kept(law.rate, arrived, offered)))


def _kept(
    rate: float, arrived: tuple[torch.Tensor, ...], offered: Tensors
) -> tuple[torch.Tensor, ...]:
    """Return 1 - rate * share by parameter: share of elements with a product, of those that have a moment."""
    live = torch._foreach_sign(offered)
    torch._foreach_abs_(live)
    torch._foreach_maximum_(live, arrived)
    share = torch._foreach_norm(arrived, 1)
    torch._foreach_div_(share, torch._foreach_clamp_min(torch._foreach_norm(live, 1), 1))
    torch._foreach_mul_(share, -rate)
    torch._foreach_add_(share, 1)
    return share


def _is_compiled(arrays: Sequence[torch.Tensor]) -> bool:
    """Whether the compiled loops can take these tensors."""
    first = arrays[0]
    return first.dtype in _COMPILED and all(
        t.device.type == "cpu" and t.dtype is first.dtype and t.is_contiguous() for t in arrays
    )
