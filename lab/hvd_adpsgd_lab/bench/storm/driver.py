"""The driver of `bench storm`: plays a schedule of faults on a job, and writes what it has done."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adpsgd.errors import LaunchError
from hvd_adpsgd_lab.bench.storm.jobs import Job, job_of
from hvd_adpsgd_lab.bench.storm.notes import (
    Notes,
    began_file,
    copy_file,
    fault_file,
    mean_file,
    over_file,
    published,
)
from hvd_adpsgd_lab.bench.storm.schedule import Fault

_START_S = 600.0  # longest time until each slot has made a step
_LAST_S = 120.0  # after the run, for replacements that have not made a step yet
_POLL_S = 0.05
_GRACE_S = 4.0  # after the time of a copy, until all are written
_LINES = 30  # of the log, in messages


def driver_file(folder: Path) -> Path:
    """The lines of the driver."""
    return folder / "driver.jsonl"


def perform(settings: dict[str, Any], faults: Sequence[Fault], seconds: float) -> None:
    """Start a job, play the faults, and end it; its folder then has all that is known of it.

    Args:
        settings: scheme, slots, folder, step_s, admit_every, checkpoint_every, width, layers, length, batch,
            rate, seed and every_s (seconds between two copies of the models).
        faults: faults, by time, with slots below settings["slots"].
        seconds: length of the run, from the moment at which each slot has made a step.

    Raises:
        LaunchError: if a slot makes no step in time.
    """
    folder = Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    notes = Notes(driver_file(folder))
    with (folder / "log.txt").open("ab", buffering=0) as log:
        job = job_of(settings, notes, log)
        try:
            job.start()
            _await_steps(job, folder)
            Play(job, notes, settings, faults, seconds).run()
        finally:
            over_file(folder).touch()
            notes.add("closed", killed=job.close())
            notes.close()


def _await_steps(job: Job, folder: Path) -> None:
    ends = time.monotonic() + _START_S
    while missing := [slot for slot in range(job.slots) if not job.has_stepped(slot)]:
        if time.monotonic() > ends:
            tail = "\n".join(
                (folder / "log.txt").read_text(errors="replace").splitlines()[-_LINES:]
            )
            raise LaunchError(
                f"bench storm: slots {missing} have made no step after {_START_S:g} s. Pass fewer "
                f"--slots, or a longer --step. The end of {folder / 'log.txt'}:\n{tail}"
            )
        job.watch()
        time.sleep(_POLL_S)


class Play:
    """Plays faults on a job that trains.

    Args:
        job: all its slots have made a step.
        notes: gets a line for each fault.
        settings: see `perform`.
        faults: faults, by time.
        seconds: length of the run.
    """

    def __init__(
        self, job: Job, notes: Notes, settings: dict[str, Any], faults: Sequence[Fault], seconds: float
    ):  # fmt: skip
        self._job, self._notes, self._folder = job, notes, Path(settings["folder"])
        self._began = time.monotonic()
        self._ends = self._began + seconds
        self._means = Means(self._folder, job.slots, self._began, settings["every_s"])
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # of acts that are due at one time
        self._stopped: dict[int, int] = {}  # process ids by slot
        for fault in faults:
            self._plan(fault.at_s, lambda fault=fault: self._commit(fault))  # type: ignore[misc]

    def run(self) -> None:
        """Play all faults, and wait for the last replacements."""
        published(began_file(self._folder), repr(self._began))
        self._notes.add("began", self._began)
        while time.monotonic() < self._ends or self._is_replacing():
            self.act()
            self._job.watch()
            self._means.collect()
            time.sleep(_POLL_S)
        self._notes.add("over", self._ends)
        for slot, pid in list(self._stopped.items()):
            self._continue(slot, pid)
        self._means.collect(_GRACE_S)

    def act(self) -> None:
        """Do what is due."""
        while self._acts and self._acts[0][0] <= time.monotonic():
            heapq.heappop(self._acts)[2]()

    def _plan(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._acts, (self._began + at_s, next(self._order), act))

    def _is_replacing(self) -> bool:
        late = time.monotonic() > self._ends + _LAST_S
        slots = range(self._job.slots)
        return not late and not all(self._job.has_stepped(slot) for slot in slots)

    def _commit(self, fault: Fault) -> None:
        reason = self._obstacle(fault)
        if reason:
            self._notes.add("left_out", kind=fault.kind, slot=fault.slot, why=reason)
            return
        self._notes.add(fault.kind, slot=fault.slot, seconds=fault.duration_s, factor=fault.factor)
        pid = self._job.pid(fault.slot)
        if fault.kind == "slow":
            until = time.monotonic() + fault.duration_s
            published(fault_file(self._folder, fault.slot), f"{fault.factor!r} {until!r}")
        elif pid is not None and fault.kind == "stop":
            self._stop(fault, pid)
        elif pid is not None:
            self._stopped.pop(fault.slot, None)
            self._job.signal(fault.slot, pid, signal.SIGKILL)

    def _obstacle(self, fault: Fault) -> str:
        if fault.kind == "cut":
            return "needs hosts"
        if fault.kind == "slow":
            return ""
        if self._job.pid(fault.slot) is None:
            return "no process is there"
        if fault.kind == "stop":
            return "it is stopped" if fault.slot in self._stopped else ""
        others = [i for i in range(self._job.slots) if i not in {fault.slot, *self._stopped}]
        return "" if any(map(self._job.has_stepped, others)) else "no other one trains"

    def _stop(self, fault: Fault, pid: int) -> None:
        self._job.signal(fault.slot, pid, signal.SIGSTOP)
        self._stopped[fault.slot] = pid
        now = time.monotonic() - self._began
        self._plan(now + fault.duration_s, lambda: self._continue(fault.slot, pid))

    def _continue(self, slot: int, pid: int) -> None:
        if self._stopped.get(slot) != pid:
            return
        del self._stopped[slot]
        with contextlib.suppress(ProcessLookupError):  # all of a job by horovodrun start again
            self._job.signal(slot, pid, signal.SIGCONT)
        self._notes.add("continued", slot=slot)


class Means:
    """Turns the copies of all learners at a time into their mean: copies of a long run fill a disk.

    Args:
        folder: of the run.
        slots: number of slots.
        began: time 0, by the monotonic clock.
        every_s: seconds between two copies.
    """

    def __init__(self, folder: Path, slots: int, began: float, every_s: float):
        self._folder, self._slots, self._began, self._every_s = folder, slots, began, every_s
        self._number = 1

    def collect(self, early_s: float = 0.0) -> None:
        """Take the mean of all copies whose time is over; by `early_s` seconds sooner, at the end."""
        now = time.monotonic() + early_s
        while now > self._began + self._number * self._every_s + _GRACE_S:
            self._take(self._number)
            self._number += 1

    def _take(self, number: int) -> None:
        files = [copy_file(self._folder, number, slot) for slot in range(self._slots)]
        there = [file for file in files if file.exists()]
        if there:
            whole = np.mean([np.fromfile(file, np.float32) for file in there], 0, np.float64)
            np.save(mean_file(self._folder, number), whole.astype(np.float32))
        for file in there:
            file.unlink()
