"""A learner of two super learners of two: what a script sees, under whichever launcher."""

import os
import sys
import time

import torch

import hvd_adpsgd.torch as hvd
from tests.mpi.programs.learner import say


def places() -> dict[str, object]:
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    supers = ("super_rank", "super_size", "is_leader")
    return {name: getattr(hvd, name)() for name in (*names, *supers)}


def operations() -> dict[str, object]:
    """Over all learners, and inside a super learner."""
    mine = torch.full((3,), float(hvd.rank() + 1))
    large = torch.arange(300_000, dtype=torch.float32) * (hvd.rank() + 1)
    inner = hvd.super_learner
    return {
        "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
        "large": float(hvd.allreduce(large, op=hvd.Sum).double().sum()),
        "gathered": hvd.allgather(mine[: hvd.rank()]).tolist(),
        "objects": hvd.allgather_object({"rank": hvd.rank()}),
        "broadcast": hvd.broadcast_object([hvd.rank()], root_rank=2),
        "later": hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Max)).tolist(),
        "inner": hvd.allreduce(mine, op=hvd.Sum, process_set=inner).tolist(),
    }


def train(averaging: str, steps: int = 12) -> dict[str, object]:
    """A model's numbers: its sum over super learners moves by local updates only, and here by none."""
    torch.manual_seed(hvd.super_rank())
    model = torch.nn.Linear(400, 300)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
        averaging=averaging,
    )
    before = mean_of(model)
    step, ends = 0, time.monotonic() + 60
    while step < steps or not any(hvd.allgather_object(averagings() > 0)):
        assert time.monotonic() < ends, "nothing was averaged"
        step += 1
        optimizer.zero_grad()
        model(torch.ones(8, 400)).sum().backward()
        optimizer.step()
    with hvd.averaging_paused():
        drift = (mean_of(model) - before).abs().max().item()
        own = [float(p.double().sum()) for p in model.parameters()]
    node = hvd.allgather_object(own)
    with hvd.averaged(model):
        digest = hvd.allgather_object([float(p.double().sum()) for p in model.parameters()])
    found = {
        "drift": drift,
        "same_inside": node[0] == node[1] and node[2] == node[3],
        "same_mean": all(each == digest[0] for each in digest),
        "averagings": averagings(),
    }
    optimizer.close()
    return found


def averagings() -> int:
    numbers = hvd.metrics()
    return int(numbers["exchanges"] + numbers["means"])


def mean_of(model: torch.nn.Module) -> torch.Tensor:
    flat = torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])
    return hvd.allreduce(flat, op=hvd.Average)


def main() -> None:
    hvd.init()
    facts = {"places": places(), "operations": operations()}
    for averaging in ("random_pairs", "delay_by_one"):
        facts[averaging] = train(averaging)
    hvd.barrier()
    child = os.fork()
    if child == 0:
        sys.exit(0)  # not a learner
    facts["forked"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    hvd.shutdown()
    hvd.init()  # again
    facts["again"] = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    say(rank=hvd.rank(), has_mpi="mpi4py.MPI" in sys.modules, **facts)


if __name__ == "__main__":
    main()
