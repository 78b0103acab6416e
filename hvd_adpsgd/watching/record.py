"""The record of a run on disk: a folder with two files of JSON lines per super learner.

    2.events.jsonl
    {"kind": "start", "time_s": ..., "super_learner": 2, "name": "node3, learner 16", ...}
    {"kind": "event", "time_s": ..., "event": "failed", "about": 1, "text": "..."}

    2.jsonl
    {"kind": "report", "time_s": ..., "step": ..., "scalars": {"loss": ...}, "peers": {"0": 17}, ...}

A file of reports grows with the logarithm of the run's time: reports become rarer. A reader skips a last line
that is truncated.
"""

import errno
import json
import logging
import math
import os
import re
import stat
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hvd_adpsgd.engine.metrics import TABLES
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.watching.reports import LATEST_S, Report, number, readable, whole

log = logging.getLogger("hvd_adpsgd")

_REPORTS = 7200  # reports until the interval grows, and then in each e-fold of the run's time
_SAME_S = 5.0  # a change of state that several leaders record within this time is one event
_STATES = ("suspect", "alive", "left", "failed", "joined")
_MOST_SUPER_LEARNERS = 1_000_000


class Record:
    """Writer of the files of one super learner, used by its leader; appends to those of an earlier run.

    Args:
        folder: folder of the record; made if missing.
        super_rank: super_rank of this super learner.
        every_s: least seconds between two reports of one super learner at the beginning of the run.

    Raises:
        ConfigError: if a file cannot be opened.
    """

    def __init__(self, folder: str | os.PathLike[str], super_rank: int, *, every_s: float = 0.0):
        self.folder = Path(folder)
        self.path = self.folder / f"{super_rank}.jsonl"
        self.every_s = every_s
        self._least_s, self._began_s = every_s, math.inf
        self._last: dict[int, float] = {}  # time of the last report, by super_rank
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] | None = _opened(self.path)
            self._events = _opened(_events_of(self.path))
        except OSError as error:
            raise ConfigError(
                f"no record: HVD_ADPSGD_RECORD is {str(folder)!r}, where {self.path.name} cannot be "
                f"written ({error.strerror}). Name a folder that may be written to."
            ) from error

    def report(self, super_rank: int, report: Report, *, last: bool = False, **more: Any) -> None:
        """Write a report, unless the super learner's last one is too young; `last`: in any case."""
        if not last and report.time_s < self._last.get(super_rank, -math.inf) + 0.99 * self.every_s:
            return
        self._last[super_rank] = report.time_s
        self.write("report", super_learner=super_rank, **report.to_dict(), **more)

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line to the record; if writing fails (a full disk, say), end the record with a warning."""
        if self._file is None:
            return
        try:
            file = self._file if kind == "report" else self._events
            file.write(_line(kind, fields) + "\n")
            file.flush()
        except OSError as error:
            log.warning("record %s ends here, training continues: %s.", self.path, error.strerror)
            self._file = None

    def thin(self, now_s: float) -> None:
        """Adapt the interval of reports; `now_s` is of a clock that is never set (time.monotonic)."""
        self._began_s = min(self._began_s, now_s)
        self.every_s = max(self._least_s, (now_s - self._began_s) / _REPORTS)

    def close(self) -> None:
        """Close the files; idempotent."""
        if self._file is not None:
            self._file.close()
            self._events.close()
            self._file = None


def _events_of(path: Path) -> Path:
    return path.with_suffix(".events.jsonl")


def _opened(path: Path) -> IO[str]:
    """Open a file for appending, without blocking: opening a pipe would block until a process reads it.

    Raises:
        OSError: if the path is no regular file, or may not be written to.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file")
    return open(handle, "a", encoding="utf-8")


def _line(kind: str, fields: Mapping[str, Any]) -> str:
    return json.dumps({"kind": kind, **plain(fields)}, separators=(",", ":"), allow_nan=False)


def plain(value: Any) -> Any:
    """Convert a value for JSON; NaN becomes None, and an infinity the text "Infinity" or "-Infinity"."""
    if isinstance(value, float):
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


@dataclass(frozen=True)
class Event:
    """An event of the run, such as a failure.

    Attributes:
        time_s: time of the event, by the clock of the host that has written it (time.time).
        what: start, joining, suspect, alive, left, failed, joined, alert, warning.
        about: super_rank of the super learner that the event concerns; None: all.
        text: description of the event.
    """

    time_s: float
    what: str
    about: int | None
    text: str


@dataclass
class Track:
    """The reports of one super learner, and the newest tables of its engine.

    Attributes:
        name: host and learner.
        reports: the reports, oldest first.
        tables: the counts of each table of the engine that the record has, by the table's name.
        every_s: seconds between two reports.
    """

    name: str = ""
    reports: list[Report] = field(default_factory=list)
    tables: dict[str, dict[int, int]] = field(default_factory=dict)
    every_s: float = 1.0


@dataclass
class Run:
    """The record of a run, as read from its files.

    Attributes:
        tracks: the reports of each super learner, by super_rank.
        events: the events of all super learners, oldest first.
        about: facts from the newest start line: strategy, script, super_size.
    """

    tracks: dict[int, Track] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


def read(folder: str | os.PathLike[str], newest: int | None = None) -> Run:
    """Read the record in a folder; lines that do not belong to a record are skipped.

    Args:
        folder: the folder that HVD_ADPSGD_RECORD named.
        newest: read only the reports in the last so many bytes of each file; None: all.

    Raises:
        ConfigError: if the folder holds no record, or a file cannot be read.
    """
    reading = _Reading()
    try:
        paths = _paths(Path(folder))
        for writer, path in paths.items():
            for fields in [*_lines(_events_of(path), None), *_lines(path, newest)]:
                reading.take(writer, fields, paths)
    except OSError as error:
        raise ConfigError(
            f"no record in {os.fspath(folder)!r}: it cannot be read ({error.strerror}). Name the folder of a "
            "record, whose files may be read."
        ) from error
    if not paths:
        raise ConfigError(
            f"no record in {os.fspath(folder)!r}: there is no file *.jsonl. Start the run with "
            "HVD_ADPSGD_RECORD=FOLDER, and name that folder."
        )
    return reading.run()


def _paths(folder: Path) -> dict[int, Path]:
    """Return the regular files of a record by super_rank, in order; opening a pipe could block."""
    paths = {
        int(path.stem): path
        for path in folder.glob("*.jsonl")
        if re.fullmatch(r"0|[1-9]\d{0,5}", path.stem, re.ASCII) and path.is_file()
    }
    return dict(sorted(paths.items()))


def _lines(path: Path, newest: int | None) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file, parsed; with `newest` only those in the last so many bytes."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        if newest is not None and file.seek(0, os.SEEK_END) > newest:
            file.seek(-newest, os.SEEK_END)
            file.readline()
        else:
            file.seek(0)
        for line in file:
            if fields := _parsed(line):
                yield fields


def _parsed(line: str | bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


class _Reading:
    """Collects the lines of all files of a record into a Run."""

    def __init__(self) -> None:
        self._tracks: dict[int, Track] = {}
        self._events: list[tuple[Event, int]] = []  # (event, super_rank of the file's writer)
        # (time, facts) of the newest start
        self._about: tuple[float, dict[str, Any]] = (-math.inf, {})
        self._size: tuple[float, int] = -math.inf, _MOST_SUPER_LEARNERS  # (time, newest super_size)

    def take(self, writer: int, fields: Mapping[str, Any], own: Container[int]) -> None:
        """Add a line of `writer`'s file; a report on another super learner counts if that one has no file."""
        kind = fields.get("kind")
        try:
            time_s = number(fields.get("time_s"), 0, LATEST_S)
            if kind == "report":
                about = whole(fields.get("super_learner", writer), _MOST_SUPER_LEARNERS)
                if about == writer or about not in own:
                    self._report(about, fields)
            elif kind == "start":
                self._start(writer, time_s, fields)
            elif kind == "event":
                self._event(writer, time_s, fields)
            if "super_size" in fields:
                size = whole(fields["super_size"], _MOST_SUPER_LEARNERS)
                self._size = max(self._size, (time_s, size or _MOST_SUPER_LEARNERS))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError):
            return  # another version, or another program, has written the line

    def _report(self, about: int, fields: Mapping[str, Any]) -> None:
        report = Report.from_dict(fields)
        tables = {t.name: _counts(fields[t.name]) for t in TABLES if t.name in fields}
        every_s = number(fields.get("every_s", 1.0), 0, LATEST_S)
        track = self._tracks.setdefault(about, Track())
        track.reports.append(report)
        track.tables |= tables
        if "every_s" in fields:
            track.every_s = every_s

    def _start(self, writer: int, time_s: float, fields: Mapping[str, Any]) -> None:
        every_s = number(fields.get("every_s", 1.0), 0, LATEST_S)
        track = self._tracks.setdefault(writer, Track())
        track.name, track.every_s = readable(fields.get("name", "")), every_s
        what, why = "start", ""
        if fields.get("joining"):
            what, why = "joining", ", in place of one that has failed"
        text = f"super learner {writer} starts{why}"
        self._events.append((Event(time_s, what, writer, text), writer))
        if time_s >= self._about[0]:
            texts = {key: readable(value) for key, value in fields.items()}
            self._about = time_s, {**self._about[1], **texts}

    def _event(self, writer: int, time_s: float, fields: Mapping[str, Any]) -> None:
        about = fields.get("about")
        about = None if about is None else whole(about, _MOST_SUPER_LEARNERS)
        what, text = readable(fields["event"]), readable(fields.get("text", ""))
        self._events.append((Event(time_s, what, about, text), writer))

    def run(self) -> Run:
        """Return what was read, without super learners that the newest start of the run no longer has."""
        tracks = {i: self._tracks[i] for i in sorted(self._tracks) if i < self._size[1]}
        for track in tracks.values():
            track.reports.sort(key=lambda report: report.time_s)
        about = self._about[1]
        if math.isfinite(self._size[0]):
            about = {**about, "super_size": self._size[1]}
        return Run(tracks, _merged(self._events), about)


def _counts(table: Mapping[str, Any]) -> dict[int, int]:
    return {whole(key, _MOST_SUPER_LEARNERS): whole(count) for key, count in table.items()}


def _merged(events: Iterable[tuple[Event, int]]) -> list[Event]:
    """Return the events in order of time; a change of state that several leaders have recorded is one event.

    If one leader records a state twice, these are two events: the super learner was suspect twice, say.
    """
    kept: list[Event] = []
    newest: dict[tuple[str, int | None], tuple[float, set[int]]] = {}
    for event, writer in sorted(events, key=lambda pair: pair[0].time_s):
        key = event.what, event.about
        time_s, writers = newest.get(key, (-math.inf, set()))
        if event.what in _STATES and event.time_s - time_s <= _SAME_S and writer not in writers:
            writers.add(writer)
        else:
            newest[key] = event.time_s, {writer}
            kept.append(event)
    return kept
