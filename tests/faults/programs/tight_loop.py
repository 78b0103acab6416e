"""Operations over all learners in a tight loop, while engines exchange; one learner is killed.

    python tight_loop.py VICTIM DELAY OPERATIONS

VICTIM is killed DELAY seconds after its first exchange. Survivors run so many operations from the first one
on that counts the victim as failed. Then they say of every operation by its number: what it gave, and the
learners that have failed after it.
"""

import os
import signal
import sys
import threading
import time

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.launch.world import current
from tests.mpi.programs.learner import say

PAUSE_S = 0.002  # of a step: other learners share the cores
LONGEST_S = 60.0


def operation(number: int) -> list[float]:
    """One of several operations; its result tells whose values it holds."""
    mine = torch.tensor([1.0 + number, 2.0 ** hvd.rank()])
    kind = number % 4
    if kind == 0:
        return hvd.allreduce(mine, op=hvd.Sum).tolist()
    if kind == 1:
        return hvd.allgather(mine).tolist()
    if kind == 2:
        return hvd.allreduce(mine.repeat(200_000), op=hvd.Max)[:2].tolist()
    return [float(value) for value in hvd.allgather_object(2 ** hvd.rank())]


def main() -> None:
    victim, delay_s, more = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    torch.manual_seed(hvd.super_rank())
    model = torch.nn.Linear(200, 200)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        exchanges_per_step=8.0,
    )
    ranks = current().collectives
    told: list[tuple[list[float], list[int]]] = []
    hvd.barrier()
    kill = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
    left, ends = more, time.monotonic() + LONGEST_S
    while left:
        assert time.monotonic() < ends, f"no failure was seen in {len(told)} operations"
        if len(told) % 3 == 0:
            optimizer.zero_grad()
            model(torch.randn(4, 200)).square().mean().backward()
            optimizer.step()
            time.sleep(PAUSE_S)
            if hvd.rank() == victim and kill.ident is None and hvd.metrics()["exchanges"]:
                kill.start()
        value = operation(len(told))
        told.append((value, sorted(ranks.gone())))
        left -= bool(ranks.gone())
    facts = {"rank": hvd.rank(), "told": told, "exchanges": hvd.metrics()["exchanges"]}
    say(**facts)
    hvd.shutdown()


if __name__ == "__main__":
    main()
