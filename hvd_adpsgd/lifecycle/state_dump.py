"""What a learner knows about itself, written to a file when SIGUSR1 comes.

    signal  -->  a byte in a pipe  -->  a thread wakes, asks all sources, writes the file

The thread needs the GIL for that, and nothing else: no lock of the trainer, no MPI. Every wait of ours,
of Horovod and of mpi4py gives the GIL away, so a trainer that hangs in one is described, with the line
where it hangs. A weakness that we accept: C code that hangs and keeps the GIL is not.

Sources read what other threads write, without locks: a view for people, in which two numbers may be of
different moments.
"""

from __future__ import annotations

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

__all__ = ["add_source", "describe", "watch", "write"]

log = logging.getLogger("hvd_adpsgd")

_sources: dict[str, Callable[[], Any]] = {}
_watched_by = 0  # the process whose signal is heard; a forked child is another one
_folder: str | None = None
_rank = 0
_count = 0  # files written


def add_source(name: str, source: Callable[[], Any]) -> None:
    """Have what `source` returns (of JSON's types) in the file, as `name`; the last one of a name counts.

    It is called on a thread of its own at any moment, and must neither wait nor change anything.
    """
    _sources[name] = source


def watch(rank: int, folder: str | None) -> bool:
    """From now on SIGUSR1 makes this process write its state; again for another rank or folder.

    Args:
        rank: of this learner, for the file's name.
        folder: where; None: the system's folder for temporary files.

    Returns:
        Whether it will: not if the script has a handler of its own for the signal, or ignores it.
    """
    global _watched_by, _folder, _rank
    _folder, _rank = folder, rank
    if _watched_by == os.getpid():
        return True
    reading = signals.hear(signal.SIGUSR1)
    if reading is None:
        log.debug("SIGUSR1 has a handler already, or is ignored: it will not write the state.")
        return False
    _watched_by = os.getpid()
    threading.Thread(target=_attend, args=(reading,), daemon=True, name="hvd_adpsgd.state").start()
    return True


def _attend(reading: int) -> None:
    """The thread: one file for each time that the signal was heard."""
    while os.read(reading, 1):
        try:
            log.info("state written to %s", write())
        except Exception as error:
            log.error(
                "SIGUSR1: no state was written: %s. Set HVD_ADPSGD_STATE_DIR to a folder with room "
                "in which files can be made.",
                error,
            )


def write() -> Path:
    """Write the state now.

    Returns:
        The file, hvd_adpsgd.state.RANK.PID.N.json; N counts from 1, so that two can be compared.

    Raises:
        OSError: if it cannot be written.
    """
    global _count
    folder = Path(_folder or tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"hvd_adpsgd.state.{_rank}.{os.getpid()}.{_count + 1}.json"
    # under its name only when whole; by rename, so that no link laid out there is followed
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
    """What all sources say, and where every thread of this process is."""
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
    """What a source says, or what is wrong with it: the rest is worth having."""
    try:
        return source()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _threads() -> dict[str, list[str]]:
    """Stacks of the Python threads by name, innermost call first; the scripts are not read."""
    names: Mapping[int | None, str] = {t.ident: t.name for t in threading.enumerate()}
    return {
        f"{names.get(ident, 'thread')} ({ident:#x})": [
            f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
            for frame, line in traceback.walk_stack(innermost)
        ]
        for ident, innermost in sys._current_frames().items()
    }
