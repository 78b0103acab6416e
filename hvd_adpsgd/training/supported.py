"""Checks whether an optimizer can be wrapped by hvd.DistributedOptimizer; the errors name alternatives."""

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hvd_adpsgd.errors import ModelMismatchError, UnsupportedOptimizerError
from hvd_adpsgd.launch.torch_group import has_ended_group, is_known
from hvd_adpsgd.training.devices import KINDS

# Attributes of apex, DeepSpeed, Megatron and Transformer Engine with float32 copies of 16-bit parameters.
_MASTERS = (
    "fp32_from_fp16_groups",
    "fp32_from_float16_groups",
    "fp32_groups_flat_partition",
    "single_partition_of_fp32_groups",
    "param_groups_master",
    "master_params",
    "master_weights",
)
_16_BITS = (torch.float16, torch.bfloat16)


def require_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise a typed error unless Horovod can wrap the optimizer.

    Raises:
        UnsupportedOptimizerError: for LBFGS, for an optimizer that is wrapped already, for another object.
        ModelMismatchError: for a lazy or meta parameter, a part of a sharded one, or one on a device that is
            neither a CPU nor a CUDA GPU.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedOptimizerError(
            f"DistributedOptimizer wraps a torch optimizer, not {optimizer!r:.60}. Pass an instance, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "LBFGS cannot be distributed: one step() evaluates the closure many times along a line "
            "search, which the learners would leave at different points. Use SGD, Adam or another "
            "first-order optimizer."
        )
    # this library, or Horovod, has wrapped it
    if hasattr(optimizer, "_reducer") or hasattr(optimizer, "_allreduce_delay"):
        raise UnsupportedOptimizerError(
            f"this {type(optimizer).__name__} is wrapped already; pass the plain torch optimizer "
            "to hvd.DistributedOptimizer, once."
        )
    require_fit("parameter {} of the optimizer", _parameters(optimizer))


def require_fit(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise ModelMismatchError for the first tensor that cannot be averaged; `what` holds its number."""
    for i, tensor in enumerate(tensors):
        if reason := _unfit(tensor):
            raise ModelMismatchError(f"{what.format(i)} {reason}")


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _unfit(parameter: torch.Tensor) -> str:
    """Return why a parameter cannot be averaged, and the cure, for a message; "" if it can."""
    if is_lazy(parameter):
        return (
            "is lazy and has no shape yet. Run one batch through the model first, then make the "
            "optimizer and wrap it."
        )
    if parameter.is_meta:
        return (
            "is on the meta device and has no values. Load the model first (`model.to_empty(...)`, then "
            "its weights), then make the optimizer and wrap it."
        )
    kind = parameter.device.type
    if kind not in {"cpu", *KINDS}:
        return (
            f"is on a device of type {kind}, allowed are {', '.join(sorted({'cpu', *KINDS}))}: copies from "
            "and to it would not be waited for. Move the model to one of these."
        )
    if getattr(parameter, "_fsdp_flattened", False):
        return (
            "is a part of a FullyShardedDataParallel model. Use fully_shard (FSDP2) in its place."
        )
    return ""


def require_models(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> None:
    """Raise a typed error unless the optimizer's parameters are the model's own, which averaging changes.

    Raises:
        UnsupportedOptimizerError: for float32 master copies of 16-bit parameters.
    """
    trained = set(_parameters(optimizer))
    where = _masters(optimizer, trained, [p for _, p in named or () if isinstance(p, torch.Tensor)])
    if where:
        raise UnsupportedOptimizerError(
            f"this {type(optimizer).__name__} holds float32 master copies of 16-bit parameters ({where}): "
            "they would overwrite in every step what averaging adds to the parameters. Train float32 "
            "parameters under torch.autocast, or 16-bit ones with a plain optimizer."
        )


def averages_gradients(
    optimizer: torch.optim.Optimizer, asked: bool | None, is_inside: Callable[[Any], bool]
) -> bool:
    """Return whether this library, not the script, averages the optimizer's gradients in the super learner.

    Args:
        optimizer: the optimizer.
        asked: what the script says; None: the library does, unless DistributedDataParallel does.
        is_inside: tells whether a torch.distributed process group has the learners of this super learner.

    Raises:
        ModelMismatchError: for a DistributedDataParallel model over other learners than the super learner's,
            one whose process group has ended, or one whose gradients the library is asked to average, too.
    """
    trained = set(_parameters(optimizer))
    ddp = ddp_of(trained)
    if ddp is not None and not is_known(ddp.process_group):
        gc.collect()  # the script may have dropped it
        ddp = ddp_of(trained)
    if ddp is None:
        return asked is not False
    if not is_known(ddp.process_group):
        raise ModelMismatchError(
            "the optimizer's parameters belong to a DistributedDataParallel model whose process group has "
            "ended, as hvd.shutdown() or destroy_process_group() does. Drop it, and put another one around "
            "its module, with process_group=hvd.super_learner_group()."
        )
    if asked:
        raise ModelMismatchError(
            "average_gradients=True, and the optimizer's parameters belong to a DistributedDataParallel "
            "model, which averages gradients itself. Leave the argument out."
        )
    if not is_inside(ddp.process_group):
        raise ModelMismatchError(
            "the optimizer's parameters belong to a DistributedDataParallel model over learners of several "
            "super learners, or of a part of one. Leave DistributedDataParallel out, or pass it "
            "process_group=hvd.super_learner_group()."
        )
    return False


def require_no_ddp(trained: set[torch.Tensor]) -> None:
    """Raise ModelMismatchError if a tensor in `trained` is a parameter of a DistributedDataParallel model."""
    if ddp_of(trained) is not None:
        raise ModelMismatchError(
            "DistributedDataParallel was put around the model after hvd.DistributedOptimizer, and both would "
            "average gradients. Leave it out, or put it around the model first, with "
            "process_group=hvd.super_learner_group()."
        )


def ddp_of(trained: set[torch.Tensor]) -> Any:
    """Return the DistributedDataParallel model that has a parameter in `trained`; None if there is none.

    Looks through all objects of the process, if torch.distributed is initialized, or was by this library.
    """
    if not torch.distributed.is_available():
        return None
    if not (torch.distributed.is_initialized() or has_ended_group()):
        return None
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel) and trained & set(thing.parameters()):
            return thing
    return None


def _masters(
    optimizer: torch.optim.Optimizer, trained: set[torch.Tensor], named: list[torch.Tensor]
) -> str:
    """Return where the optimizer keeps float32 master copies, for a message; "" if none is found."""
    for holder in (optimizer, getattr(optimizer, "_amp_stash", None)):
        for name in _MASTERS:
            if _holds(getattr(holder, name, None)):
                return f"its {name}"
    for state in optimizer.state.values():
        for key in state if isinstance(state, dict) else ():
            if "master" in str(key):
                return f"its state {key!r}"
    apart = any(p.dtype in _16_BITS and p not in trained for p in named)
    if apart and not trained <= set(named):
        return "its param_groups, beside 16-bit named_parameters"
    return ""


def _holds(masters: Any) -> bool:
    """Whether an attribute's value shows master copies: True, a tensor or a list with tensors; no method."""
    if isinstance(masters, (list, tuple)):
        return any(isinstance(m, torch.Tensor) or _holds(m) for m in masters)
    return masters is True or isinstance(masters, torch.Tensor)
