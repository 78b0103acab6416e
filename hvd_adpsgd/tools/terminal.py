"""What the commands need of a terminal: text that cannot steer it, and keys without Enter."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

__all__ = ["Keys", "keys", "printable"]


def printable(text: str) -> str:
    """The text with a question mark for each control character: names come from files."""
    return "".join(c if c.isprintable() else "?" for c in text)


class Keys:
    """The keys that are pressed on a terminal.

    Args:
        handle: file descriptor to read from; None: there are no keys.
        woken: file descriptor that a signal makes readable.
    """

    def __init__(self, handle: int | None, woken: int) -> None:
        self._handle = handle
        self._woken = woken

    def wait(self, seconds: float) -> str | None:
        """The keys of now, or of the next seconds as soon as there are any; "": none; None: the end."""
        handles = [self._woken] if self._handle is None else [self._woken, self._handle]
        ready, _, _ = select.select(handles, [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, 1024)
        if self._handle not in ready:
            return ""
        try:
            pressed = os.read(ready[-1], 1024)
        except OSError:  # the terminal is gone
            return None
        return pressed.decode("ascii", "replace") if pressed else None


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """The terminal of stdin gives keys at once, without echo; afterwards it is as before, also on SIGTERM.

    For the main thread.
    """
    with _signals() as woken:
        if sys.stdin is None or not sys.stdin.isatty():
            yield Keys(None, woken)
            return
        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        try:
            tty.setcbreak(handle, termios.TCSANOW)
            yield Keys(handle, woken)
        finally:
            termios.tcsetattr(handle, termios.TCSANOW, before)


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """SIGTERM ends the block by an exception, and signals can be read.

    Without the latter, a signal that comes just before select() would be noticed only when that returns.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(woken, False)
    before = signal.signal(signal.SIGTERM, end)
    waker_before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(waker_before)
        signal.signal(signal.SIGTERM, before)
        os.close(woken)
        os.close(waker)
