"""The timeline of a run: writes a Chrome trace per learner, bounded in size, and merges them into one file.

    trace.3.json      the newest records of learner 3, a JSON array with one event per line
    trace.3.old.json  the records before, once the file had grown to half of its bound

The first event of a file names its learner and its job, and the unix time at which its clock shows 0. This
module needs no torch; clocks are arguments.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import math
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from hvd_adpsgd.errors import ConfigError

__all__ = ["TRACKS", "Merged", "Timeline", "learner_path", "merge"]

log = logging.getLogger("hvd_adpsgd")

TRACKS = {"trainer": 0, "engine": 1}
FLUSH_EVENTS = 256
_HEAD = "hvd_adpsgd"  # name of the first event of a learner's file
_BEGIN, _END = "[\n", "\n]\n"
_LONGEST = 1000  # most characters of the first event
# first process id that a merged file gives to processes of other programs' traces; learners have their ranks
_FOREIGN_PID = 1_000_000
_UNIX_US = 1e15  # larger times are unix times in microseconds, after 2001; smaller ones are not
_FARTHEST_US = 1e18  # largest absolute time that is accepted, in microseconds
_MERGED = '{"displayTimeUnit":"ms","traceEvents":[\n'  # how a merged file begins
_NO_TRACE = (  # the exceptions that reading a file which is no trace may raise
    OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, EOFError, zlib.error
)  # fmt: skip


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


# ---- writing ------------------------------------------------------------------------------------


class Timeline:
    """Writer of a learner's timeline, a Chrome trace, which Perfetto opens.

    Each append overwrites the closing "]" and writes it again, so the file is valid JSON at any time, also
    after the process fails. A file that has grown to half of the bound is renamed to NAME.old.json, in place
    of an earlier one, and a new file begins. So the newest records, at least half of the bound, always stay.

    Args:
        path: the file; an earlier file is overwritten.
        rank: the learner's rank among all, which is the trace's process id.
        origin_s: the clock's reading that becomes time 0 of the trace.
        unix_s: the unix time of time 0 of the trace.
        job: number of the launch, equal on all learners of the job; None: not known.
        label: name of the process in the viewer; default "learner <rank>".
        limit_nbytes: largest size of both files together; None: no bound.
        continues: whether an earlier file is kept as NAME.old.json.

    Raises:
        ConfigError: if the file cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        origin_s: float = 0.0,
        unix_s: float = 0.0,
        job: float | None = None,
        label: str = "",
        limit_nbytes: int | None = None,
        continues: bool = False,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.origin_s = origin_s
        self._half = limit_nbytes // 2 if limit_nbytes is not None else math.inf
        self._lock = threading.Lock()
        self._head = [_line(_named(_HEAD, rank, 0, {"unix_s": unix_s, "job": job}))]
        self._lines = list(self._head)
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
        event["ts"] = round((began_s - self.origin_s) * 1e6, 3)
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


# ---- merging ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merged:
    """Content of a merged timeline.

    Attributes:
        learners: ranks of the learners whose traces were merged.
        profiles: files of torch's profiler that were merged.
        events: number of events that have a duration or a moment.
        left_out: traces of earlier launches, and files in the given folders that are no traces: not merged.
    """

    learners: tuple[int, ...]
    profiles: tuple[Path, ...]
    events: int
    left_out: tuple[Path, ...]


@dataclass(frozen=True)
class _Source:
    """A trace that will be merged, and the unix time at which the trace's clock shows 0."""

    path: Path
    unix_ns: int
    job: float | None = None
    rank: int | None = None  # the learner's rank; None: a trace of torch's profiler


def merge(paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> Merged:
    """Merge traces into one file, on one clock whose time 0 is that of the earliest trace.

    Each trace names the unix time of its time 0, so learners of one host are aligned exactly, and learners of
    different hosts as exactly as the hosts' clocks (NTP).

    Args:
        paths: files of HVD_ADPSGD_TIMELINE and of torch's profiler (export_chrome_trace), also compressed by
            gzip, or folders of such files. Of several launches the newest is merged. Files in a folder that
            are no traces, and events that do not fit the format, are left out.
        output: file for the merged Chrome trace, for Perfetto; it appears when it is complete.

    Raises:
        ConfigError: if there is no trace, a named file is no trace, or the output is one of the traces or
            cannot be written.
    """
    sources, left_out = _sources(paths, Path(output))
    if not sources:
        raise ConfigError(
            f"no timeline in {', '.join(str(path) for path in paths)}: no trace of a learner was found. "
            "Start the run with HVD_ADPSGD_TIMELINE=FOLDER/trace.json, and name that folder or its files."
        )
    zero_ns = min(source.unix_ns for source in sources)
    events, ahead = 0, _MERGED
    try:
        with _whole(Path(output)) as file:
            for number, source in enumerate(sources):
                for event, line in _shifted(source, number, (source.unix_ns - zero_ns) / 1e3):
                    file.write(ahead + line)
                    ahead = ",\n"
                    events += event.get("ph") != "M"
            file.write((_MERGED if ahead == _MERGED else "") + "\n]}\n")
    except OSError as error:
        raise ConfigError(
            f"no merged timeline: {os.fspath(output)!r} cannot be written ({error.strerror}). Name another "
            "file with -o."
        ) from error
    return Merged(
        learners=tuple(sorted({one.rank for one in sources if one.rank is not None})),
        profiles=tuple(one.path for one in sources if one.rank is None),
        events=events,
        left_out=tuple(left_out),
    )


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[str]]:
    """Context manager: a file for writing, which appears at `path` when complete, not after an error."""
    path = path.resolve()  # so that the target of a symbolic link is replaced, not the link
    if path.exists() and not path.is_file():  # a pipe, say, which a rename would replace
        with open(path, "w", encoding="utf-8") as file:
            yield file
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _sources(
    paths: Sequence[str | os.PathLike[str]], output: Path
) -> tuple[list[_Source], list[Path]]:
    """Return the traces to merge, in order, and the files that are left out."""
    found: list[_Source] = []
    left_out: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            _refuse_output(path, output)
            found.append(_source(path))
            continue
        for file in sorted([*path.glob("*.json"), *path.glob("*.json.gz")]):
            try:
                source = _source(file)
            except ConfigError:
                if not _same(file, output):
                    left_out.append(file)
                continue
            _refuse_output(file, output)
            found.append(source)
    newest = max((one.job for one in found if one.job is not None), default=None)
    left_out += [one.path for one in found if one.job not in (None, newest)]
    return [one for one in found if one.job in (None, newest)], left_out


def _same(path: Path, output: Path) -> bool:
    return path.exists() and output.exists() and path.samefile(output)


def _refuse_output(path: Path, output: Path) -> None:
    if _same(path, output):
        raise ConfigError(
            f"the merged timeline would replace one of the traces that it is made of: {str(path)!r}. Name "
            "another file with -o."
        )


def _source(path: Path) -> _Source:
    try:
        if not path.is_file():
            os.stat(path)  # raises OSError with the reason if the file does not exist
            raise ValueError("a folder or a pipe")
        with _opened(path) as file:
            first, second = file.read(len(_BEGIN)), file.readline(_LONGEST)
        if first == _BEGIN and f'"{_HEAD}"' in second:
            head = json.loads(second.rstrip(",\n"))
            args = head["args"]
            job = args["job"]
            if job is not None:
                job = float(job)
                if not math.isfinite(job):
                    raise ValueError("no number of a job")
            return _Source(path, _ns(1e9 * args["unix_s"]), job, int(head["pid"]))
        return _Source(path, _unix_of_profile(path))
    except _NO_TRACE as error:
        reason = getattr(error, "strerror", None) or "it is not JSON of that form"
        raise ConfigError(
            f"not a timeline: {str(path)!r} cannot be read ({reason}). Pass files that HVD_ADPSGD_TIMELINE "
            "or torch's profiler has written."
        ) from error


def _opened(path: Path, errors: str = "strict") -> IO[str]:
    """Open a trace for reading; torch's profiler compresses a file named *.gz with gzip."""
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8", errors=errors))
    return open(path, encoding="utf-8", errors=errors)


def _ns(number: Any) -> int:
    """Convert a number to a unix time in whole nanoseconds.

    Raises:
        ValueError, TypeError, OverflowError: if the value is no such number.
    """
    rounded = round(number)
    if abs(rounded) >= 1 << 63:
        raise ValueError("no unix time")
    return rounded


def _profile(path: Path) -> dict[str, Any]:
    """Read a trace of torch's profiler; its traceEvents are reduced to those that are dicts."""
    with _opened(path) as file:
        if (text := file.read()).startswith(_MERGED):
            raise ValueError("merged before")
    whole = json.loads(text, parse_constant=str)  # NaN is not JSON
    whole["traceEvents"] = [e for e in whole["traceEvents"] if isinstance(e, dict)]
    return cast(dict[str, Any], whole)


def _unix_of_profile(path: Path) -> int:
    """Return the unix time of time 0 of a profiler's trace, in nanoseconds.

    Raises:
        ValueError: if the file is no such trace, or its times are on a clock that it does not name.
    """
    whole = _profile(path)
    if "baseTimeNanoseconds" in whole:
        return _ns(int(whole["baseTimeNanoseconds"]))
    times = [e["ts"] for e in whole["traceEvents"] if e.get("ph") == "X" and _is_time(e.get("ts"))]
    if not times or min(times) < _UNIX_US:
        raise ValueError("no unix time")
    return 0


def _is_time(value: Any) -> bool:
    """Whether a value is a number of microseconds within the accepted range."""
    return isinstance(value, (int, float)) and abs(value) <= _FARTHEST_US


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a learner's file, one per line; truncated lines are skipped."""
    with contextlib.suppress(EOFError, zlib.error), _opened(path, "replace") as file:
        for line in file:
            text = line.strip().rstrip(",")
            if text.startswith("{"):
                try:
                    event = json.loads(text, parse_constant=str)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield event


def _shifted(source: _Source, number: int, by_us: float) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a trace's events, on the merged trace's clock, and their JSON; skip events unfit for JSON."""
    events = _lines(source.path) if source.rank is not None else _foreign(source.path, number)
    for event in events:
        if source.rank is not None and event.get("name") == _HEAD:
            continue
        if "ts" in event:
            if not _is_time(event["ts"]):
                continue
            event = {**event, "ts": round(event["ts"] + by_us, 3)}
        with contextlib.suppress(ValueError, RecursionError):
            yield event, _line(event)


def _foreign(path: Path, number: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace of torch's profiler, with process ids that no other merged trace has."""
    pids: dict[str, int] = {}
    for event in _profile(path)["traceEvents"]:
        if "pid" in event:
            pid = pids.setdefault(repr(event["pid"]), _FOREIGN_PID * (number + 1) + len(pids))
            event = {**event, "pid": pid}
        # the id of a flow event (arrow): ids of other traces count from 0 too
        if isinstance(event.get("id"), int):
            event["id"] += number << 40
        if event.get("name") == "process_name" and event.get("ph") == "M":
            args = event.get("args")
            name = args.get("name") if isinstance(args, dict) else None
            stem = path.name.removesuffix(".gz").removesuffix(".json")
            event["args"] = {"name": f"{stem}: {name}"}
        yield event
