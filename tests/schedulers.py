"""Every learning-rate scheduler of torch, made on an optimizer, and what it does to that step by step."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

Make = Callable[[torch.optim.Optimizer], Any]

MAKE: dict[str, Make] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 1, 0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.25, total_iters=4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.2, 3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.3, total_steps=12),
    "SWALR": lambda o: SWALR(o, 0.02, anneal_epochs=5),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.8)], optimizer=o
    ),
}


def of_torch() -> set[str]:
    """The names of torch's schedulers."""
    return {
        name
        for name, kind in inspect.getmembers(lrs, inspect.isclass)
        if issubclass(kind, lrs.LRScheduler) and kind.__module__ == lrs.__name__
    } - {"LRScheduler", "_LRScheduler"} | {"SWALR"}


def optimizers() -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Two groups each; with momentum, with betas and learning rates that are tensors."""
    for name, kind, lr in (
        ("SGD", torch.optim.SGD, 0.1),
        ("Adam", torch.optim.Adam, torch.tensor(0.1)),
    ):
        first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        momentum: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {"betas": (0.9, 0.99)}
        other = lr / 4 if isinstance(lr, float) else lr.clone() / 4
        groups = [{"params": [first]}, {"params": [second], "lr": other}]
        yield name, kind(groups, lr=lr, **momentum)  # type: ignore[arg-type]


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Learning rate and momentum of each group."""
    return [
        float(value)
        for group in optimizer.param_groups
        for value in (group["lr"], group.get("momentum") or group["betas"][0])
    ]


def trace(optimizer: torch.optim.Optimizer, schedulers: list[Any], step: int) -> list[list[float]]:
    """The rates after each scheduler has made its step, behind a step of the optimizer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    found = []
    for scheduler in schedulers:
        metric = (1.0 + step,) if isinstance(scheduler, lrs.ReduceLROnPlateau) else ()
        scheduler.step(*metric)
        found.append(rates(optimizer))
    return found
