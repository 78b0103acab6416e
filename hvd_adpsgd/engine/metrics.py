"""Numbers about a run: where the time of a step goes, staleness, and a timeline of all learners.

No MPI, no torch, and no clock of its own: a clock (seconds as a float, like time.monotonic) is an
argument.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.theory.mixing import consensus_from_exchanges

__all__ = ["PARTS", "TRACKS", "Counters", "ExchangeMetrics", "Timeline"]

log = logging.getLogger("hvd_adpsgd")

Clock = Callable[[], float]

PARTS = ("inner_allreduce", "optimizer", "collect", "offer")
TRACKS = {"trainer": 0, "engine": 1}
FLUSH_EVENTS = 256
_END = "\n]\n"
_COUNTED = (
    "exchanges_active",
    "exchanges_passive",
    "exchange_s",
    "refused",
    "declined",
    "parked",
    "void_chunks",
    "chunks",
    "bytes_sent",
    "bytes_received",
    "means",
    "mean_s",
)


# ---- timeline -----------------------------------------------------------------------------------


class Timeline:
    """Writer of a Chrome trace that several processes share; opens in Perfetto.

    The file is a JSON array with one event per line. Rank 0 creates it, then all other ranks open it. Each
    append holds a file lock (flock) and ends with the closing "]", so the file is valid JSON at any time,
    also after a rank fails. Learners on several hosts need a shared file system with locks and a clock that
    the hosts share (time.time, for instance).

    Args:
        path: the file, the same on all learners.
        rank: the learner's rank among all, the trace's process id.
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
        origin_s: float = 0.0,
        create: bool = False,
        label: str = "",
    ) -> None:
        self.path = os.fspath(path)
        self.rank = rank
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
        """
        event = {"name": name, "ph": "X", "pid": self.rank, "tid": TRACKS[track]}
        event["ts"] = round((began_s - self.origin_s) * 1e6, 3)
        event["dur"] = round((ended_s - began_s) * 1e6, 3)
        if args:
            event["args"] = {key: _plain(value) for key, value in args.items()}
        self._append(event)

    def flush(self) -> None:
        """Write what is buffered, in one append.

        If the file system refuses (a full disk, say), the timeline ends there, with a warning.
        """
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the rest and close the file; idempotent."""
        with self._lock:
            self._flush()
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _append(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None:  # closed, or given up
                return
            self._lines.append(_line(event))
            if len(self._lines) >= FLUSH_EVENTS:
                self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines or self._file is None:
            return
        try:
            _append(self._file, lines)
        except OSError as error:
            log.warning("timeline %s ends here, training goes on: %s.", self.path, error.strerror)
            os.close(self._file)
            self._file = None

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
    """Append events to the array in the file, before its closing bracket."""
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


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: NumPy scalars as numbers, NaN, infinity and others as text."""
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)
    return number if isinstance(number, (bool, int, float, str)) else str(number)


# ---- counters -----------------------------------------------------------------------------------


class Counters:
    """Where the trainer's time goes: seconds by part of a step, sums and moving averages.

    The parts are those of `PARTS`; the rest of a step is the user's forward and backward. Time counts
    from the first `end_step`, without set-up and the first, slow step.

    Args:
        clock: seconds.
        decay: of the moving averages, per step, in [0, 1).
    """

    def __init__(self, clock: Clock, decay: float = 0.98) -> None:
        self.clock = clock
        self.decay = decay
        self.steps = 0
        self.seconds = 0.0
        self.sums = dict.fromkeys(PARTS, 0.0)
        self.averages = dict.fromkeys((*PARTS, "step"), math.nan)
        self._this_step = dict.fromkeys(PARTS, 0.0)
        self._last_end: float | None = None

    def add(self, part: str, seconds: float) -> None:
        """Count seconds of one part of the step under way."""
        self._this_step[part] += seconds

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


# ---- exchanges ----------------------------------------------------------------------------------


class ExchangeMetrics:
    """Numbers of an engine, from the counters of its thread.

    Args:
        super_size: number of super learners.
    """

    def __init__(self, super_size: int):
        self._n = super_size
        self._square, self._compared = 0.0, 0  # as of the last `read`
        self._distance = math.nan

    def read(self, counters: Mapping[str, Any] | None, cpu_s: float = 0.0) -> dict[str, Any]:
        """All numbers; without counters 0, and NaN for means."""
        found = counters or {**dict.fromkeys(_COUNTED, 0), "staleness": [0] * 64, "met": []}
        staleness = np.array(found["staleness"])
        total = int(staleness.sum())
        return {
            "exchanges": found["exchanges_active"] + found["exchanges_passive"],
            **{name: found[name] for name in _COUNTED},
            "staleness": staleness.tolist(),
            "staleness_mean": float(np.arange(staleness.size) @ staleness) / total
            if total
            else math.nan,
            "consensus_distance": self._consensus_distance(counters) if counters else math.nan,
            "peers": found["met"],
            "engine_cpu_s": cpu_s,
        }

    def _consensus_distance(self, counters: Mapping[str, Any]) -> float:
        """From the exchanges since the last `read`; the last value if none compared models.

        Without any exchange, the distance of this model from the last mean of all.
        """
        if counters["compared"] == 0 and counters["means"]:
            return math.sqrt(counters["mean_square"])
        compared = counters["compared"] - self._compared
        if compared > 0:
            mean_square = max((counters["square"] - self._square) / compared, 0.0)
            self._distance = consensus_from_exchanges(mean_square, self._n)
            self._square, self._compared = counters["square"], counters["compared"]
        return self._distance
