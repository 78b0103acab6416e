"""What the commands need of a terminal: text that cannot steer it, and keys without Enter."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
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
    """

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    def wait(self, seconds: float) -> str | None:
        """The keys of now, or of the next seconds as soon as there are any; "": none; None: the end."""
        handles = [] if self._handle is None else [self._handle]
        ready, _, _ = select.select(handles, [], [], seconds)
        if not ready:
            return ""
        try:
            pressed = os.read(ready[0], 1024)
        except OSError:  # the terminal is gone
            return None
        return pressed.decode("ascii", "replace") if pressed else None


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """The terminal of stdin gives keys at once, without echo; afterwards it is as before, also on SIGTERM."""
    with _terminated():
        if sys.stdin is None or not sys.stdin.isatty():
            yield Keys(None)
            return
        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        try:
            tty.setcbreak(handle, termios.TCSANOW)
            yield Keys(handle)
        finally:
            termios.tcsetattr(handle, termios.TCSANOW, before)


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the block by an exception."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
