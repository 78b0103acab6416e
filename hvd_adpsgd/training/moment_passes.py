"""The passes over the moments of an adaptive optimizer, of several parameters at once; see shared_moments.

Contiguous tensors in host memory take the compiled loops of ext/c/moments.c, one pass each; others torch's.
"""

import itertools
import math
import sys
from typing import Any, NamedTuple

import torch

from hvd_adpsgd.training import moments
from hvd_adpsgd.training.sharded import local

Tensors = list[torch.Tensor]
_COMPILED = (torch.float32, torch.float64)
_MOST = 1e4  # ADPSGD_MOST of moments.h


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
        rate: 1 - b^p.
        scale: 1 / (r w).
        known: (1 - a^steps)^2, with a the decay of the first moment.
    """

    rate: float
    scale: float
    known: float


def copy_all(targets: Tensors, values: Tensors) -> None:
    """Copy each value to its target."""
    if targets:
        torch._foreach_copy_(_parts(targets), _parts(values))


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
        cross: x; limited, and raised where the moment cannot be of own gradients.
        lacking: q, a tensor of one number for each parameter.
    """
    every = list(map(_parts, (second, own, gradients, parameters, moment, cross)))
    compiled, left = _parted(every)
    for i, arrays in compiled:
        q = float(lacking[i])
        weight = q**law.haste
        known = law.known * (1 - weight) / (1 - q) if q < 1 else 0.0
        bound = law.bound if known else math.inf
        numbers = [weight, law.decay, known, law.share, law.l2, law.first, bound]
        moments.correct(*arrays, *numbers)
    if left:
        _correct_by_torch(law, *([tensors[i] for i in left] for tensors in (*every, lacking)))


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
    seen = torch._foreach_add(gradients, parameters, alpha=law.l2)
    following = torch._foreach_lerp(seen, moment, law.first)
    fresh = torch._foreach_mul(seen, 1 - law.decay)
    torch._foreach_mul_(fresh, seen)
    copy_all(own, second)
    torch._foreach_mul_(own, law.decay)
    torch._foreach_add_(own, fresh)
    mean = []
    for x, m, v, q in zip(cross, following, own, lacking, strict=True):
        w = q**law.haste
        k = law.known * (1 - w) / (1 - q).clamp(min=1e-30)
        limit = torch.where(k > 0, _MOST * torch.maximum(m * m, v) / k, math.inf)
        limited = torch.where(x > limit, limit, torch.where(x < -limit, -limit, x))
        least = m * (m / law.bound)
        raised = torch.where((least > v) & (k > 0), torch.maximum(limited, least / k), limited)
        x.copy_(raised).clamp_(max=torch.finfo(x.dtype).max / 4)
        mean.append(torch.addcmul(k * raised, w, v))
    torch._foreach_clamp_min_(mean, 0)
    torch._foreach_lerp_(mean, own, law.share)
    torch._foreach_sub_(mean, fresh)
    torch._foreach_div_(mean, law.decay)
    for v, given, mine in zip(second, mean, own, strict=True):
        # moments of peers too large: no step
        given = torch.where(torch.isfinite(given), given, math.inf)
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
    cross, moment, before, offered = every = list(map(_parts, (cross, moment, before, offered)))
    compiled, left = _parted(every)
    for i, arrays in compiled:
        arrived, live = moments.multiply(*arrays, *list(law))
        lacking[i].mul_(1 - law.rate * arrived / max(live, 1))
    if left:
        lists = (cross, lacking, moment, before, offered)
        _multiply_by_torch(law, *([tensors[i] for i in left] for tensors in lists))


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
    for each in product:  # an infinite one would stay in `cross` for good
        largest = torch.finfo(each.dtype).max / 4
        torch.nan_to_num_(each, nan=largest).clamp_(-largest, largest)
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


def _parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of DTensors that this learner holds; plain tensors themselves."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not any(map(isinstance, tensors, itertools.repeat(module.DTensor))):
        return tensors
    return [local(tensor) for tensor in tensors]


def _parted(every: list[Tensors]) -> tuple[list[tuple[int, list[Any]]], list[int]]:
    """Return the places whose tensors the compiled loops can take, with their arguments; the other places.

    The arguments: whether these are of float64, their length, and an address in each of the lists.
    """
    compiled: list[tuple[int, list[Any]]] = []
    left: list[int] = []
    for i, tensors in enumerate(zip(*every, strict=True)):
        dtype = tensors[0].dtype
        fits = dtype in _COMPILED
        for t in tensors:  # no generator: its calls take longer than its work
            fits = fits and t.device.type == "cpu" and t.dtype is dtype and t.is_contiguous()
        if fits:
            addresses = map(torch.Tensor.data_ptr, tensors)
            compiled.append((i, [dtype is torch.float64, tensors[0].numel(), *addresses]))
        else:
            left.append(i)
    return compiled, left
