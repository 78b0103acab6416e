"""What learners of the tests of shares and of links train."""

import time
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from tests.mpi.programs.learner import wrap


class Training:
    """A model whose mean over all learners stays as it begins, in steps that leave the machine idle.

    Args:
        rows, columns: of the model's weight; its elements are eighths, so that sums are nearly exact.
        idle_s: seconds of a step in which the learner sleeps, as if the gradient took so long.
        dtype: of the weight.
        how: options of DistributedOptimizer.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        idle_s: float = 0.0,
        dtype: torch.dtype = torch.float32,
        **how: Any,
    ):
        torch.manual_seed(hvd.super_rank())
        self.model = torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
        with torch.no_grad():
            self.model.weight.copy_(torch.randint(-1000, 1000, (rows, columns)) / 8)
        self.optimizer = wrap(self.model, lambda ps: torch.optim.SGD(ps, lr=0.0), **how)
        self.inputs, self.idle_s = torch.ones(1, columns, dtype=dtype), idle_s
        self.began = self.mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).sum().backward()
        time.sleep(self.idle_s)
        self.optimizer.step()

    def drift(self) -> float:
        """Return how far the mean has moved; inside hvd.averaging_paused()."""
        return (self.mean() - self.began).abs().max().item()

    def mean(self) -> torch.Tensor:
        return hvd.allreduce(self.model.weight.detach().double(), op=hvd.Average)
