"""Threads that do one job, and that the end of the process does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


def in_thread(name: str, act: Callable[[], T]) -> Future[T]:
    """What `act` returns or raises; it runs on a daemon thread of its own, which nothing has to wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
