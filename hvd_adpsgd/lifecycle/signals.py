"""Signals to which a thread of this process reacts, even while the main thread is blocked."""

import os
import signal

from hvd_adpsgd.lifecycle import signal_pipe

_heard: dict[int, tuple[int, int]] = {}  # by signal: pid of the process, reading end of a pipe


def hear(number: signal.Signals, *, ends: bool = False) -> int | None:
    """Make the signal write a byte into a pipe, from which a thread may read it; idempotent.

    Args:
        number: the signal.
        ends: whether the signal ends a forked child; otherwise the child ignores it.

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
