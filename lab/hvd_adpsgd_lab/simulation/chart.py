"""Shows a simulated run: as a sequence chart of messages in text, or as a Chrome trace (timeline)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

from hvd_adpsgd.engine.metrics import EVENT_NAMES
from hvd_adpsgd.watching.trace import Timeline
from hvd_adpsgd_lab.simulation.job import Job

WIDTH = 16  # characters of a super learner's column
NAMES = ("", "ASK", "YES", "NO", "BYE", "BYE_SEEN", "CUT", "CUT_SEEN", "REPORT")
CONTROL, AGREEMENT, SUMS = 1, 2, 3 + 16384  # channels, as in engine/wire.pxd
AGREEMENT_NAMES = ("", "VOTE", "ASK", "ANSWER", "PREPARE", "ACK", "COMMIT")


def chart(job: Job, n: int, last: int | None = None) -> str:
    """Return a sequence chart of a traced job: a line per message, when it is sent, and per engine action.

    Args:
        job: the job, after its run.
        n: number of super learners, each of which gets a column.
        last: return only the last so many lines; None: all.
    """
    lines = sorted([*_messages(job), *_deeds(job)], key=lambda line: line[0])
    shown = lines[-last:] if last else lines
    head = " " * 12 + "".join(f"{i:^{WIDTH}}" for i in range(n))
    left_out = [f"({len(lines) - len(shown)} lines before)"] if len(shown) < len(lines) else []
    return "\n".join([head, *left_out, *(_drawn(line, n) for line in shown)])


def _messages(job: Job) -> Iterator[tuple[float, int, int, str]]:
    """Yield each message as (seconds, sender, receiver, text)."""
    for at, arrives, src, dst, channel, nbytes, kind, number in job.network.messages():
        name = _name(channel, nbytes, kind, number)
        yield at - 1.0, src, dst, f"{name} ({(arrives - at) * 1e3:.3g} ms)"


def _name(channel: int, nbytes: int, kind: int, number: int) -> str:
    if channel == CONTROL:
        return f"{NAMES[kind]} {number}" if number else NAMES[kind]
    if channel == AGREEMENT:
        return f"{AGREEMENT_NAMES[kind]} {number}"
    if channel >= SUMS:
        return f"sum {nbytes} B"
    return f"chunk {nbytes} B" if nbytes else "empty"


def _deeds(job: Job) -> Iterator[tuple[float, int, int, str]]:
    for at, who, what in job.story or ():
        yield at, who, who, what


def _drawn(line: tuple[float, int, int, str], n: int) -> str:
    at, src, dst, what = line
    row = list(("|".center(WIDTH)) * n)
    middle = (WIDTH - 1) // 2
    left, right = sorted((src, dst))
    first, last = left * WIDTH + middle, right * WIDTH + middle
    if src == dst:
        row[first] = "*"
        return f"{at * 1e3:10.3f}  {''.join(row).rstrip()}   {src} {what}"
    row[first + 1 : last] = "-" * (last - first - 1)
    row[last - 1 if dst == right else first + 1] = ">" if dst == right else "<"
    label = f" {what} "
    if len(label) < last - first - 2:
        row[first + 2 : first + 2 + len(label)] = label
        return f"{at * 1e3:10.3f}  {''.join(row).rstrip()}"
    return f"{at * 1e3:10.3f}  {''.join(row).rstrip()}   {what}"


def write_timeline(job: Job, n: int, path: str | os.PathLike[str]) -> None:
    """Write a timeline of the engines and trainers of a traced job, in the format of HVD_ADPSGD_TIMELINE.

    Args:
        job: the job, after its run.
        n: number of super learners.
        path: the file.

    Raises:
        ConfigError: if the file cannot be written.
    """
    file = Timeline(path, rank=0, zero_s=-1.0, label="super learner 0", limit_nbytes=math.inf)
    for i in range(1, n):
        file.name_process(i, f"super learner {i}")
    for who, kind, began, ended, numbers in job.timeline or ():
        name = kind if isinstance(kind, str) else EVENT_NAMES[kind]
        track = "trainer" if isinstance(kind, str) else "engine"
        file.complete(name, track, began, ended, rank=who, **_shown(numbers))
    file.close()


def _shown(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if name != "peer" or value >= 0}
