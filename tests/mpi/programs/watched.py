"""Watched training, for so many seconds. Learner 1 is slow; with FAILS=2 learner 2 kills itself."""

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
from learner import generator, outcome, say

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.watching.reports import decode

SECONDS = float(sys.argv[1])
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
        if os.environ.get("WRITER_RAISES"):
            raise OSError("no space left")
        self.points.append((tag, scalar_value, global_step or 0))


def known(optimizer: Any) -> dict[int, Any]:
    """What this leader knows of all, as its thread does."""
    reports = optimizer._averaging.engine.told()
    return {i: decode(text) for i, (_, text, _) in reports.items()}


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
ends, longest = time.monotonic() + SECONDS, 0.0
while time.monotonic() < ends:
    optimizer.zero_grad()
    loss = model[0].square().mean()
    loss.backward()
    began = time.monotonic()
    hvd.log(loss=loss, lr=1e-3, learner=hvd.rank())
    longest = max(longest, time.monotonic() - began)
    optimizer.step()
    time.sleep(0.1 if hvd.rank() == 1 else 0.01)
    if os.environ.get("FAILS") == str(hvd.rank()) and time.monotonic() > ends - SECONDS / 2:
        os.kill(os.getpid(), signal.SIGKILL)
step = optimizer._averaging.step
reports = known(optimizer)
rank, before = hvd.rank(), watchers()
sent = len(recorder.points)
hvd.barrier()  # else a leader that ends early is followed by the next one before that has counted
if not os.environ.get("FAILS"):
    hvd.shutdown()
say(
    rank=rank,
    watchers=[before, watchers()],
    step=step,
    longest=longest,
    sent=sent,
    points=recorder.points[-2000:],
    threads=sorted(recorder.threads),
    known={i: [r.step, r.scalars["learner"], r.exchanges] for i, r in reports.items()},
    **facts,
)
