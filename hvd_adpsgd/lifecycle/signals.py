"""Signals that a thread of this process reacts to, whatever its main thread does."""

from __future__ import annotations

import os
import signal

from hvd_adpsgd.lifecycle import signal_pipe

__all__ = ["hear"]

_heard: dict[int, tuple[int, int]] = {}  # by signal: the process that hears it, and its pipe


def hear(number: signal.Signals, *, ends: bool = False) -> int | None:
    """From now on the signal puts a byte into a pipe, which may be read on any thread; idempotent.

    Args:
        number: of the signal.
        ends: a forked child ends by it; else it ignores it.

    Returns:
        The pipe's descriptor for reading; None if the script has a handler of its own, or ignores the signal.
    """
    process, reading = _heard.get(number, (0, -1))
    if process == os.getpid():
        return reading
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)  # the handler must not wait for the reader
    if not signal_pipe.listen(number, writing, ends):
        os.close(reading)
        os.close(writing)
        return None
    _heard[number] = os.getpid(), reading
    return reading
