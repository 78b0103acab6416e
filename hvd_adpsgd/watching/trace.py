"""The timeline of a run: a Chrome trace per learner, bounded in size.

    trace.3.json      the newest records of learner 3, a JSON array with one event per line
    trace.3.old.json  the records before, once the file had grown to half of its bound

All learners' times are on one clock, so that Perfetto shows several files together. This module needs no
torch; clocks are arguments.
"""

import json
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adpsgd.errors import ConfigError

log = logging.getLogger("hvd_adpsgd")

TRACKS = {"trainer": 0, "engine": 1}
FLUSH_EVENTS = 256
# of a learner's files: some hours of steps, and opened in a browser at once
LIMIT_NBYTES = 16 << 20
_BEGIN, _END = "[\n", "\n]\n"


def learner_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of one learner's file: trace.json becomes trace.3.json.

    Raises:
        ConfigError: for a path that names no file.
    """
    whole = Path(path)
    if not whole.name:
        raise ConfigError(
            f"HVD_ADPSGD_TIMELINE={path} names no file. Set it to one, as trace.json."
        )
    return whole.with_name(f"{whole.stem}.{rank}{whole.suffix}")


class Timeline:
    """Writer of a learner's timeline, a Chrome trace, which Perfetto opens.

    Each append overwrites the closing "]" and writes it again, so the file is valid JSON at any time, also
    after the process fails. A file that has grown to half of the bound is renamed to NAME.old.json, in place
    of an earlier one, and a new file begins. So the newest records, at least half of the bound, always stay.

    Args:
        path: the file; an earlier file is overwritten.
        rank: the learner's rank among all, which is the trace's process id.
        zero_s: time of the trace at which the clock shows 0.
        label: name of the process in the viewer; default "learner <rank>".
        limit_nbytes: largest size of both files together.
        continues: whether an earlier file is kept as NAME.old.json.

    Raises:
        ConfigError: if the file cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        zero_s: float = 0.0,
        label: str = "",
        limit_nbytes: float = LIMIT_NBYTES,
        continues: bool = False,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.zero_s = zero_s
        self._half = limit_nbytes // 2
        self._lock = threading.Lock()
        self._head: list[str] = []
        self._lines: list[str] = []
        self._file: int | None = None
        try:
            if continues and self.path.exists():
                os.replace(self.path, self._old)
            else:
                self._old.unlink(missing_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"no timeline: by HVD_ADPSGD_TIMELINE the file of learner {rank} is {str(self.path)!r}, "
                f"which cannot be created ({error.strerror}). Name a file in a folder that exists on every "
                "host and may be written to."
            ) from error
        self.name_process(rank, label or f"learner {rank}")
        self.flush()

    @property
    def _old(self) -> Path:
        return self.path.with_name(f"{self.path.stem}.old{self.path.suffix}")

    def name_process(self, rank: int, label: str) -> None:
        """Name a process and its tracks in the trace viewer; a simulation has several processes in a file."""
        names = [_named("process_name", rank, 0, {"name": label})]
        names += [_named("thread_name", rank, tid, {"name": t}) for t, tid in TRACKS.items()]
        names.append(_named("process_sort_index", rank, 0, {"sort_index": rank}))
        self._head += map(_line, names)
        for event in names:
            self._append(event)

    def complete(
        self,
        name: str,
        track: str,
        began_s: float,
        ended_s: float,
        *,
        rank: int | None = None,
        **args: Any,
    ) -> None:
        """Add an event with a duration.

        Args:
            name: name of the event.
            track: "trainer" or "engine".
            began_s: the clock's reading at the beginning of the event.
            ended_s: the clock's reading at the end of the event, not before its beginning.
            rank: process of the event; default: the learner of the file.
            **args: numbers and text that the viewer shows with the event.
        """
        pid = self.rank if rank is None else rank
        event = {"name": name, "ph": "X", "pid": pid, "tid": TRACKS[track]}
        event["ts"] = round((began_s + self.zero_s) * 1e6, 3)
        event["dur"] = round((ended_s - began_s) * 1e6, 3)
        if args:
            event["args"] = {key: _plain(value) for key, value in args.items()}
        self._append(event)

    def flush(self) -> None:
        """Write all buffered events in one append.

        If writing fails (a full disk, say), the timeline ends with a warning.
        """
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the buffered events and close the file; idempotent."""
        with self._lock:
            self._flush()
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _append(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None:  # closed, or ended by an error
                return
            self._lines.append(_line(event))
            if len(self._lines) >= FLUSH_EVENTS:
                self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines or self._file is None:
            return
        try:
            nbytes = sum(map(len, lines)) + 2 * len(lines) + len(_END)
            if self._size and self._size + nbytes > self._half:
                self._turn_over()
                lines = self._head + lines
            self._write((",\n" if self._size else _BEGIN) + ",\n".join(lines))
        except OSError as error:
            log.warning("timeline %s ends here, training continues: %s.", self.path, error.strerror)
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _turn_over(self) -> None:
        """Rename the file to NAME.old.json, and begin a new file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        os.replace(self.path, self._old)
        self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._size = 0  # bytes of the file without the closing bracket

    def _write(self, text: str) -> None:
        """Append text in place of the closing bracket, and write the bracket again."""
        assert self._file is not None
        data = text.encode()
        at, end = self._size, data + _END.encode()
        while end:  # a short write happens only when the disk is nearly full or a signal comes
            written = os.pwrite(self._file, end, at)
            at, end = at + written, end[written:]
        self._size += len(data)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), allow_nan=False)


def _named(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    """Return a metadata event of the Chrome trace format."""
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy scalars become numbers; NaN, infinity and other types become text."""
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)
    return number if isinstance(number, (bool, int, float, str)) else str(number)
