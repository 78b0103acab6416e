"""Operations over all learners: counted, timed, and told of when a script calls one in every step.

Each of them waits for the slowest learner, so a script that calls one per step is synchronous again. An
operation is what the user calls: what it consists of is not counted beside it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

__all__ = ["Caller", "counted", "end_step", "on_behalf", "totals", "waited"]

log = logging.getLogger("hvd_adpsgd")

WINDOW, LIMIT = 100, 10  # steps, and operations in so many steps that are still few
_LIBRARIES = ("hvd_adpsgd.", "horovod.", "torch.", "contextlib")


class Caller(NamedTuple):
    """An operation and the line that calls it."""

    operation: str
    file: str
    line: int


@dataclass
class _Tally:
    operations: int = 0
    seconds: float = 0.0
    steps: int = -1  # of the window; the first window begins after the first step
    callers: dict[Caller, tuple[int, float]] = field(
        default_factory=dict
    )  # times and seconds in it
    has_warned: bool = False


_tally = _Tally()  # of this process
_inside = threading.local()  # an operation that consists of others


@contextlib.contextmanager
def counted(operation: str) -> Iterator[Caller]:
    """Count what is done inside as one operation over all learners; inside another, as part of that.

    Yields:
        The operation that the user calls, and from where.
    """
    outer = getattr(_inside, "caller", None)
    if outer is not None:
        yield outer
        return
    caller, began = _caller(operation, sys._getframe(1)), time.monotonic()
    _inside.caller = caller
    try:
        yield caller
    finally:
        _inside.caller = None
        seconds = time.monotonic() - began
        _tally.operations += 1
        _tally.seconds += seconds
        times, before = _tally.callers.get(caller, (0, 0.0))
        _tally.callers[caller] = times + 1, before + seconds


@contextlib.contextmanager
def on_behalf(caller: Caller) -> Iterator[None]:
    """What this thread does inside is part of an operation that was counted where it was asked for."""
    _inside.caller = caller
    try:
        yield
    finally:
        _inside.caller = None


def waited(caller: Caller, seconds: float) -> None:
    """The caller has waited for an operation that it had asked for."""
    times, before = _tally.callers.get(caller, (0, 0.0))
    _tally.callers[caller] = times, before + seconds
    _tally.seconds += seconds


def _caller(operation: str, frame: FrameType | None) -> Caller:
    """The innermost frame outside of the libraries; backward() on a thread of torch has none."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return Caller(operation, "a thread of torch", 0)
    return Caller(operation, frame.f_code.co_filename, frame.f_lineno)


def end_step(warns: bool) -> None:
    """A step is over. After a window of steps with more than a few operations, one warning.

    Args:
        warns: whether this learner is the one that tells the user.
    """
    _tally.steps += 1
    if 0 < _tally.steps < WINDOW:
        return
    callers, _tally.callers = _tally.callers, {}
    is_whole, _tally.steps = _tally.steps == WINDOW, 0
    many = sum(times for times, _ in callers.values()) > LIMIT
    if not (is_whole and many and warns) or _tally.has_warned:
        return
    _tally.has_warned = True
    most = max(callers, key=lambda caller: callers[caller])
    log.warning(
        "%d operations over all learners in %d steps: %.1f s lost waiting for the slowest learner. %s at "
        "%s:%d is %d of them, %.1f s. Call it less often than every 10 steps, or inside the super "
        "learner only (process_set=hvd.super_learner, where the operation takes one).",
        sum(times for times, _ in callers.values()),
        WINDOW,
        sum(seconds for _, seconds in callers.values()),
        *most,
        *callers[most],
    )


def totals() -> dict[str, float]:
    """Operations of this process over all learners so far, and the seconds in them."""
    return {"global_operations": _tally.operations, "global_operations_s": _tally.seconds}
