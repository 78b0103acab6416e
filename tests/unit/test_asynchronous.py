"""The thread of asynchronous operations: the script's streams, one order, one thread."""

import contextlib
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from hvd_adpsgd.collectives.fifo_lock import FifoLock
from hvd_adpsgd.torch import asynchronous
from hvd_adpsgd.training.devices import Device

DEADLINE_S = 60.0


class PerThread(Device):
    """A device whose current stream is another one in each thread, as CUDA's is."""

    log: ClassVar[list[tuple[str, str]]] = []

    def current(self) -> Any:
        mine = threading.current_thread().name

        def enqueue(operation: Callable[[], object]) -> None:
            self.log.append((mine, threading.current_thread().name))
            operation()

        return SimpleNamespace(enqueue=enqueue)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = SimpleNamespace(
        prepare=lambda: None, lock=FifoLock(), blocking=contextlib.nullcontext
    )
    monkeypatch.setattr(
        asynchronous.worlds, "current", lambda: SimpleNamespace(collectives=collectives)
    )


@pytest.mark.usefixtures("world")
def test_an_operation_runs_on_the_stream_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "device_of", lambda tensor: PerThread(tensor.device))
    PerThread.log.clear()
    handle = asynchronous._begin("allreduce_async", [torch.ones(2), torch.ones(3)], lambda: "done")
    handle.result(DEADLINE_S)
    assert asynchronous.synchronize(handle) == "done"
    assert PerThread.log == [(threading.current_thread().name, "hvd_adpsgd")]


@pytest.mark.usefixtures("world")
def test_an_operation_is_not_cancelled() -> None:
    """Other learners take part in it; and its thread, which sets its result, serves later ones."""
    act = threading.Event()
    handle = asynchronous._begin("allreduce_async", [], lambda: act.wait(DEADLINE_S))
    assert not handle.cancel()
    act.set()
    assert asynchronous.synchronize(handle) is True
    later = asynchronous._begin("allreduce_async", [], lambda: "done")
    assert asynchronous.synchronize(later) == "done"


@pytest.mark.usefixtures("world")
def test_operations_of_several_threads_share_one_thread_in_the_order_of_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second worker would wait for the turn of an operation that is behind its own in the queue."""
    monkeypatch.setattr(asynchronous, "_thread", None)
    handles: list[asynchronous.Handle] = []
    names: list[str] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(DEADLINE_S)
        for _ in range(50):
            act = lambda: names.append(threading.current_thread().name)  # noqa: E731
            handles.append(asynchronous._begin("barrier", [], act))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    before = set(threading.enumerate())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    for handle in handles:
        handle.result(DEADLINE_S)
    assert len(names) == len(handles) == 400
    assert len(set(threading.enumerate()) - before) == 1


@pytest.mark.usefixtures("world")
def test_a_forked_child_leaves_the_parent_its_queued_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    act, ran = threading.Event(), []
    held = asynchronous._begin("barrier", [], lambda: act.wait(DEADLINE_S))
    queued = asynchronous._begin("barrier", [], lambda: ran.append(os.getpid()))
    child = os.fork()
    if child == 0:
        try:
            collectives = SimpleNamespace(prepare=lambda: None, lock=FifoLock())
            asynchronous.worlds.current = lambda: SimpleNamespace(collectives=collectives)
            its = asynchronous._begin("barrier", [], lambda: "its own")
            os._exit(0 if its.result(DEADLINE_S) == "its own" and not ran else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    act.set()
    held.result(DEADLINE_S)
    queued.result(DEADLINE_S)
    assert ran == [os.getpid()]
