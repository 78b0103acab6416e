"""in_thread: runs a function on a daemon thread, for which Python does not wait at exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


def in_thread(name: str, act: Callable[[], T]) -> Future[T]:
    """Run `act` on a daemon thread of its own; return a Future of what it returns or raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
