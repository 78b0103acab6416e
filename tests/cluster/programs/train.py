"""Trains a small model for --seconds; each learner leaves in --folder whom it averaged with.

A line per half second: seconds of time.monotonic (one clock for all hosts) and the exchanges that
the super learner had finished with each of the others.
"""

import argparse
import json
import os
import socket
import time
from pathlib import Path

import torch

import hvd_adpsgd.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, required=True)
parser.add_argument("--folder", type=Path, required=True)
args = parser.parse_args()
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(200, 100)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
facts = {"rank": hvd.rank(), "host": socket.gethostname(), "super_size": hvd.super_size()}
facts |= {"super_rank": hvd.super_rank(), "pid": os.getpid(), "rows": []}
hvd.barrier()
(args.folder / f"started{hvd.rank()}").touch()
began = time.monotonic()
while time.monotonic() < began + args.seconds:
    optimizer.zero_grad()
    loss = model(torch.randn(8, 200)).pow(2).mean()
    loss.backward()
    optimizer.step()
    time.sleep(5e-3)  # the rest of a step's work
    if not facts["rows"] or time.monotonic() > facts["rows"][-1][0] + 0.5:
        facts["rows"].append((time.monotonic(), hvd.metrics()["partners"]))
facts["loss"] = loss.item()
(args.folder / f"{hvd.rank()}.json").write_text(json.dumps(facts))
