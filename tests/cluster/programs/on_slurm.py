"""Trains a small model in epochs until the file `enough` is in the working directory, as docs/slurm.md asks.

It resumes from mean.pt, which it writes after each epoch, and writes final.pt last. Each learner appends to
RANK.jsonl: where it is, its step about twice a second with the learners that have failed, and its end. A
learner that finds the file `raise` raises.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

import hvd_adpsgd.torch as hvd

STEPS = 25  # of an epoch
MOST = 1000  # epochs, if nothing says that it is enough


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    with open(f"{hvd.rank()}.jsonl", "a", buffering=1) as file:

        def say(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")

        say(
            host=socket.gethostname(),
            pid=os.getpid(),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            local=[hvd.local_rank(), hvd.local_size()],
            super=[hvd.super_rank(), hvd.super_size()],
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        )
        train(say)
    hvd.shutdown()


def train(say: Any) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    epoch = 0
    if hvd.rank() == 0 and Path("mean.pt").exists():
        saved = torch.load("mean.pt")
        model.load_state_dict(saved["model"])
        epoch = saved["epoch"] + 1
    epoch = hvd.broadcast_object(epoch, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    joins = "HVD_ADPSGD_JOIN_SECRET_FILE" in os.environ
    epoch = hvd.admit(model, optimizer, state=epoch) if joins else epoch
    said, first = 0.0, epoch
    while epoch < MOST:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 100)).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)  # the rest of a gradient, for which this machine has too few cores
            if time.monotonic() > said + 0.5:
                said = time.monotonic()
                say(
                    first=first,
                    step=STEPS * epoch + step,
                    failed=hvd.failed_ranks(),
                    size=hvd.size(),
                )
        if Path("raise").exists():
            raise ValueError("as the test wanted")
        with hvd.averaged(model, buffers=True):
            if hvd.is_coordinator():
                save({"model": model.state_dict(), "epoch": epoch}, "mean.pt")
        is_enough = float(hvd.allreduce(torch.tensor([float(Path("enough").exists())])))
        epoch += 1
        if is_enough > 0:
            break
        epoch = hvd.admit(model, optimizer, state=epoch) if joins else epoch
    with hvd.averaged(model, buffers=True):
        if hvd.is_coordinator():
            save(model.state_dict(), "final.pt")
    say(ended=epoch, failed=hvd.failed_ranks(), size=hvd.size())


def save(state: dict[str, Any], name: str) -> None:
    """Write the file whole or not at all."""
    torch.save(state, f"{name}.new")
    os.replace(f"{name}.new", name)


if __name__ == "__main__":
    main()
