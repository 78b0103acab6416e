"""Numbers about a run: where the time of a step goes, staleness, and a timeline of all learners.

No MPI, no torch, and no clock of its own: a clock (seconds as a float, like time.monotonic) is an
argument.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError

__all__ = ["PARTS", "STALENESS_BINS", "TRACKS", "Counters", "StalenessHistogram", "Timeline"]

Clock = Callable[[], float]

PARTS = ("inner_allreduce", "optimizer", "collect", "offer")
TRACKS = {"trainer": 0, "engine": 1}
STALENESS_BINS = 64
FLUSH_EVENTS = 256
_END = "\n]\n"


# ---- timeline -----------------------------------------------------------------------------------


class Timeline:
    """Writer of a Chrome trace that several processes share; opens in Perfetto.

    The file is a JSON array with one event per line. Rank 0 creates it, then the others open it, and
    all append whole lines, each time under a lock of the file (flock) and up to and with the closing
    "]". So it is valid JSON at any time, whoever ends first or dies. Learners of several hosts need a
    file system that they share, with locks, and a clock that the hosts share (time.time, say).

    Args:
        path: the file; all learners name the same.
        rank: the learner's rank among all, the trace's process id.
        clock: seconds; events are placed on it.
        origin_s: the clock's reading that becomes time 0, the same on every learner.
        create: whether to create the file, or empty it (rank 0 does).
        label: name of the process in the viewer; default "learner <rank>".

    Raises:
        ConfigError: if the file cannot be created or opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        clock: Clock,
        origin_s: float = 0.0,
        create: bool = False,
        label: str = "",
    ) -> None:
        self.path = os.fspath(path)
        self.rank = rank
        self.clock = clock
        self.origin_s = origin_s
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._file: int | None = _open_trace(self.path, create)
        self._metadata(label or f"learner {rank}")
        self.flush()

    def complete(self, name: str, track: str, began_s: float, ended_s: float, **args: Any) -> None:
        """Add an event that began and ended, both readings of the clock.

        Args:
            name: what happened.
            track: "trainer" or "engine".
            began_s: beginning.
            ended_s: end, not before the beginning.
            **args: shown with the event; numbers and text.

        Raises:
            ConfigError: if there is no such track, or the timeline is closed.
        """
        event = {"name": name, "ph": "X", "pid": self.rank, "tid": _track(track)}
        event["ts"] = round((began_s - self.origin_s) * 1e6, 3)
        event["dur"] = round((ended_s - began_s) * 1e6, 3)
        if args:
            event["args"] = {key: _plain(value) for key, value in args.items()}
        self._append(event)

    @contextmanager
    def span(self, name: str, track: str = "trainer", **args: Any) -> Iterator[None]:
        """Add an event that lasts as long as the block, also when the block raises."""
        began_s = self.clock()
        try:
            yield
        finally:
            self.complete(name, track, began_s, self.clock(), **args)

    def flush(self) -> None:
        """Write what is buffered, in one append.

        Raises:
            OSError: if the file system refuses (a full disk, say); the lines are dropped.
        """
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the rest and close the file; idempotent."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._flush()
            finally:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                raise ConfigError(
                    f"timeline is closed: event {event['name']!r} of rank {self.rank} came after "
                    f"close() of {self.path}. Add events before closing."
                )
            self._lines.append(_line(event))
            if len(self._lines) >= FLUSH_EVENTS:
                self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines and self._file is not None:
            _append(self._file, lines)

    def _metadata(self, label: str) -> None:
        """Name the process and its tracks in the viewer."""
        self._append(_named("process_name", self.rank, 0, {"name": label}))
        for track, tid in TRACKS.items():
            self._append(_named("thread_name", self.rank, tid, {"name": track}))
        self._append(_named("process_sort_index", self.rank, 0, {"sort_index": self.rank}))


def _open_trace(path: str, create: bool) -> int:
    flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_TRUNC if create else 0)
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        cure = "Name a file in a folder that exists and may be written to."
        if not create:
            cure = "Put it where all hosts see the file that rank 0 created."
        raise ConfigError(
            f"no timeline: HVD_ADPSGD_TIMELINE is {path!r}, which cannot be "
            f"{'created' if create else 'opened'} ({error.strerror}). {cure}"
        ) from error


def _append(file: int, lines: list[str]) -> None:
    """Put events into the array of the file, whose closing bracket moves."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        size = os.fstat(file).st_size
        if size:
            os.ftruncate(file, size - len(_END))
        _write_all(file, ((",\n" if size else "[\n") + ",\n".join(lines) + _END).encode())
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _write_all(file: int, data: bytes) -> None:
    while data:  # a short write happens only when the disk is nearly full or a signal comes
        data = data[os.write(file, data) :]


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), allow_nan=False)


def _named(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    """A metadata event."""
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _track(track: str) -> int:
    if track not in TRACKS:
        raise ConfigError(
            f"no such track: a timeline event names {track!r}, known are {', '.join(TRACKS)}. "
            "Use one of these."
        )
    return TRACKS[track]


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: NumPy scalars as numbers, NaN, infinity and others as text."""
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)
    return number if isinstance(number, (bool, int, float, str)) else str(number)


# ---- counters -----------------------------------------------------------------------------------


class Counters:
    """Where the trainer's time goes: seconds by part of a step, sums and moving averages.

    The parts are those of `PARTS`; what is left of a step is the user's forward and backward.
    Time runs from the first `end_step`, so that set-up and the first, slow step do not count.

    Args:
        clock: seconds.
        decay: of the moving averages, per step, in [0, 1).

    Raises:
        ConfigError: if the decay is out of range.
    """

    def __init__(self, clock: Clock, decay: float = 0.98) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(
                f"bad decay: Counters got {decay}, allowed is >= 0 and < 1. Use 0.98 for an "
                "average over about 50 steps."
            )
        self.clock = clock
        self.decay = decay
        self.steps = 0
        self.seconds = 0.0
        self.sums = dict.fromkeys(PARTS, 0.0)
        self.averages = dict.fromkeys((*PARTS, "step"), math.nan)
        self._this_step = dict.fromkeys(PARTS, 0.0)
        self._last_end: float | None = None

    def add(self, part: str, seconds: float) -> None:
        """Count seconds of one part of the step under way.

        Raises:
            ConfigError: if there is no such part.
        """
        if part not in self._this_step:
            raise ConfigError(
                f"no such part of a step: Counters got {part!r}, known are {', '.join(PARTS)}. "
                "Use one of these."
            )
        self._this_step[part] += seconds

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the time of a block as this part, also when the block raises."""
        began = self.clock()
        try:
            yield
        finally:
            self.add(part, self.clock() - began)

    def end_step(self) -> None:
        """The step under way is done."""
        now = self.clock()
        if self._last_end is not None:
            self._average("step", now - self._last_end)
            self.seconds += now - self._last_end
        self._last_end = now
        self.steps += 1
        for part, seconds in self._this_step.items():
            self._average(part, seconds)
            self.sums[part] += seconds
            self._this_step[part] = 0.0

    @property
    def steps_per_s(self) -> float:
        """Steps per second over all steps but the first; NaN before the second."""
        return (self.steps - 1) / self.seconds if self.seconds > 0 else math.nan

    def to_dict(self) -> dict[str, float]:
        """All numbers, flat: steps, seconds, steps_per_s, step_ema_s, <part>_s, <part>_ema_s."""
        numbers: dict[str, float] = {
            "steps": self.steps,
            "seconds": self.seconds,
            "steps_per_s": self.steps_per_s,
            "step_ema_s": self.averages["step"],
        }
        for part in PARTS:
            numbers[f"{part}_s"] = self.sums[part]
            numbers[f"{part}_ema_s"] = self.averages[part]
        return numbers

    def _average(self, name: str, value: float) -> None:
        old = self.averages[name]
        self.averages[name] = value if math.isnan(old) else old + (1 - self.decay) * (value - old)


# ---- staleness ----------------------------------------------------------------------------------


class StalenessHistogram:
    """Staleness of applied corrections: bin s counts those s steps old, the last one all older.

    A view: it looks at the array given, which others may go on counting in.

    Args:
        counts: shape (64,), integers >= 0.

    Raises:
        ConfigError: if the shape is another.
    """

    def __init__(self, counts: npt.NDArray[np.int64] | Sequence[int]) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        if self.counts.shape != (STALENESS_BINS,):
            raise ConfigError(
                f"bad histogram: StalenessHistogram got shape {self.counts.shape}, needed is "
                f"({STALENESS_BINS},). Pass the engine's counts."
            )

    @property
    def total(self) -> int:
        """Number of corrections counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Mean staleness in steps, NaN if nothing was counted; the last bin counts as 63."""
        if self.total == 0:
            return math.nan
        return float(self.counts @ np.arange(STALENESS_BINS) / self.total)

    def quantile(self, q: float) -> int | None:
        """Smallest staleness in steps that a share q of the corrections does not exceed.

        Args:
            q: in [0, 1].

        Returns:
            Steps; 63 means 63 or more; None if nothing was counted.

        Raises:
            ConfigError: if q is out of range.
        """
        if not 0 <= q <= 1:
            raise ConfigError(
                f"bad quantile: StalenessHistogram.quantile got {q}, allowed is >= 0 and <= 1. "
                "Pass 0.5 for the median."
            )
        if self.total == 0:
            return None
        at_least = max(1, math.ceil(q * self.total))
        return int(np.searchsorted(np.cumsum(self.counts), at_least))

    def to_dict(self) -> dict[str, int]:
        """The bins that are not empty: "0", "1", ..., "62", "63+" to count."""
        names = [str(steps) for steps in range(STALENESS_BINS - 1)] + [f"{STALENESS_BINS - 1}+"]
        return {name: int(count) for name, count in zip(names, self.counts, strict=True) if count}
