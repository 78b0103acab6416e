"""SGD with gradients that everybody knows: the mean of the models moves by the gradients only.

Each learner computes what the mean over super learners must be after `STEPS` steps, and compares it
with what average_model gives. Arguments: names of the cases to run, all without any.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from learner import (
    digest,
    generator,
    pauses,
    retired,
    same_everywhere,
    same_inside,
    say,
    wait_exchanged,
    wrap,
)

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training.reports import metrics_of

STEPS = 40
LR = 0.125
SHAPES = [(33, 17), (5,), (), (70_001,)]  # several chunks of the least size, 64 KiB

Tensors = list[torch.Tensor]


def initial(super_rank: int, dtype: torch.dtype) -> Tensors:
    random = generator(1, super_rank)
    return [torch.randn(shape, generator=random, dtype=dtype) + super_rank for shape in SHAPES]


def gradients(step: int, rank: int, dtype: torch.dtype) -> Tensors:
    random = generator(2, step, rank)
    return [0.1 * torch.randn(shape, generator=random, dtype=dtype) for shape in SHAPES]


def expected(dtype: torch.dtype, first: int, last: int, start: Tensors) -> Tensors:
    """start - LR sum of the mean gradients, in float64."""
    pairs = zip(start, mean_gradients(dtype, first, last), strict=True)
    return [t.double() - LR * g for t, g in pairs]


@functools.cache
def mean_gradients(dtype: torch.dtype, first: int, last: int) -> Tensors:
    """The sum of these steps' mean gradients, in float64. Super learners are of equal size."""
    sums = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(first, last):
        for rank in range(hvd.size()):
            for total, g in zip(sums, gradients(step, rank, dtype), strict=True):
                total += g.double() / hvd.size()
    return sums


def distance(model: torch.nn.Module, means: Tensors) -> float:
    """Largest difference, in units of the largest element of its tensor."""
    pairs = zip(model.parameters(), means, strict=True)
    return max(((p.double() - m).abs().max() / m.abs().max()).item() for p, m in pairs)


def train(
    model: torch.nn.Module,
    optimizer: Any,
    steps: range,
    dtype: torch.dtype,
    pause: Iterator[None],
    skips: bool = False,
    between: bool = False,
) -> bool:
    """Train with the known gradients. True if the super learner's learners were alike after every step.

    Args:
        skips: some steps are given up after their gradients were averaged.
        between: some steps call average_model between backward() and step().
    """
    same = True
    for step in steps:
        next(pause)
        if skips and step % 5 == 0:
            unfinished(model, optimizer)
        optimizer.zero_grad()
        pairs = zip(model.parameters(), gradients(step, hvd.rank(), dtype), strict=True)
        sum((p * g).sum() for p, g in pairs).backward()
        if between and step % 8 == 7:
            hvd.average_model(model)
        optimizer.step()
        same = same and same_inside(model.parameters())
    return same


def run(name: str, dtype: torch.dtype, pause: Iterator[None], **how: Any) -> None:
    model = torch.nn.ParameterList(initial(hvd.super_rank(), dtype))
    with retired(wrap(model, functools.partial(torch.optim.SGD, lr=LR), **how)) as optimizer:
        skips = name == "synchronized"
        same = train(model, optimizer, range(STEPS), dtype, pause, skips, name == "between")
        wait_exchanged(optimizer)
        if skips:  # corrections published for a step that never comes
            unfinished(model, optimizer)
        spread = max(worlds.current().collectives.comm.allgather(digest(model.parameters())))
        hvd.average_model(model)
        starts = [initial(s, dtype) for s in range(hvd.super_size())]
        means = expected(dtype, 0, STEPS, [sum(t).double() / len(t) for t in zip(*starts)])  # noqa: B905
        error = distance(model, means)
        alike = same_everywhere(model.parameters())
        before = digest(model.parameters())
        hvd.average_model(model)
        again = digest(model.parameters()) == before
        means = [p.detach().clone() for p in model.parameters()]
        same = same and train(model, optimizer, range(STEPS, STEPS + 10), dtype, pause)
        hvd.average_model(model)
        later = distance(model, expected(dtype, STEPS, STEPS + 10, means))
        numbers = metrics_of(optimizer._averaging)
    say(
        case=name,
        error=error,
        later=later,
        alike=alike,
        again=again,
        same=same,
        apart=spread != before,
        exchanges=numbers.get("exchanges", 0),
    )


def unfinished(model: torch.nn.Module, optimizer: Any) -> None:
    """Super learner 0 averages gradients and then skips the step, as GradScaler does."""
    if hvd.super_rank() == 0:
        optimizer.zero_grad()
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.synchronize()


def equal_models_stay() -> bool:
    """Does average_model leave alone what is equal everywhere?"""
    model = torch.nn.ParameterList([*initial(0, torch.float32), *initial(0, torch.float64)])
    before = digest(model.parameters())
    hvd.average_model(model)
    return digest(model.parameters()) == before


def weighted() -> dict[str, Any]:
    """average_model with weights: 1, 2, 3, ... of the super learners, 0 for all but one, and refused ones."""
    n, me = hvd.super_size(), hvd.super_rank()
    starts = [initial(s, torch.float64) for s in range(n)]
    model = torch.nn.ParameterList(initial(me, torch.float64))
    hvd.average_model(model, weight=1 + me)
    total = n * (n + 1) / 2
    means = [sum((1 + s) * t for s, t in enumerate(ts)) / total for ts in zip(*starts)]  # noqa: B905
    error = distance(model, means)
    for least in (5e-324, 2.0**1000):
        model = torch.nn.ParameterList(initial(me, torch.float64))
        hvd.average_model(model, weight=(1 + me) * least)
        error = max(error, distance(model, means))
    model = torch.nn.ParameterList(initial(me, torch.float32))
    hvd.average_model(model, weight=2.0**1023)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    model = torch.nn.ParameterList(initial(me, torch.float64))
    hvd.average_model(model, weight=float(me == n - 1))
    pairs = zip(model.parameters(), starts[-1], strict=True)
    refusals = {}
    bad = {"nan": float("nan"), "all 0": 0, "many": torch.ones(2), "too large": 10**400}
    for name, weight in {"negative": 1 - 2 * hvd.rank(), **bad}.items():
        try:
            hvd.average_model(model, weight=weight)
        except ConfigError as problem:
            refusals[name] = str(problem)
    return {
        "weighted": error,
        "finite": finite,
        "one": max(float((p.detach() - q).abs().max()) for p, q in pairs),
        "refusals": refusals,
    }


def main() -> None:
    hvd.init()
    say(case="equal", kept=equal_models_stay(), **weighted())
    pause = pauses()
    often = {"exchanges_per_step": 2.0}
    for name, dtype, how in (
        ("float32", torch.float32, often),
        ("float64", torch.float64, often),
        ("random_ring", torch.float64, {"averaging": hvd.RandomRing(seed=5), **often}),
        ("synchronized", torch.float64, often),
        ("between", torch.float64, often),
        ("float16 wire", torch.float32, {"wire_dtype": "float16", **often}),
        ("bfloat16 wire", torch.float32, {"wire_dtype": "bfloat16", **often}),
        ("bfloat16", torch.bfloat16, often),
    ):
        if name in sys.argv[1:] or not sys.argv[1:]:
            run(name, dtype, pause, **how)


if __name__ == "__main__":
    main()
