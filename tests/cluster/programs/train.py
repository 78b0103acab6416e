"""Trains a small model on every learner, until the file FOLDER/enough is there: argument FOLDER.

Every learner writes FOLDER/RANK.jsonl: about twice a second its steps, its exchanges with each super learner,
and the learners that have failed; in the end how many still trained, and how far (`off`) their mean is from
where the updates of all have moved it. A learner that loses its quorum saves its model and reports it. The
hosts of one machine share its files, whatever happens to their links.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hvd_adpsgd
import hvd_adpsgd.torch as hvd

LONGEST_S = 400.0  # if nobody says that it is enough
RATE = 1e-3


def main() -> None:
    folder = Path(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    with open(folder / f"{hvd.rank()}.jsonl", "w", buffering=1) as file:

        def say(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")

        model = torch.nn.Linear(1000, 100)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE), named_parameters=model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        expected = model.weight.detach().double()
        step, told, ends = 0, 0.0, time.monotonic() + LONGEST_S
        while not (folder / "enough").exists() and time.monotonic() < ends:
            optimizer.zero_grad()
            model(torch.randn(8, 1000)).square().mean().backward()
            assert model.weight.grad is not None
            expected -= RATE * model.weight.grad
            try:
                optimizer.step()
            except hvd_adpsgd.QuorumLostError as error:
                torch.save(model.state_dict(), folder / "minority.pt")
                saved = torch.load(folder / "minority.pt")
                is_whole = all(bool(value.isfinite().all()) for value in saved.values())
                say(step=step, stopped=type(error).__name__, saved=is_whole)
                raise
            step += 1
            time.sleep(0.02)  # the rest of a gradient, for which this machine has too few cores
            if time.monotonic() > told + 0.5:
                told = time.monotonic()
                say(step=step, met=hvd.metrics()["peers"], failed=hvd.failed_ranks())
        living = float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
        hvd.average_model(model)
        off = float((model.weight.detach() - hvd.allreduce(expected)).abs().max())
        failed, first = hvd.failed_ranks(), hvd.is_coordinator()
        say(step=step, living=living, off=off, failed=failed, first=first)
        hvd.shutdown()


if __name__ == "__main__":
    main()
