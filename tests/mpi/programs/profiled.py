"""Trains with torch's profiler and a timeline. Arguments: FOLDER for the traces, number of steps."""

import sys
from pathlib import Path
from typing import Any

import torch
from learner import say
from torch.autograd import profiler

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.config import Config

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])

torch.set_num_threads(1)
hvd.init(config=Config(super_learner_size=2, timeline=str(FOLDER / "trace.json")))
model = torch.nn.Linear(10, 1)
optimizer: Any = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
)


def step() -> None:
    optimizer.zero_grad()
    model(torch.ones(10)).sum().backward()
    optimizer.step()


# torch.profiler needs modules that QUICK replaces
with profiler.profile(use_kineto=True) as profile:
    for _ in range(STEPS):
        step()
marks = [event.key for event in profile.key_averages() if event.key.startswith("hvd_adpsgd.")]
rank = hvd.rank()
hvd.shutdown()
say(rank=rank, marks=sorted(marks))
