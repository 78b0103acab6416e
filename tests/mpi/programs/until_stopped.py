"""Training until the file "stop" appears in a folder; learner R kills itself when "kill.R" does."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from learner import generator, say

import hvd_adpsgd.torch as hvd

FOLDER, LEAST = Path(sys.argv[1]), 150

hvd.init()
model = torch.nn.ParameterList([torch.randn(1000, generator=generator(hvd.rank()))])
optimizer: Any = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
)
say(rank=hvd.rank(), pid=os.getpid())
steps, ends = 0, time.monotonic() + 150
while (steps < LEAST or not (FOLDER / "stop").exists()) and time.monotonic() < ends:
    optimizer.zero_grad()
    loss = model[0].square().mean()
    loss.backward()
    hvd.log(loss=loss, learner=hvd.rank())
    optimizer.step()
    steps += 1
    if (FOLDER / f"kill.{hvd.rank()}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.005)
say(rank=hvd.rank(), step=optimizer._averaging.step)
