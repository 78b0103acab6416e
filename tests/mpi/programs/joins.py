"""Epochs with unequal numbers of steps, each ended by hvd.join(); 2 super learners of 2.

The gradient of a learner in a step is known, and that of one that has joined is zero: so is the mean of all.
"""

from typing import Any

import torch
from learner import digest, outcome, retired, same_inside, say

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.launch import world as worlds

SIZE = 70_001  # more than one chunk
LR = 0.25
# steps of each learner, in each epoch: the leader ends first, last, with its mate, the super learners apart
EPOCHS = ((3, 5, 4, 4), (6, 2, 1, 3), (2, 2, 5, 5), (1, 0, 0, 4), (4, 3, 3, 4))


def gradient(rank: int, epoch: int, step: int) -> torch.Tensor:
    phase = 1 + 3 * step + 5 * rank + 7 * epoch
    return torch.sin(phase + 0.37 * torch.arange(SIZE, dtype=torch.float64))


def moved() -> torch.Tensor:
    """What local updates have moved the mean of the super learners by."""
    total = torch.zeros(SIZE, dtype=torch.float64)
    for epoch, steps in enumerate(EPOCHS):
        for rank, count in enumerate(steps):
            total -= LR / hvd.size() * sum(gradient(rank, epoch, step) for step in range(count))
    return total


def train(p: torch.nn.Parameter, optimizer: Any, epoch: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        (p * gradient(hvd.rank(), epoch, step)).sum().backward()
        optimizer.step()


def wrap(make: Any, **how: Any) -> tuple[torch.nn.Parameter, Any]:
    p = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    return p, hvd.DistributedOptimizer(make([p]), named_parameters=[("p", p)], **how)


def uneven(case: str, make: Any) -> None:
    p, optimizer = wrap(make)
    same, returned = [], []
    with retired(optimizer):
        for epoch, steps in enumerate(EPOCHS):
            train(p, optimizer, epoch, steps[hvd.rank()])
            returned.append(hvd.join())
            held = [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
            same.append(same_inside([p, *held]))
        hvd.average_model(torch.nn.ParameterList([p]))
    error = float((p.detach() - moved()).abs().max()) if case == "SGD" else 0.0
    say(case=case, same=same, error=error, returned=returned)


def without_an_optimizer() -> None:
    hvd.join()
    say(case="nothing wrapped", again=hvd.join() in range(hvd.size()))


def refused() -> None:
    """A strategy in step, 4 and 5 batches."""
    p, optimizer = wrap(
        lambda ps: torch.optim.SGD(ps, lr=LR), averaging="periodic_averaging:period=2"
    )
    with retired(optimizer):
        train(p, optimizer, 0, 4 + hvd.super_rank())
        before = digest([p])
        facts = outcome(hvd.join)
        say(case="refused", kept=digest([p]) == before, **facts)


def elsewhere() -> None:
    """One learner still calls an operation over all learners when the others have joined."""
    p, optimizer = wrap(lambda ps: torch.optim.SGD(ps, lr=LR))
    train(p, optimizer, 0, 2)
    last = hvd.rank() == worlds.current().size - 1
    facts = outcome(hvd.barrier if last else hvd.join)
    later = {} if last else outcome(lambda: train(p, optimizer, 0, 1))
    say(case="elsewhere", later=later.get("error"), **facts)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    without_an_optimizer()
    uneven("SGD", lambda ps: torch.optim.SGD(ps, lr=LR))
    uneven("Adam", lambda ps: torch.optim.Adam(ps, lr=1e-3))
    refused()
    elsewhere()


if __name__ == "__main__":
    main()
