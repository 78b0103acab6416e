"""Terminal helpers of the commands: text without control characters, and keys read without Enter."""

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
    """Return `text` with a question mark for each control character, which a name from a file may contain."""
    return "".join(c if c.isprintable() else "?" for c in text)


class Keys:
    """Reads the keys that are pressed on a terminal.

    Args:
        handle: file descriptor of the terminal; None: stdin is no terminal, so no key can be pressed.
        woken: file descriptor that a signal makes readable, which ends wait().
    """

    def __init__(self, handle: int | None, woken: int) -> None:
        self._handle = handle
        self._woken = woken

    def wait(self, seconds: float) -> str | None:
        """Wait at most `seconds` for a key; return all keys pressed, "" without any, None at end of file."""
        handles = [self._woken] if self._handle is None else [self._woken, self._handle]
        ready, _, _ = select.select(handles, [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, 1024)
        if self._handle not in ready:
            return ""
        try:
            pressed = os.read(ready[-1], 1024)
        except OSError:  # reading fails: the terminal was closed
            return None
        return pressed.decode("ascii", "replace") if pressed else None


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """Context manager in which keys on stdin's terminal can be read at once, without Enter and without echo.

    The terminal's settings are restored at the end of the context, also on SIGTERM. Call it in the main
    thread only, because it sets signal handlers.
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
    """Context manager that SIGTERM ends by SystemExit; yields a descriptor that each signal makes readable.

    Without that descriptor, a signal that arrives just before select() would be noticed only after its
    timeout.
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
