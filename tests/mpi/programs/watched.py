"""Watched training until every leader knows enough of all: numbers of some steps, and exchanges.

Learner 1 is slow. With FAILS=2 learner 2 kills itself then, and the others train on until they know that,
and have made some more reports.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from learner import generator, outcome, say, until_all

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.training import watching
from hvd_adpsgd.watching.reports import decode

FAILS, WATCHES = os.environ.get("FAILS"), os.environ["HVD_ADPSGD_REPORT_S"] != "0"
REPORTS = 4  # of each learner: so many times its step was another one
SIZE = 50_000


def odd_values() -> dict[str, Any]:
    """What hvd.log takes and refuses."""
    odd = [
        float("nan"),
        -float("inf"),
        10**400,
        np.float32(2),
        torch.tensor([3.0]),
        True,
        np.array([1]),
    ]
    for value in odd:
        hvd.log(odd=value)
    bad = ["x", None, torch.zeros(2), torch.tensor(1j), [1.0]]
    return {"refused": [outcome(lambda v=value: hvd.log(odd=v)) for value in bad]}  # type: ignore[misc]


class Recorder:
    """A writer as TensorBoard's, which keeps what it gets."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []
        self.threads: set[str] = set()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.threads.add(threading.current_thread().name)
        self.points.append((tag, scalar_value, global_step or 0))


def known(optimizer: Any) -> dict[int, Any]:
    """What this leader knows of all, as its thread does."""
    reports = optimizer._averaging.engine.reports()
    return {i: decode(text) for i, (_, text, _) in reports.items()}


class Seen:
    """Which reports this leader has seen of each learner."""

    def __init__(self) -> None:
        self.steps: dict[int, set[int]] = {}

    def enough(self, learners: Iterable[int]) -> bool:
        """Whether it has seen REPORTS of each of them, and that they exchange."""
        reports = known(optimizer)
        for i, report in reports.items():
            self.steps.setdefault(i, set()).add(report.step)
        return all(
            i in reports and reports[i].exchanges and len(self.steps[i]) >= REPORTS
            for i in learners
        )


def watchers() -> int:
    """Threads that watch."""
    return [thread.name for thread in threading.enumerate()].count("hvd_adpsgd.watching")


hvd.init()
model = torch.nn.ParameterList([torch.randn(SIZE, generator=generator(hvd.rank()))])
optimizer: Any = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
)
facts = odd_values()
recorder = Recorder()
hvd.log_to(recorder, every_s=0.2)


def train(fact: Callable[[], bool]) -> None:
    """Some steps, and on until it is true on all learners that live."""
    for _ in until_all(fact, least=6, every=3):
        optimizer.zero_grad()
        loss = model[0].square().mean()
        loss.backward()
        hvd.log(loss=loss, lr=1e-3, learner=hvd.rank())
        optimizer.step()
        time.sleep(0.1 if hvd.rank() == 1 else 0.01)


seen = Seen()
train(lambda: not WATCHES or seen.enough(range(hvd.size())))
if str(hvd.rank()) == FAILS:
    os.kill(os.getpid(), signal.SIGKILL)
if FAILS:
    lives = [rank for rank in range(hvd.size()) if str(rank) != FAILS]
    train(lambda: bool(hvd.failed_ranks()))
    seen = Seen()
    train(lambda: seen.enough(lives))
step = optimizer._averaging.step
reports = known(optimizer)
rank, before = hvd.rank(), watchers()
sent = len(recorder.points)
waits = []
if not FAILS:
    waits.append(watching._sample(optimizer._averaging, None).waits)
    with hvd.averaging_paused():
        waits.append(watching._sample(optimizer._averaging, None).waits)
    with hvd.averaged(model):
        waits.append(watching._sample(optimizer._averaging, None).waits)
hvd.barrier()  # else a leader that ends early is followed by the next one before that has counted
if not os.environ.get("FAILS"):
    hvd.shutdown()
say(
    rank=rank,
    watchers=[before, watchers()],
    step=step,
    waits=waits,
    sent=sent,
    points=recorder.points[-2000:],
    threads=sorted(recorder.threads),
    known={i: [r.step, r.scalars["learner"], r.exchanges] for i, r in reports.items()},
    **facts,
)
