"""The pass over a model by several threads."""

import os
import threading
import time

import numpy as np
import pytest
from hvd_adpsgd_lab.simulation import engine_calls

from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.shard_memory import ShardMemory
from hvd_adpsgd.training import averaged_tensors as cores
from tests.elements import DTYPES, decode, encode, raw, wide

CHUNK_NBYTES = 1024
COUNTS = (3, 1000, 5001, 17)


class Leader:
    """Some tensors in a memory of small chunks; the pass needs few bytes to use a thread.

    Args:
        dtype: of the tensors.
        thread_nbytes: for each thread.
    """

    def __init__(self, dtype: str, thread_nbytes: int = 1000):
        self.dtype = dtype
        rng = np.random.default_rng(1)
        self.tensors = [encode(rng.standard_normal(n), dtype) for n in COUNTS]
        self.memory = ShardMemory(CHUNK_NBYTES, None, True, thread_nbytes=thread_nbytes)
        self.extend(range(len(COUNTS)))
        self.step = 0

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

    def merge(self, seed, chosen=None):
        """Corrections of every chunk, or of those."""
        rng = np.random.default_rng(seed)
        for i, chunk in enumerate(self.chunks):
            if chosen is not None and i not in chosen:
                continue
            pair = [encode(rng.standard_normal(chunk.count), self.dtype) for _ in range(2)]
            engine_calls.merge(self.memory.store, i, -1, 0.3, *map(raw, pair))

    def absorb(self, threads):
        self.step += 1
        return self.memory.absorb(self.addresses, self.step, threads)

    def runs(self, threads):
        """Chunks of each run."""
        starts = self.memory._starts(threads)
        spans = self.memory.layout.spans
        return [set(run[:, 2].tolist()) for run in np.split(spans, starts[1:])]

    def state(self):
        """Bits of the parameters and of what the engine would send and still owes."""
        parts = [np.zeros(chunk.count, wide(self.dtype)) for chunk in self.chunks]
        assert all(
            engine_calls.share(self.memory.store, i, raw(part)) for i, part in enumerate(parts)
        )
        return b"".join(array.tobytes() for array in [*self.tensors, *parts])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype):
    leaders = [Leader(dtype) for _ in range(3)]
    for leader, threads in zip(leaders, (1, 2, 7), strict=True):
        assert len(leader.runs(threads)) == threads
        assert leader.absorb(threads) == (True, False)
        for seed in range(3):
            leader.merge(seed)
            leader.memory.publish()
            assert leader.absorb(threads) == (True, True)
    assert leaders[0].state() == leaders[1].state() == leaders[2].state()


@pytest.mark.parametrize("run", range(4))
def test_a_number_that_is_not_finite_is_found_in_each_run(run):
    leader = Leader("float32")
    chunks = leader.runs(4)[run]
    tensor, start, _, _, count = next(
        row for row in leader.memory.layout.spans.tolist() if row[2] == max(chunks)
    )
    place = start + count - 1
    leader.tensors[tensor][place] = np.inf
    assert leader.absorb(4) == (False, False)
    leader.tensors[tensor][place] = 1
    assert leader.absorb(4) == (True, False)


@pytest.mark.parametrize("run", range(4))
def test_a_correction_is_noticed_in_each_run(run):
    leader = Leader("float32")
    leader.absorb(4)
    leader.merge(0, {min(leader.runs(4)[run])})
    leader.memory.publish()
    assert leader.absorb(4) == (True, True)


def test_runs_are_of_whole_chunks_and_cover_all():
    leader = Leader("float32")
    for threads in range(1, 10):
        runs = leader.runs(threads)
        assert len(runs) == min(threads, 8)  # at most
        assert set().union(*runs) == set(range(leader.memory.layout.nchunks))
        assert sum(map(len, runs)) == leader.memory.layout.nchunks, "no chunk is in two runs"
        assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_a_small_model_needs_one_thread():
    assert len(Leader("float32", thread_nbytes=2**20).runs(4)) == 1


def test_more_runs_than_there_may_be_are_refused():
    leader = Leader("float32")
    with pytest.raises(ValueError, match="at most 8"):
        leader.memory.store.absorb(leader.memory.layout.spans, leader.addresses, -1, 0, [0] * 9)


def test_a_model_that_has_grown_is_divided_anew():
    leader = Leader("float32")
    leader.absorb(2)
    leader.tensors.append(np.zeros(4000, np.float32))
    leader.extend([len(leader.tensors) - 1])
    leader.tensors[-1][-1] = np.nan
    assert leader.absorb(2) == (False, False)


def test_threads_work_at_the_same_time():
    """One waits for the lease of the first chunk, another one copies the last chunk meanwhile."""
    leader = Leader("float32")
    leader.absorb(2)
    store, last = leader.memory.store, leader.memory.layout.nchunks - 1
    leader.tensors[3][-1] = 42
    engine_calls.lease(store, 0)
    running = threading.Thread(target=leader.absorb, args=(2,))
    running.start()
    try:
        seen, deadline = 0.0, time.monotonic() + 60
        while seen != 42 and time.monotonic() < deadline:
            out = np.zeros(leader.chunks[last].count, np.float32)
            engine_calls.snapshot(store, last, -1, raw(out))
            seen = decode(out, "float32")[-1]
        assert seen == 42
        assert running.is_alive()
    finally:
        engine_calls.end_lease(store, 0)
        running.join()


def test_no_thread_is_left_behind():
    def threads():
        return len(os.listdir("/proc/self/task"))

    leader, before = Leader("float32"), threads()
    for _ in range(20):
        leader.absorb(8)
    ends = time.monotonic() + 60  # one that was joined is still seen for a moment
    while threads() > before:
        assert time.monotonic() < ends


@pytest.mark.parametrize(
    ("torchs", "allowed", "on_host", "learners", "threads"),
    [
        (1, 64, 64, 8, 1),  # OMP_NUM_THREADS=1
        (64, 64, 64, 8, 8),  # torch's default: one for each core, in each learner
        (8, 8, 64, 8, 8),  # a launcher that binds learners
        (2, 2, 2, 4, 1),
    ],
)
def test_threads_are_no_more_than_the_learners_share(
    monkeypatch, torchs, allowed, on_host, learners, threads
):
    monkeypatch.setattr(cores.torch, "get_num_threads", lambda: torchs)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(cores.os, "cpu_count", lambda: on_host)
    assert cores.pass_threads(learners) == threads
