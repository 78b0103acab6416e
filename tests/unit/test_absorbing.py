"""The pass over a model by several threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hvd_adpsgd.engine.absorbing import Absorbing
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.model_memory import NO_SLOT, ModelMemory
from tests.unit.test_kernels import DTYPES, decode, encode, raw, wide

CHUNK_NBYTES = 1024
COUNTS = (3, 1000, 5001, 17)


class Leader:
    """Some tensors in a memory of small chunks; the pass needs few bytes to use a thread.

    Args:
        dtype: of the tensors.
        least_nbytes: for each thread.
    """

    def __init__(self, dtype: str, least_nbytes: int = 1000):
        self.dtype = dtype
        rng = np.random.default_rng(1)
        self.tensors = [encode(rng.standard_normal(n), dtype) for n in COUNTS]
        self.memory = ModelMemory(CHUNK_NBYTES, None, True)
        self.extend(range(len(COUNTS)))
        self.passes = Absorbing(self.memory.store, self.memory.layout, least_nbytes)

    def extend(self, numbers):
        self.memory.extend(
            [TensorSpec(f"t{i}", self.tensors[i].shape, self.dtype) for i in numbers]
        )

    @property
    def addresses(self):
        return np.array([tensor.ctypes.data for tensor in self.tensors], np.uintp)

    @property
    def chunks(self):
        return [chunk for part in self.memory.layout.parts for chunk in part.chunks]

    def merge(self, seed):
        """Corrections of every chunk."""
        rng = np.random.default_rng(seed)
        for i, chunk in enumerate(self.chunks):
            pair = [encode(rng.standard_normal(chunk.count), self.dtype) for _ in range(2)]
            self.memory.store.merge(i, -1, 0.3, *map(raw, pair))

    def run(self, slot, threads, step=0):
        return self.passes.run(self.addresses, slot, step, threads)

    def state(self):
        """Bits of the parameters and of what the engine would send and still owes."""
        parts = [np.zeros(chunk.count, wide(self.dtype)) for chunk in self.chunks]
        assert all(self.memory.store.share(i, raw(part)) for i, part in enumerate(parts))
        return b"".join(array.tobytes() for array in [*self.tensors, *parts])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype):
    leaders = [Leader(dtype) for _ in range(3)]
    for leader, threads in zip(leaders, (1, 2, 7), strict=True):
        assert leader.run(NO_SLOT, threads) == (True, False)
        for step in range(1, 4):
            leader.merge(step)
            leader.memory.store.publish()
            assert leader.run(leader.memory.store.published, threads, step) == (True, True)
    assert [len(leader.passes._runs) for leader in leaders] == [1, 2, 7]
    assert leaders[0].state() == leaders[1].state() == leaders[2].state()


@pytest.mark.parametrize("at", [(0, 0), (1, 999), (2, 2500), (3, 16)])
def test_a_number_that_is_not_finite_is_found_by_each_thread(at):
    leader = Leader("float32")
    tensor, place = at
    leader.tensors[tensor][place] = np.inf
    assert leader.run(NO_SLOT, 4) == (False, False)
    leader.tensors[tensor][place] = 1
    assert leader.run(NO_SLOT, 4) == (True, False)


def test_runs_are_of_whole_chunks_and_cover_all():
    leader = Leader("float32")
    for threads in range(1, 10):
        runs = leader.passes._runs_for(threads)
        assert len(runs) == min(threads, 8)  # at most
        np.testing.assert_array_equal(np.concatenate(runs), leader.memory.layout.spans)
        sizes = [len(set(run[:, 2])) for run in runs]
        assert sum(sizes) == leader.memory.layout.nchunks
        assert max(sizes) - min(sizes) <= 1


def test_a_small_model_needs_one_thread():
    leader = Leader("float32", least_nbytes=2**20)
    assert len(leader.passes._runs_for(4)) == 1


def test_a_model_that_has_grown_is_divided_anew():
    leader = Leader("float32")
    leader.run(NO_SLOT, 2)
    leader.tensors.append(np.zeros(4000, np.float32))
    leader.extend([len(leader.tensors) - 1])
    leader.tensors[-1][-1] = np.nan
    assert leader.run(NO_SLOT, 2) == (False, False)


def test_threads_work_at_the_same_time():
    """One waits for the lease of the first chunk, another one copies the last chunk meanwhile."""
    leader = Leader("float32")
    leader.run(NO_SLOT, 2, step=0)
    store, last = leader.memory.store, leader.memory.layout.nchunks - 1
    leader.tensors[3][-1] = 42
    store.lease(0)
    running = threading.Thread(target=leader.run, args=(NO_SLOT, 2, 1))
    running.start()
    try:
        seen, deadline = 0.0, time.monotonic() + 20
        while seen != 42 and time.monotonic() < deadline:
            out = np.zeros(leader.chunks[last].count, np.float32)
            store.snapshot(last, -1, raw(out))
            seen = decode(out, "float32")[-1]
        assert seen == 42
        assert running.is_alive()
    finally:
        store.end_lease(0)
        running.join()
