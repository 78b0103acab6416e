"""Super learner 0 makes 3 steps and leaves, the others make 12. Argument: whether it ends for good.

Without argument each scheme in turn, and the others catch what they get; then schemes with an operation over
all learners in place of the end. With the name of a scheme a script that catches nothing.
"""

import sys
from typing import Any

import learner
import torch
from learner import outcome, retired, say

import hvd_adpsgd.torch as hvd

SPECS = (
    "delay_by_one",
    "delayed_gradients",
    "periodic_averaging:period=2",
    "periodic_averaging:period=1,block_momentum=0.5",
    "gossip_pga:period=2",
    "synchronous_gossip:order=awc+fixed_ring",
    "synchronous_gossip:order=atc+random_pairs",
    "noloco:period=1",
)

BEFORE_AN_OPERATION = ("delay_by_one", "synchronous_gossip:order=atc+random_pairs")


def steps() -> int:
    return 3 if hvd.super_rank() == 0 else 12


def train(model: Any, optimizer: Any, done: list[int]) -> None:
    for step in range(len(done), steps()):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step))).sum().backward()
        optimizer.step()
        done.append(step)


def wrap(spec: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, learner.wrap(model, averaging=spec)


def main() -> None:
    hvd.init()
    if len(sys.argv) > 1:
        model, optimizer = wrap(sys.argv[1])
        done: list[int] = []
        train(model, optimizer, done)
        say(rank=hvd.rank(), steps=len(done))
        return
    for spec in SPECS:
        model, optimizer = wrap(spec)
        with retired(optimizer):
            done = []
            facts = outcome(lambda: train(model, optimizer, done))  # noqa: B023
            finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
        say(case=spec, steps=len(done), finite=finite, **facts)
    for spec in BEFORE_AN_OPERATION:
        model, optimizer = wrap(spec)
        with retired(optimizer):
            done = []

            def then_all() -> float:
                train(model, optimizer, done)  # noqa: B023
                if spec == "delay_by_one":  # noqa: B023
                    return float(hvd.synchronize(hvd.allreduce_async(torch.ones(1), op=hvd.Sum)))
                return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))

            facts = outcome(then_all)
            if hvd.rank() == 0:  # the mean that the others have begun: their engines wait for it
                done.pop()
                train(model, optimizer, done)
        say(case=f"{spec}, then an operation", steps=len(done), **facts)


if __name__ == "__main__":
    main()
