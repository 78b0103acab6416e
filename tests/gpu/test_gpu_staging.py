"""Staging on real GPUs. None is needed for the rest of the tests; without one all of this is skipped.

The same jobs as tests/unit/test_staging.py, and what only a GPU can tell: whether the host really waits for
nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hvd_adpsgd_lab.simulation import engine_calls

from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.shard_memory import ShardMemory
from hvd_adpsgd.training.devices import Cuda, Device, Stream
from hvd_adpsgd.training.staging import Staging
from tests.staged import ROUNDING, Job

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.slow,
]

MS = 10**6  # cycles of a GPU: about a millisecond


class SlowStream:
    """A stream of a GPU on which something else goes on before each operation, by a seed."""

    def __init__(self, stream: Stream, seed: int):
        self.stream, self.random = stream, random.Random(seed)

    def enqueue(self, operation: Callable[[], object]) -> None:
        if self.random.random() < 0.2:
            self.stream.enqueue(lambda: torch.cuda._sleep(self.random.randrange(MS)))
        self.stream.enqueue(operation)

    def record(self):
        return self.stream.record()

    def wait(self, event) -> None:
        self.stream.wait(event)

    def trains(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream._stream)


class SlowGpu(Cuda):
    """A GPU as one learner sees it: its streams are its own, and late."""

    def use(self, seed: int) -> SlowGpu:
        self.__dict__["seeds"] = random.Random(seed)
        self.__dict__["trainer"] = self.stream()
        return self

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def current(self) -> Stream:
        trainer: Stream = self.__dict__["trainer"]
        return trainer

    def stream(self) -> Stream:
        return SlowStream(super().stream(), self.__dict__["seeds"].randrange(2**31))


class OnGpu:
    """Devices that are the first GPU, each with streams of its own, by a seed."""

    def __init__(self, seed: int, devices: int = 1):
        gpu = torch.device("cuda", 0)
        self.devices: list[Device] = [SlowGpu(gpu).use(seed + i) for i in range(devices)]

    def put(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        device: torch.device = self.devices[number].device  # type: ignore[attr-defined]
        if tensor.numel() == 0 or not tensor.is_contiguous():
            return tensor.to(device)  # pinned memory would be contiguous
        return tensor.pin_memory().to(device, non_blocking=True)

    def poke(self) -> None:
        time.sleep(1e-4)

    def finish(self) -> None:
        torch.cuda.synchronize()

    def trains(self) -> contextlib.AbstractContextManager[object]:
        return self.devices[0].current().trains()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1, 3)])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_mean_moves_only_by_local_updates(dtype, sizes, devices):
    exchanges = 0
    for seed in range(6):
        with contextlib.closing(Job(seed, dtype, sizes, lambda seed: OnGpu(seed, devices))) as job:
            torch.cuda.synchronize()
            job.run(150)
            job.finish()
            torch.cuda.synchronize()
            assert job.off() < ROUNDING[dtype], seed
            for node in job.nodes:
                np.testing.assert_array_equal(node[0].mirror(), node[0].values)
                for learner in node[1:]:
                    assert learner.seen == node[0].seen, seed
            exchanges += job.exchanges
    assert exchanges > 60


def test_memory_is_locked_although_freed_memory_at_its_address_was():
    """Else copies would reach the pages that were there before."""
    pages = mmap.mmap(-1, 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory, gpu = np.frombuffer(pages, np.uint8), Cuda(torch.device("cuda", 0))
    assert gpu.pin(memory)
    assert gpu.pin(memory)
    torch.from_numpy(memory).copy_(torch.full((2**20,), 7, dtype=torch.uint8, device="cuda"))
    assert (memory == 7).all()
    gpu.unpin(memory)


class Large:
    """A learner alone with a float32 model on the first GPU.

    Args:
        mib: its size.
    """

    def __init__(self, mib: int = 256):
        self.tensors = [torch.ones(2**18, device="cuda") for _ in range(mib)]
        self.memory = ShardMemory(256 * 1024, None, True)
        specs = [TensorSpec(f"p{i}", (2**18,), "float32") for i in range(mib)]
        self.memory.extend(specs)
        self.nbytes = mib * 2**20
        self.staging = Staging()
        self.staging.bind(self.memory, self.tensors)
        self.steps = 0

    def merge(self) -> None:
        """The engine has an exchange: every element gets a correction."""
        for i, chunk in enumerate(self.memory.layout.parts[0].chunks):
            theirs, mine = np.ones(chunk.count, np.float32), np.zeros(chunk.count, np.float32)
            engine_calls.merge(
                self.memory.store, i, -1, 0.5, theirs.view(np.uint8), mine.view(np.uint8)
            )

    def step(self, copies: bool, work: Callable[[], None]) -> None:
        work()
        self.staging.before_update()
        for tensor in self.tensors[:1]:
            tensor.add_(1.0)
        self.memory.publish()
        if copies:
            self.staging.absorb(self.steps, True)
        else:
            self.memory.take()
        self.steps += 1


@pytest.fixture
def large():
    model = Large()
    yield model
    model.staging.close()


def test_the_host_waits_for_nothing(large):
    """It is back from a step while the GPU still works on what came before it."""
    large.step(True, lambda: None)
    large.staging.settle()
    before = torch.cuda.Event()
    torch.cuda._sleep(1000 * MS)
    before.record()
    large.step(True, lambda: None)
    assert not before.query(), "the host has waited"
    large.staging.settle()
    np.testing.assert_array_equal(large.memory.areas[0].mirror[:4].view(np.float32), [3.0])


def test_the_host_does_not_wait_for_corrections_of_a_large_model():
    """Its operations fit into what a GPU takes ahead of time."""
    large = Large(1024)
    large.staging.settle()
    large.merge()
    large.memory.publish()
    torch.cuda.synchronize()
    torch.cuda._sleep(2000 * MS)
    before = torch.cuda.Event()
    before.record()
    large.staging.absorb(0, True)
    waited = before.query()
    large.staging.settle()
    np.testing.assert_array_equal(large.tensors[-1][:4].cpu(), np.full(4, 1.5))
    large.staging.close()
    assert not waited
