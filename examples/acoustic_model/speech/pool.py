"""One pool of minibatches for super learners of different speed: each takes the next ones when it is ready.

With equal parts of the data a slow learner would be the last to finish its part, however fast the others are.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.utils.data import Sampler


class Pool(Sampler[list[int]]):
    """A sampler of minibatches: in each epoch every minibatch goes to one learner of the job.

    A step of a super learner of k learners takes k minibatches. Super learners may make different numbers of
    steps, so this is for strategies in which none waits for another. Rank 0 serves a counter: if it fails,
    no learner can take more minibatches.

    Args:
        hvd: hvd_adpsgd.torch, initialised. All learners make the pool together.
        segments: number of segments in the training split.
        batch: number of segments in a minibatch.
        seed: seed of the order; the same on all learners.

    Attributes:
        part: how much of the epoch (0 to 1) had been taken before this learner's last minibatch.
    """

    def __init__(self, hvd: ModuleType, segments: int, batch: int, seed: int) -> None:
        self._hvd, self._segments, self._batch, self._seed = hvd, segments, batch, seed
        self._epoch, self.part = 0, 0.0
        self._store = _store(hvd)
        self._learners, leader = self._sum([1, hvd.is_leader() * hvd.rank()])
        self._place = hvd.rank() - leader  # the learners of a super learner have successive ranks

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; all learners call this before they iterate."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the mean number of minibatches of a learner in an epoch."""
        return self._segments // self._hvd.size() // self._batch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._segments, generator=generator)
        total = len(self) * self._hvd.size()
        while (first := self._take()) + self._learners <= total:
            self.part = first / total
            start = (first + self._place) * self._batch
            yield order[start : start + self._batch].tolist()

    def _take(self) -> int:
        """Return the number of the first minibatch of this super learner's next step."""
        first = 0
        if self._hvd.is_leader():
            first = self._store.add(f"epoch {self._epoch}", self._learners) - self._learners
        return first if self._learners == 1 else self._sum([first])[0]

    def _sum(self, mine: list[int]) -> list[int]:
        """Return the sums over the learners of this super learner."""
        hvd, told = self._hvd, torch.tensor(mine)
        sums = hvd.allreduce(told, name="pool", op=hvd.Sum, process_set=hvd.super_learner)
        return list(map(int, sums))


def _store(hvd: ModuleType) -> TCPStore:
    """Return a store that rank 0 serves on a free port."""
    store, address = None, None
    if hvd.rank() == 0:
        host = "127.0.0.1" if hvd.local_size() == hvd.size() else socket.gethostname()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = host, store.port
    address: Any = hvd.broadcast_object(address, root_rank=0)
    return store or TCPStore(*address, is_master=False)
