"""A super learner over torch.distributed: operations against NumPy, mismatches, DDP, a learner that ends."""

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from learner import same_inside, say
from torch.nn.parallel import DistributedDataParallel

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import AdpsgdError
from hvd_adpsgd.launch import world as worlds

STEPS = 12
INSIDE = {"process_set": hvd.super_learner}
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def mine(dtype: str, rows: int, rank: int) -> torch.Tensor:
    return (torch.arange(rows * 3).reshape(rows, 3) % 5 + rank).to(getattr(torch, dtype))


def operations(k: int, i: int) -> list[str]:
    """Names of operations whose results are not NumPy's."""
    wrong: list[str] = []

    def check(name: str, found: torch.Tensor, expected: Any) -> None:
        same = np.array_equal(found.double().numpy(), np.asarray(expected, dtype=np.float64))
        wrong.extend([] if same else [f"{name} {found} {expected}"])

    for dtype in DTYPES:
        for rows in (0, 1, 7):
            everyone = [mine(dtype, rows, r).double().numpy() for r in range(k)]
            tensor = mine(dtype, rows, i)
            check(f"sum {dtype}", hvd.allreduce(tensor, op=hvd.Sum, **INSIDE), sum(everyone))
            check(
                f"max {dtype}",
                hvd.allreduce(tensor, op=hvd.Max, **INSIDE),
                np.maximum.reduce(everyone),
            )
            check(
                f"min {dtype}",
                hvd.allreduce_(tensor.clone(), op=hvd.Min, **INSIDE),
                np.minimum.reduce(everyone),
            )
            check(f"root {dtype}", hvd.broadcast(tensor, k - 1, **INSIDE), everyone[-1])
            uneven = mine(dtype, rows + i, i)
            gathered = np.concatenate([mine(dtype, rows + r, r).double().numpy() for r in range(k)])
            check(f"gather {dtype}", hvd.allgather(uneven, **INSIDE), gathered)
    floats = [np.arange(7.0) + r for r in range(k)]
    tensor = torch.arange(7.0) + i
    scaled = hvd.allreduce(tensor, prescale_factor=2.0, postscale_factor=3.0, **INSIDE)
    check("scaled average", scaled, 6 * sum(floats) / k)
    check("product", hvd.allreduce(tensor, op=hvd.Product, **INSIDE), np.prod(floats, axis=0))
    for one, other in zip(
        hvd.grouped_allreduce([tensor, 2 * tensor], op=hvd.Sum, **INSIDE), (1, 2), strict=True
    ):
        check("group", one, other * sum(floats))
    part = np.array_split(sum(floats), k)[i]
    check("reducescatter", hvd.reducescatter(tensor, op=hvd.Sum, **INSIDE), part)
    splits = torch.tensor([r + 1 for r in range(k)], dtype=torch.int32)
    sent = torch.full((int(splits.sum()),), float(i))
    received, counts = hvd.alltoall(sent, splits, **INSIDE)
    check("alltoall", received, np.repeat(np.arange(float(k)), i + 1))
    check("alltoall counts", counts, [i + 1] * k)
    handles = [
        hvd.allreduce_async(torch.full((3,), float(n + i)), op=hvd.Sum, **INSIDE) for n in range(50)
    ]
    for n, handle in enumerate(handles):
        check("asynchronous", hvd.synchronize(handle), [k * n + sum(range(k))] * 3)
    square = torch.arange(9.0).reshape(3, 3).t() + i
    check(
        "strided",
        hvd.allreduce_(square.clone(), op=hvd.Sum, **INSIDE),
        k * square.numpy() + k * (k - 1) / 2 - k * i,
    )
    mixed = [
        torch.tensor([3]),
        torch.tensor([0.25, 0.5]),
        torch.tensor([1 / 3], dtype=torch.float64),
    ]
    reduced = hvd.grouped_allreduce([one * (i + 1) for one in mixed], op=hvd.Max, **INSIDE)
    for found, one in zip(reduced, mixed, strict=True):
        check("mixed dtypes", found, (one * k).numpy())
    check("NumPy's root", hvd.broadcast(torch.tensor([float(i)]), np.int64(1), **INSIDE), [1.0])
    told = hvd.broadcast_object({"of": i}, k - 1, **INSIDE)
    wrong.extend([] if told == {"of": k - 1} else [f"object {told}"])
    return wrong


def differentiable(k: int, i: int) -> bool:
    x = torch.arange(4.0, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum, **INSIDE) * (i + 1)).sum().backward()
    expected = torch.full((4,), float(sum(range(1, k + 1))))
    y = torch.ones(2, requires_grad=True)
    (hvd.allgather(y, **INSIDE) * torch.arange(2.0 * k)).sum().backward()
    return torch.equal(x.grad, expected) and torch.equal(y.grad, torch.arange(2.0) + 2 * i)


def outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except (AdpsgdError, hvd.HorovodInternalError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def train(average_gradients: bool | None, ddp: bool, **how: Any) -> dict[str, Any]:
    """Some steps, different data on each learner; whether the learners of the super learner stay the same.

    With DDP each step has two backward passes, of which the first is not averaged.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    trained: torch.nn.Module = model
    if ddp:
        group = hvd.super_learner_group()
        trained = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, average_gradients=average_gradients, **how)
    data = torch.Generator().manual_seed(hvd.rank())
    hooks = len(optimizer._reducer.hooks)  # type: ignore[attr-defined]
    same, before = [], [p.detach().clone() for p in model.parameters()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        if ddp:
            with trained.no_sync():
                trained(torch.randn(8, 5, generator=data)).square().mean().backward()
        trained(torch.randn(8, 5, generator=data)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        same.append(same_inside(list(model.parameters())))
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with hvd.averaging_paused():
        hvd.average_model(model)
    optimizer.close()
    return {"same": same, "moved": moved, "hooks": hooks}


def wrong_group() -> None:
    model = torch.nn.Linear(2, 2)
    alone = torch.distributed.new_group(
        [torch.distributed.get_rank()], use_local_synchronization=True
    )
    ddp = DistributedDataParallel(model, process_group=alone)
    hvd.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))


def main() -> None:
    hvd.init()
    world = worlds.current()
    k, i, rank = world.inner_size, world.inner_rank, hvd.rank()
    say(rank=rank, wrong=operations(k, i), differentiable=differentiable(k, i))
    shape = (2,) if i else (3,)
    say(rank=rank, mismatch=outcome(lambda: hvd.allreduce(torch.ones(shape), name="x", **INSIDE)))
    say(rank=rank, after=hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum, **INSIDE).tolist())
    say(rank=rank, ours=train(None, ddp=False), ddp=train(None, ddp=True))
    say(rank=rank, nobody=outcome(lambda: train(False, ddp=False)))
    say(rank=rank, twice=outcome(lambda: train(True, ddp=True)))
    say(rank=rank, wrong_group=outcome(wrong_group))
    say(rank=rank, rounds=outcome(lambda: train(None, ddp=True, averaging="delay_by_one")))
    say(rank=rank, adasum=outcome(lambda: train(None, ddp=False, op=hvd.Adasum)))
    hvd.barrier()
    if rank == hvd.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.super_rank == hvd.super_size() - 1:
        say(rank=rank, lost=outcome(lambda: hvd.allreduce(torch.ones(2), name="y", **INSIDE)))
        return
    say(rank=rank, still=hvd.allreduce(torch.ones(2), op=hvd.Sum, **INSIDE).tolist())


if __name__ == "__main__":
    main()
