"""Local peers that torch waits for in vain, in three super learners of two.

Arguments: what averages the gradients in each super learner: ddp, fsdp or script.

Learner 1 calls hvd.barrier() after fewer steps than learner 0, which waits for it in torch; all others wait
in the barrier, too. Then learner 3 ends its training earlier than learner 2, and learner 5 enters an
operation inside its super learner in place of learner 4's next step.
"""

import sys
from collections.abc import Callable

import torch
from inner import outcome
from learner import say
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd_adpsgd.torch as hvd

STEPS = 3


def trainer(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and a function that makes a step with it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    trained: torch.nn.Module = model
    group = hvd.super_learner_group()
    if kind == "ddp":
        trained = DistributedDataParallel(model, process_group=group)
    if kind == "fsdp":
        fully_shard(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        plain, average_gradients=False if kind == "script" else None
    )

    def step() -> None:
        optimizer.zero_grad()
        trained(torch.randn(3, 5)).square().mean().backward()
        if kind == "script":
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG, group)
        optimizer.step()

    return model, optimizer, step


def waits_in_vain(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
    """Say how torch's wait ends, and raise what the next call of this library raises."""
    try:
        step()
    except RuntimeError as error:
        say(torch=str(error), next=outcome(optimizer.step))
        optimizer.step()


def main() -> None:
    hvd.init()
    rank, kind = hvd.rank(), sys.argv[1 + hvd.super_rank()]
    model, optimizer, step = trainer(kind)
    for _ in range(STEPS):
        step()
    say(join=outcome(hvd.join))  # at once: no learner waits
    if rank == 0:
        waits_in_vain(step, optimizer)
        return
    say(barrier=outcome(hvd.barrier))
    if rank in (2, 4):
        waits_in_vain(step, optimizer)
    elif rank == 5:
        elsewhere = {
            "ddp": lambda: hvd.admit(model, optimizer, blocking=False),
            "fsdp": lambda: hvd.barrier(hvd.super_learner),
        }
        say(inside=outcome(elsewhere[kind]), next=outcome(hvd.barrier))


if __name__ == "__main__":
    main()
