"""in_thread: runs a function on a daemon thread, for which Python does not wait at exit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(name: str, act: Callable[[], T]) -> Future[T]:
    """Run `act` on a daemon thread of its own; return a Future of what it returns or raises."""
    future: Future[T] = Future()

    def run(future: Future[T]) -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)
        finally:
            # else the future holds the error, and the error this frame, until the garbage collector runs: a
            # store or a connection in the error's frames would stay open
            del future

    threading.Thread(target=run, args=(future,), daemon=True, name=name).start()
    return future
