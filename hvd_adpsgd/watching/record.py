"""The record of a run: a folder with a file of JSON lines per super learner, bounded in size.

    {"kind": "start", "time_s": ..., "super_learner": 2, "name": "node3, learner 16", ...}
    {"kind": "report", "time_s": ..., "step": ..., "scalars": {"loss": ...}, "peers": {"0": 17}, ...}
    {"kind": "event", "time_s": ..., "event": "failed", "about": 1, "text": "..."}

A file that has grown to its bound loses every second report and its oldest events, and from then on reports
are written half as often: the whole run stays, at a falling resolution. A reader passes over a last line that
is cut off.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.watching.reports import Report

__all__ = ["LIMIT_NBYTES", "Event", "Record", "Run", "Track", "read"]

log = logging.getLogger("hvd_adpsgd")

LIMIT_NBYTES = 8 << 20  # of one super learner's file
_EVENTS = 1000  # kept when a file is thinned, of each kind but reports


# ---- writing ------------------------------------------------------------------------------------


class Record:
    """The file of one super learner; its leader writes it. Appends to what an earlier run has left.

    Args:
        folder: of the record; made if it is not there.
        super_rank: of this super learner.
        limit_nbytes: of the file.
        every_s: between two reports of one super learner, at least; twice as much when the file is full.

    Raises:
        ConfigError: if the file cannot be opened.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        super_rank: int,
        *,
        limit_nbytes: int = LIMIT_NBYTES,
        every_s: float = 0.0,
    ):
        self.folder = Path(folder)
        self.path = self.folder / f"{super_rank}.jsonl"
        self.every_s = every_s
        self._limit = limit_nbytes
        self._last: dict[int, float] = {}  # time of the last report, by super_rank
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] | None = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"no record: HVD_ADPSGD_RECORD is {str(folder)!r}, where {self.path.name} cannot be "
                f"written ({error.strerror}). Name a folder that may be written to."
            ) from error

    def report(self, super_rank: int, report: Report, *, last: bool = False, **more: Any) -> None:
        """Add a report, unless that super learner's last one is too recent.

        Args:
            super_rank: whose it is.
            report: its numbers.
            last: add it also if it is too recent.
            **more: of JSON's types.
        """
        if not last and report.time_s < self._last.get(super_rank, -math.inf) + 0.99 * self.every_s:
            return
        self._last[super_rank] = report.time_s
        self.write("report", super_learner=super_rank, **report.to_dict(), **more)

    def write(self, kind: str, **fields: Any) -> None:
        """Add a line. If the file system refuses, the record ends there, with a warning."""
        if self._file is None:
            return
        line = json.dumps({"kind": kind, **_plain(fields)}, separators=(",", ":"), allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
            if self._file.tell() > self._limit:
                self._thin()
        except OSError as error:
            log.warning("record %s ends here, training continues: %s.", self.path, error.strerror)
            self._file = None

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _thin(self) -> None:
        """Halve the file: keep every second report, and the newest events."""
        kept = "".join(line + "\n" for line in thinned(self.path.read_text("utf-8").splitlines()))
        handle, new = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.folder)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(kept)
        os.chmod(new, 0o644)
        os.replace(new, self.path)
        if self._file is not None:
            self._file.close()
        self._file = self.path.open("a", encoding="utf-8")
        self.every_s = 2 * self.every_s


def thinned(lines: list[str]) -> list[str]:
    """Every second report of each super learner, the newest one included, and the newest other lines."""
    kept: list[str] = []
    reports: dict[Any, int] = {}
    others = 0
    for line in reversed(lines):
        found = _parsed(line)
        if found is None:
            continue
        if found.get("kind") == "report":
            who = found.get("super_learner")
            reports[who] = reports.get(who, 0) + 1
            if reports[who] % 2:
                kept.append(line)
        else:
            others += 1
            if others <= _EVENTS or found.get("kind") == "start":
                kept.append(line)
    return kept[::-1]


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


# ---- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        time_s: when, by the clock of the host that has written it.
        what: start, suspect, alive, left, failed, joined, alert, warning.
        about: the super learner; None: all.
        text: for people.
    """

    time_s: float
    what: str
    about: int | None
    text: str


@dataclass
class Track:
    """What is recorded of one super learner.

    Attributes:
        name: host and learner.
        reports: oldest first.
        peers: exchanges with each super learner, by its super_rank.
        staleness: chunks by the age of their correction in steps.
        every_s: between its reports.
    """

    name: str = ""
    reports: list[Report] = field(default_factory=list)
    peers: dict[int, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    every_s: float = 1.0


@dataclass
class Run:
    """A record as read.

    Attributes:
        tracks: by super_rank.
        events: of all, oldest first.
        about: of the start: strategy, script, super_size.
    """

    tracks: dict[int, Track] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


def read(folder: str | os.PathLike[str], newest: int | None = None) -> Run:
    """The record in a folder.

    Args:
        folder: of HVD_ADPSGD_RECORD.
        newest: only so many bytes from the end of each file (its first line is read too).

    Raises:
        ConfigError: if there is no record.
    """
    paths = sorted(Path(folder).glob("*.jsonl"), key=lambda p: (len(p.stem), p.stem))
    if not paths:
        raise ConfigError(
            f"no record in {os.fspath(folder)!r}: there is no file *.jsonl. Start the run with "
            "HVD_ADPSGD_RECORD=FOLDER, and name that folder."
        )
    run = Run()
    own = {int(path.stem) for path in paths if path.stem.isdigit()}
    for path in paths:
        if path.stem.isdigit():
            for found in _lines(path, newest):
                _take(run, int(path.stem), found, own)
    for track in run.tracks.values():
        track.reports.sort(key=lambda report: report.time_s)
    run.events.sort(key=lambda event: event.time_s)
    return run


def _lines(path: Path, newest: int | None) -> Iterator[dict[str, Any]]:
    """The lines of a file that are whole."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if newest is not None and size > newest:
            first = _parsed(file.readline())
            file.seek(max(file.tell(), size - newest))
            file.readline()
            if first:
                yield first
        for line in file:
            if found := _parsed(line):
                yield found


def _parsed(line: str | bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _take(run: Run, writer: int, found: dict[str, Any], own: set[int]) -> None:
    """Add a line of a super learner's file; what it heard of another counts where that one has no file."""
    kind, who = found.get("kind"), found.get("super_learner", writer)
    try:
        if kind == "report" and (who == writer or who not in own):
            _take_report(run.tracks.setdefault(int(who), Track()), found)
        elif kind == "start":
            run.about = {**run.about, **found}
            track = run.tracks.setdefault(writer, Track())
            track.name = str(found.get("name", ""))
            track.every_s = float(found.get("every_s", 1.0))
            run.events.append(
                Event(float(found["time_s"]), "start", writer, f"super learner {writer} starts")
            )
        elif kind == "event":
            about = found.get("about")
            run.events.append(
                Event(
                    float(found["time_s"]),
                    str(found["event"]),
                    None if about is None else int(about),
                    str(found.get("text", "")),
                )
            )
    except (TypeError, ValueError, KeyError, AttributeError):
        return  # a line of another version, or of another hand


def _take_report(track: Track, found: dict[str, Any]) -> None:
    report = Report.from_dict(found)
    float(report.time_s), int(report.step)
    track.reports.append(report)
    if "peers" in found:
        track.peers = {int(peer): int(count) for peer, count in found["peers"].items()}
    if "staleness" in found:
        track.staleness = {int(age): int(count) for age, count in found["staleness"].items()}
    if "every_s" in found:
        track.every_s = float(found["every_s"])
