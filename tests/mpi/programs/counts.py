"""metrics(), the timeline, and max_staleness.

Arguments: file for the timeline. The learners of super learner 0 are slower than the others. In the
end learner 1 stops learner 0 until the others have made some steps.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from learner import generator, pauses, say, wait_exchanged

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.config import Config
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training.reports import metrics_of

SIZE = 100_000  # float32: 7 chunks of 64 KiB
STEPS = 50
BESIDE = 6  # steps that the others make while learner 0 is stopped


class Training:
    def __init__(self, **how: Any) -> None:
        weights = torch.randn(SIZE, generator=generator(hvd.super_rank()))
        self.model = torch.nn.ParameterList([weights])
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1e-3),
            named_parameters=self.model.named_parameters(),
            **how,
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model[0].square().sum().backward()
        self.optimizer.step()

    def train(self, steps: int, pause: Iterator[None]) -> None:
        for _ in range(steps):
            next(pause)
            if hvd.super_rank() == 0:
                next(pause)
            self.step()
        wait_exchanged(self.optimizer)

    def numbers(self) -> dict[str, Any]:
        return metrics_of(self.optimizer._averaging)  # type: ignore[no-any-return]


def counted() -> None:
    """The numbers of two optimizers, when their engines have ended."""
    pause = pauses()
    first, second = Training(), Training(exchanges_per_step=3.0, wire_dtype="float16")
    first.train(STEPS, pause)
    second.train(STEPS, pause)
    live = hvd.metrics()
    rank = hvd.rank()
    hvd.shutdown()
    say(rank=rank, case="counted", live=live, first=first.numbers(), second=second.numbers())


def bounded() -> None:
    """Learner 0 is stopped until the others have made their steps: they wait for it for a while only."""
    training = Training(max_staleness=1, exchanges_per_step=4.0)
    training.train(5, pauses())
    comm, over = worlds.current().collectives.comm, np.zeros(1)
    victim = comm.bcast(os.getpid())
    others = comm.Split(int(hvd.rank() == 0), hvd.rank())
    if hvd.rank() == 0:
        told = comm.Irecv(over, 1)
        while not told.Test():
            training.step()
        return
    if hvd.rank() == 1:
        os.kill(victim, signal.SIGSTOP)
        while not is_stopped(victim):
            time.sleep(1e-3)
    try:
        others.Barrier()
        for _ in range(BESIDE):
            training.step()
        stopped = is_stopped(victim)
        others.Barrier()
    finally:
        os.kill(victim, signal.SIGCONT)
    if hvd.rank() == 1:
        comm.Send(over, 0)
    say(case="bounded", steps=BESIDE, stopped=stopped)


def is_stopped(process: int) -> bool:
    with open(f"/proc/{process}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


if __name__ == "__main__":
    hvd.init(config=Config(super_learner_size=2, timeline=sys.argv[1], chunk_kib=64, deadline_s=60))
    counted()
    hvd.init(config=Config(super_learner_size=1, chunk_kib=64, deadline_s=0.4))
    bounded()
