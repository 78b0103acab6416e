"""What all tests share: the order of a run, and what runs beside what where workers share it."""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before torch: its threads wait for each other in busy loops, on cores that workers and learners share.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Against PYTHONDONTWRITEBYTECODE: each run would rewrite the asserts of all tests, 5 CPU s of a worker.
sys.dont_write_bytecode = False

# A shell without job control ignores SIGINT for what it starts in the background, and learners inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A failing example prints the line that reproduces it; no deadline, for the machine may be busy.
# `make test` tries fewer examples of each property than `make test-all` does.
settings.register_profile("hvd_adpsgd", print_blob=True, deadline=None, max_examples=25)
settings.register_profile("thorough", print_blob=True, deadline=None, max_examples=100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that no worker is left with one; what runs alone last."""

    def turn(item: pytest.Item) -> int:
        first = next(
            (mark for mark in ("alone", "slow", "mpi") if item.get_closest_marker(mark)), ""
        )
        return ("slow", "mpi", "", "alone").index(first)

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Nothing runs beside a test that is marked `alone`. Waiting is not part of its time-out."""
    if not hasattr(item.config, "workerinput"):  # the only process
        return (yield)
    with machine(item.config.cache, item.get_closest_marker("alone") is not None):
        return (yield)


@contextlib.contextmanager
def machine(cache: pytest.Cache, alone: bool) -> Iterator[None]:
    """Have the machine, alone or with others. A test that waits to be alone is the next."""
    folder = cache.mkdir("machine")
    with open(folder / "queue", "w") as queue, open(folder / "users", "w") as users:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
