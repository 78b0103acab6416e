"""What the learners write: read by lines, written with their ranks; and the lines of the launcher itself."""

import asyncio
import contextlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

# by file: with PYTHONUNBUFFERED, threads that write to one have no lock of Python's
_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)


def say(line: str) -> None:
    """Write a line of the launcher to stderr."""
    with contextlib.suppress(OSError):
        print(f"hvd_adpsgd run: {line}\n", end="", file=sys.stderr, flush=True)  # at once


async def read_lines(file: Any) -> AsyncIterator[bytes]:
    """Yield the lines that arrive in a pipe; progress bars end theirs by a carriage return."""
    stream, text = asyncio.StreamReader(), b""
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), file)
    while data := await stream.read(1 << 16):
        lines = (text + data).splitlines(keepends=True)
        is_whole = lines[-1].endswith(b"\n") or len(lines[-1]) > 1 << 20  # a long one in pieces
        text = b"" if is_whole else lines.pop()
        for line in lines:
            yield line
    if text:
        yield text + b"\n"


async def write(to: Any, line: bytes) -> None:
    """Write a line, in a thread: a reader that stops must not keep signals from the learners.

    Raises:
        OSError: if nobody reads this command's output, or a disk is full; later lines are dropped then.
    """
    try:
        await asyncio.to_thread(_write_all, to, line)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), to.fileno())
        raise


def _write_all(to: Any, line: bytes) -> None:
    with _locks[to.fileno()]:
        while line:
            line = line[to.write(line) :]
        to.flush()
