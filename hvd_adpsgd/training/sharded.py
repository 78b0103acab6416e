"""Tensors of which each learner of a super learner holds a part: DTensors, as fully_shard (FSDP2) makes them.

A learner averages its part with its counterparts, the learners with the same inner rank in the other super
learners. No learner holds the whole model.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvd_adpsgd.errors import ModelMismatchError


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this learner holds a part."""
    module = sys.modules.get("torch.distributed.tensor")  # its import takes long
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this learner's part of a DTensor, which shares the DTensor's memory; a plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    part: torch.Tensor = tensor.to_local().detach()  # type: ignore[attr-defined]
    return part


def reshard(*modules: torch.nn.Module) -> None:
    """Put the DTensors of fully_shard back: a forward without backward leaves whole tensors in modules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", ())  # older torch lacks it
    for module in modules:
        for each in module.modules():
            if isinstance(each, kind):
                each.reshard()


def sharding(tensor: torch.Tensor) -> str:
    """Return how a DTensor is cut, to compare it between learners; "" for a plain tensor."""
    if not is_sharded(tensor):
        return ""
    its: Any = tensor
    ranks = its.device_mesh.mesh.flatten().tolist()
    order = [sorted(ranks).index(rank) for rank in ranks]  # else counterparts hold other parts
    on = tuple(its.device_mesh.shape) if order == sorted(order) else f"learners {order}"
    return f" {its.placements} on {on}"


def require_not_replaced(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelMismatchError if the model has DTensors in the place of an optimizer's parameters.

    fully_shard and tensor parallelism give modules new parameters. An optimizer of the old ones gets no
    gradients, and would change nothing. Looks through all objects of the process, if it uses DTensors.

    Args:
        named: names and parameters that the optimizer trains, before its first step.
    """
    module = sys.modules.get("torch.distributed.tensor")
    lost = {id(p): (name, p) for name, p in named if not is_sharded(p) and p.grad is None}
    if module is None or not lost:
        return
    present: set[torch.Size] = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module):
            for parameter in thing.__dict__.get("_parameters", {}).values():
                lost.pop(id(parameter), None)
                if isinstance(parameter, module.DTensor) and parameter.requires_grad:
                    present.add(parameter.shape)
    for name, parameter in lost.values():
        if parameter.shape in present:
            raise ModelMismatchError(
                f"parameter {name!r} of the optimizer is in no module any more, and gets no gradient: "
                "fully_shard or tensor parallelism has put a DTensor in its place after the optimizer was "
                "made. Make and wrap the optimizer after fully_shard."
            )


def require_whole_shards(
    named: Iterable[tuple[str, torch.Tensor]],
    sizes: Sequence[int],
    are_inside: Callable[[Sequence[int]], bool],
) -> bool:
    """Return whether an optimizer's parameters are sharded in the super learner; raise if it is otherwise.

    Args:
        named: names and parameters.
        sizes: number of learners of each super learner.
        are_inside: tells whether these ranks of torch.distributed are the learners of the super learner.

    Raises:
        ModelMismatchError: for a DTensor that two learners of the super learner hold alike, or that spans
            other learners; for DTensors beside plain parameters; for super learners of different sizes.
    """
    named = list(named)
    cut = [(name, tensor) for name, tensor in named if is_sharded(tensor)]
    for name, tensor in cut:
        _require_fit(name, tensor, are_inside)
    if cut and len(cut) < len(named):
        plain = next(name for name, tensor in named if not is_sharded(tensor))
        raise ModelMismatchError(
            f"parameter {cut[0][0]!r} is sharded over the super learner, and {plain!r} is not: every learner "
            "holds it whole. Use fully_shard on the whole model, without ignored_params and tensor "
            "parallelism; or wrap an optimizer of its own for each kind."
        )
    if cut and len(set(sizes)) > 1:
        raise ModelMismatchError(
            f"parameter {cut[0][0]!r} is sharded, and the super learners have {', '.join(map(str, sizes))} "
            "learners: their shards differ. Start super learners of one size "
            "(HVD_ADPSGD_SUPER_LEARNER_SIZE)."
        )
    return bool(cut)


def _require_fit(name: str, tensor: Any, are_inside: Callable[[Sequence[int]], bool]) -> None:
    shape = tuple(tensor.device_mesh.shape)
    if len(shape) > 1:
        raise ModelMismatchError(
            f"parameter {name!r} is a DTensor with {tensor.placements} on a mesh of {shape}, as HSDP and "
            "tensor parallelism beside fully_shard make them. Use fully_shard alone, on a mesh of one "
            "dimension over all learners of the super learner: super learners take the place of HSDP's "
            "replicas."
        )
    if not tensor.placements[0].is_shard():
        raise ModelMismatchError(
            f"parameter {name!r} is a DTensor with {tensor.placements}: learners of the super learner hold "
            "it alike, and would average it apart. Use fully_shard in the place of tensor parallelism, or "
            "leave out what tensor parallelism replicates (bias=False)."
        )
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    if not are_inside(ranks):
        raise ModelMismatchError(
            f"parameter {name!r} is sharded over ranks {ranks} of torch.distributed, which are not the "
            "learners of this super learner. Call hvd.super_learner_group() before fully_shard, or pass "
            "fully_shard a mesh of that group (DeviceMesh.from_group)."
        )
