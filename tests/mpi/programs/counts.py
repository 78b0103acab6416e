"""metrics(), the timeline, and max_staleness.

Arguments: file for the timeline. The learners of super learner 0 are slower than the others. In the
end a child stops learner 0 for two seconds while the others train on.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from learner import generator, pauses, say, wait_exchanged

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.config import Config
from hvd_adpsgd.runtime import world as worlds
from hvd_adpsgd.torch.reports import metrics_of

SIZE = 100_000  # float32: 7 chunks of 64 KiB
STEPS = 50
STOPPED_S = 2.0


class Training:
    def __init__(self, **how: Any) -> None:
        weights = torch.randn(SIZE, generator=generator(hvd.super_rank()))
        self.model = torch.nn.ParameterList([weights])
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1e-3),
            named_parameters=self.model.named_parameters(),
            **how,
        )
        self.longest = 0.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model[0].square().sum().backward()
        began = time.monotonic()
        self.optimizer.step()
        self.longest = max(self.longest, time.monotonic() - began)

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


def fresh() -> None:
    """Staleness of what was applied, with a bound."""
    for bound in (1, 2, 4):
        training = Training(max_staleness=bound, exchanges_per_step=4.0)
        training.train(STEPS, pauses(1e-3))
        numbers = training.numbers()
        training.optimizer._averaging.stop()
        say(case=f"bound {bound}", staleness=numbers.get("staleness"), longest=training.longest)


def bounded() -> None:
    """Learner 0 is stopped; the others wait for it by max_staleness, each time for a while only."""
    training = Training(max_staleness=1, exchanges_per_step=4.0)
    training.train(5, pauses())
    victim = worlds.current().collectives.comm.bcast(os.getpid())
    if hvd.rank() == 0 and os.fork() == 0:
        os.kill(victim, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(victim, signal.SIGCONT)
        os._exit(0)
    ends = time.monotonic() + STOPPED_S
    stopped = 0
    training.longest = 0.0
    for steps in itertools.count(1):
        training.step()
        with open(f"/proc/{victim}/stat") as file:
            stopped += file.read().rsplit(")", 1)[1].split()[0] == "T"
        if time.monotonic() > ends:
            say(case="bounded", longest=training.longest, steps=steps, stopped=stopped)
            break


if __name__ == "__main__":
    hvd.init(config=Config(super_learner_size=2, timeline=sys.argv[1], chunk_kib=64, deadline_s=60))
    counted()
    hvd.init(config=Config(super_learner_size=1, chunk_kib=64, deadline_s=0.4))
    fresh()
    bounded()
