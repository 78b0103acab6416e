"""The state file: a learner's ranks, options, counters and stacks, written when it receives SIGUSR1.

    signal  -->  a byte in a pipe  -->  a thread wakes, calls all sources, writes the file

The thread needs only the GIL: no lock of the trainer, and no MPI. Every wait of this library, of Horovod and
of mpi4py releases the GIL, so the file is written, with the line where the trainer waits, also if that wait
never ends. A weakness that we accept: if C code hangs and keeps the GIL, no file is written.

Sources read what other threads write, without locks: the file is for people, and two of its numbers may be
from different moments.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvd_adpsgd.lifecycle import signals

log = logging.getLogger("hvd_adpsgd")

_sources: dict[str, Callable[[], Any]] = {}
_watched_by = 0  # pid of the process that writes on SIGUSR1; a forked child has another pid
_rank = 0
_count = 0  # number of files written


def add_source(name: str, source: Callable[[], Any]) -> None:
    """Add a section `name` to state files, which contains what source() returns, of JSON's types.

    An earlier source of that name is replaced. `source` is called at any moment, on this module's thread, and
    must neither wait nor change anything.
    """
    _sources[name] = source


def watch(rank: int) -> bool:
    """Make SIGUSR1 write this process's state from now on; call it again to change the rank.

    Args:
        rank: rank of this learner, for the file's name.

    Returns:
        Whether SIGUSR1 writes the state: False if the script has its own handler for SIGUSR1, or ignores it.
    """
    global _watched_by, _rank
    _rank = rank
    if _watched_by == os.getpid():
        return True
    reading = signals.hear(signal.SIGUSR1)
    if reading is None:
        log.debug("SIGUSR1 has a handler already, or is ignored: it will not write the state.")
        return False
    _watched_by = os.getpid()
    threading.Thread(target=_watch, args=(reading,), daemon=True, name="hvd_adpsgd.state").start()
    return True


def _watch(reading: int) -> None:
    """Run the thread: write one state file for each byte in the pipe, into which each SIGUSR1 puts a byte."""
    while os.read(reading, 1):
        try:
            log.info("state written to %s", write())
        except Exception as error:
            log.error(
                "SIGUSR1: no state was written: %s. Set TMPDIR to a folder with room in which files "
                "can be made.",
                error,
            )


def write() -> Path:
    """Write the state of this process now.

    Returns:
        The file's path, hvd_adpsgd.state.RANK.PID.N.json; N counts from 1, so that no file is overwritten.

    Raises:
        OSError: if the file cannot be written.
    """
    global _count
    folder = Path(tempfile.gettempdir())
    path = folder / f"hvd_adpsgd.state.{_rank}.{os.getpid()}.{_count + 1}.json"
    # renamed only when complete; a rename does not follow a link that someone has put at `path`
    handle, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
    try:
        with open(handle, "w") as file:
            json.dump(describe(), file, indent=1, default=str)
            file.write("\n")
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
    _count += 1
    return path


def describe() -> dict[str, Any]:
    """Return the content of a state file: what all sources return, and the stack of every thread."""
    return {
        "rank": _rank,
        "pid": os.getpid(),
        "hostname": os.uname().nodename,
        "command": sys.argv,
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "monotonic_s": time.monotonic(),
        **{name: _ask(source) for name, source in list(_sources.items())},
        "threads": _threads(),
    }


def _ask(source: Callable[[], Any]) -> Any:
    """Return what a source returns, or the text of its error, so that the other sources are still written."""
    try:
        return source()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _threads() -> dict[str, list[str]]:
    """Return the stack of each Python thread, by its name, innermost call first; reads no source files."""
    names: Mapping[int | None, str] = {t.ident: t.name for t in threading.enumerate()}
    return {
        f"{names.get(ident, 'thread')} ({ident:#x})": [
            f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
            for frame, line in traceback.walk_stack(innermost)
        ]
        for ident, innermost in sys._current_frames().items()
    }
