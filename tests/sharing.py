"""What learners of the tests of shares and of links train."""

from __future__ import annotations

import time

import torch

import hvd_adpsgd.torch as hvd


class Training:
    """A model whose mean over all learners stays as it begins, in steps that leave the machine idle.

    Args:
        rows, columns: of the model's weight; its elements are eighths, so that sums are nearly exact.
        idle_s: seconds of a step in which the learner sleeps, as if the gradient took so long.
        exchange_share: the option of this name.
    """

    def __init__(
        self, rows: int, columns: int, idle_s: float, exchange_share: float | str = "auto"
    ):
        torch.manual_seed(hvd.super_rank())
        self.model = torch.nn.Linear(columns, rows, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.randint(-1000, 1000, (rows, columns)) / 8)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            named_parameters=self.model.named_parameters(),
            exchange_share=exchange_share,
        )
        self.inputs, self.idle_s = torch.ones(1, columns), idle_s
        self.began = self._mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).sum().backward()
        time.sleep(self.idle_s)
        self.optimizer.step()

    def met(self) -> list[int]:
        """Return how often this super learner has exchanged with each; 0 for itself."""
        loop = self.optimizer._averaging.engine.loop
        return [loop.met(i) if i != hvd.super_rank() else 0 for i in range(hvd.super_size())]

    def drift(self) -> float:
        """Return how far the mean has moved; inside hvd.averaging_paused()."""
        return (self._mean() - self.began).abs().max().item()

    def _mean(self) -> torch.Tensor:
        return hvd.allreduce(self.model.weight.detach().double(), op=hvd.Average)
