"""Collectives of learners on one host through memory: threads in place of processes, against numpy."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.messaging import host_memory
from hvd_adpsgd.messaging.host_barrier import arrive, await_count
from hvd_adpsgd.messaging.host_memory import HostMemory

SIZES = (1, 7, 1000, 40_001)
LONGEST_S = 60.0


class Patient:
    """Waits as long as nobody says that it must not."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def look(self) -> None:
        if self.over.is_set():
            raise InterruptedError


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps for arrays that are quick to compute with."""
    monkeypatch.setattr(host_memory, "BLOCK", 4096)


def together(n: int, act: Callable[[HostMemory, Patient], Any]) -> list[Any]:
    """What each of n learners gives."""
    memory, patient = np.zeros(HostMemory.nbytes_for(n), dtype=np.uint8), Patient()
    with ThreadPoolExecutor(n) as pool:
        learners = [pool.submit(act, HostMemory(memory, i, n), patient) for i in range(n)]
        try:
            return [learner.result(LONGEST_S) for learner in learners]
        finally:
            patient.over.set()


def values(place: int, size: int, dtype: Any = np.float32) -> np.ndarray:
    return (100 * np.random.default_rng([place, size]).standard_normal(size)).astype(dtype)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8])
def test_arrays_are_combined_as_if_they_were_one(n: int, dtype: Any) -> None:
    """Of odd sizes, some of no element; the order of the learners is kept, and the bits are the same."""

    def alternating(parts: Sequence[np.ndarray], result: np.ndarray) -> None:
        result[:] = parts[0]
        for i, part in enumerate(parts[1:]):
            (np.subtract if i % 2 else np.add)(result, part, out=result)

    def act(memory: HostMemory, patient: Patient) -> list[np.ndarray]:
        arrays = [values(memory.place, size, dtype) for size in (0, *SIZES, 0)]
        found = [np.empty_like(array) for array in arrays]
        for _ in range(2):  # the memory serves again
            memory.combine(arrays, found, alternating, range(n), patient)
        return found

    told = together(n, act)
    for k, size in enumerate((0, *SIZES, 0)):
        wanted = np.empty(size, dtype)
        alternating([values(i, size, dtype) for i in range(n)], wanted)
        for found in told:
            np.testing.assert_array_equal(found[k], wanted)


def test_some_give_and_some_take() -> None:
    def act(memory: HostMemory, patient: Patient) -> list[np.ndarray | None]:
        mine = [values(memory.place, 5000), values(memory.place, 3000), values(memory.place, 1)]
        found = [np.empty_like(a) if memory.place == k else None for k, a in enumerate(mine)]
        memory.combine(mine, found, sum_of, [1, 3], patient)
        return found

    def sum_of(parts: Sequence[np.ndarray], result: np.ndarray) -> None:
        assert len(parts) == 2
        np.add(*parts, out=result)

    told = together(4, act)
    for place, found in enumerate(told):
        for k, size in enumerate((5000, 3000, 1)):
            if place == k:
                np.testing.assert_array_equal(found[k], values(1, size) + values(3, size))
            else:
                assert found[k] is None


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("nbytes", [1, 4096, 100_003])
def test_bytes_of_one_and_of_all(n: int, nbytes: int) -> None:
    def act(memory: HostMemory, patient: Patient) -> tuple[bytes, bytes]:
        data = np.full(nbytes, memory.place, dtype=np.uint8)
        parts = [np.empty(nbytes * i, dtype=np.uint8) for i in range(n)]  # the first gives nothing
        mine = np.full(nbytes * memory.place, memory.place, dtype=np.uint8)
        memory.broadcast(data, n - 1, patient)
        memory.allgather(mine, parts, patient)
        return data.tobytes(), b"".join(part.tobytes() for part in parts)

    wanted = bytes([n - 1]) * nbytes, b"".join(bytes([i]) * nbytes * i for i in range(n))
    assert together(n, act) == [wanted] * n


def test_one_that_does_not_come_leaves_the_others_looking() -> None:
    """They wait as long as `look` lets them."""
    memory = np.zeros(HostMemory.nbytes_for(2), dtype=np.uint8)
    patient = Patient()
    patient.over.set()
    with pytest.raises(InterruptedError):
        HostMemory(memory, 0, 2).broadcast(np.zeros(10, dtype=np.uint8), 0, patient)


def test_a_count_is_awaited_past_its_end() -> None:
    """It is one of 32 bits, and starts again at 0."""
    memory = np.zeros(64, dtype=np.uint8)
    memory.view(np.uint32)[0] = 2**32 - 1
    assert not await_count(memory, 1, 1e-3)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(await_count, memory, 1, LONGEST_S)
        arrive(memory, 1)
        assert not waits.done() or waits.result()
        arrive(memory, 1)
        assert waits.result(LONGEST_S)
    assert await_count(memory, 0, 0.0)  # it is past that
