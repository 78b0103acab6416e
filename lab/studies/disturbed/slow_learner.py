"""One learner of the straggler benchmark, started by horovodrun.

A step computes a small gradient on the CPU and sleeps, as if a GPU computed. On the last learner forward
pass and sleep together take s times as long. A block of steps is measured for each s in turn; learner 0
writes the counts of all learners to --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd import strategies
from hvd_adpsgd.collectives.of_communicator import wait
from hvd_adpsgd.launch import world as worlds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--averaging", required=True)
    add("--slowdowns", type=float, nargs="+", required=True)
    add("--sizes", type=int, nargs="+", required=True, help="sizes of the model's layers")
    add("--batch", type=int, required=True)
    add("--wait-s", type=float, required=True)
    add("--block-s", type=float, required=True)
    add("--warm-up", type=int, required=True, help="warm-up steps, a multiple of every period")
    add("--seed", type=int, required=True)
    add("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    learner = Learner(options)
    learner.block(1.0, options.warm_up)
    blocks = [[s, learner.measured(s)] for s in options.slowdowns]
    if hvd.rank() == 0:
        options.out.write_text(json.dumps({"blocks": blocks, "load": os.getloadavg()[0]}) + "\n")
    hvd.shutdown()


class Learner:
    """A learner whose steps can be slowed down by a factor."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        torch.manual_seed(options.seed)  # all begin with the same model
        layers: list[torch.nn.Module] = []
        for a, b in itertools.pairwise(options.sizes):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers[:-1])
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01),
            named_parameters=self.model.named_parameters(),
            averaging=options.averaging,
        )
        self.period = _period(options.averaging)
        torch.manual_seed(options.seed * 1000 + hvd.rank())
        self.x = torch.randn(options.batch, options.sizes[0])
        self.y = torch.randint(0, options.sizes[-1], (options.batch,))
        self.comm = worlds.current().collectives.comm

    def measured(self, slowdown: float) -> list[dict[str, Any]]:
        """Train one block with the last learner slowed down; return each learner's counts, by rank.

        The block takes --block-s seconds, or a fixed number of steps if all learners wait for each other.
        """
        steps = None
        if self.period is not None:
            enough = self.options.block_s / (slowdown * self.options.wait_s)
            steps = math.ceil(max(enough, 2) / self.period) * self.period
        return self.block(slowdown, steps)

    def block(self, slowdown: float, steps: int | None) -> list[dict[str, Any]]:
        """Train for `steps` steps, or with None for --block-s seconds; return each learner's counts, by rank.

        If all learners wait for each other, each learner's time ends when the last one is done: a strategy
        that averages during the gradient lets a learner be one step ahead, which must not count as speed.
        """
        slow = slowdown if hvd.rank() == hvd.size() - 1 else 1.0
        exchanges = hvd.metrics()["exchanges"]
        wait(self.comm.Ibarrier())
        began, done = time.monotonic(), 0
        while done < steps if steps else time.monotonic() - began < self.options.block_s:
            self.step(slow)
            done += 1
        own_s = time.monotonic() - began
        wait(self.comm.Ibarrier())
        seconds = time.monotonic() - began if self.period else own_s
        mine = {
            "steps": done,
            "seconds": seconds,
            "exchanges": hvd.metrics()["exchanges"] - exchanges,
        }
        return list(self.comm.allgather(mine))

    def step(self, slow: float) -> None:
        began = time.monotonic()
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self.x), self.y)
        time.sleep(self.options.wait_s)  # stands for a GPU's work
        if slow > 1:
            # Stands for the work of a slower GPU.
            time.sleep((slow - 1) * (time.monotonic() - began))
        loss.backward()
        self.optimizer.step()


def _period(spec: str) -> int | None:
    """Return after how many steps learners wait for others; None if the strategy lets no learner wait."""
    strategy = strategies.parse(spec)
    if strategy.averages == "nothing":
        return 1
    in_step = strategy.plan(0, max(hvd.super_size(), 2)).in_step
    return None if in_step is None else in_step.period


if __name__ == "__main__":
    main()
