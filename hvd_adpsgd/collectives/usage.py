"""Counts and times operations over all learners, and warns of a script that calls them too often.

Each operation waits for the slowest learner, so a script that calls one per step is synchronous again. One
call by the user counts as one operation, also if it consists of several.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

log = logging.getLogger("hvd_adpsgd")

WINDOW, LIMIT = 100, 10  # more than LIMIT operations in WINDOW steps cause a warning ...
LONG_S, SHARE = 10.0, 0.1  # ... and those that take so long, and this share of the time
_LIBRARIES = ("hvd_adpsgd.", "horovod.", "torch.", "accelerate.", "contextlib")
# their loops call operations where a script has no say: these cause no warning
_FRAMEWORKS = ("lightning.", "transformers.")


class Caller(NamedTuple):
    """Name of an operation over all learners, and the line of the script that calls it."""

    operation: str
    file: str
    line: int


@dataclass
class _Tally:
    operations: int = 0
    seconds: float = 0.0
    # steps made in the present window, which begins with an operation; the first one after the first step
    steps: int = -1
    # operations, and seconds in them, by caller, in the present window
    callers: dict[Caller, tuple[int, float]] = field(default_factory=dict)
    began: float = 0.0  # when the window did, of time.monotonic
    has_warned: bool = False
    kinds: Counter[str] = field(default_factory=Counter)  # how often each kind was called


tally = _Tally()  # operations over all learners of this process
_inside = threading.local()  # the operation that the user calls, while this thread runs it
_waiting: set[int] = set()  # threads of the script that are in an operation over all learners


@contextlib.contextmanager
def counted(operation: str) -> Iterator[Caller]:
    """Context manager whose body counts as one operation over all learners; a nested one is part of it.

    Yields:
        The operation that the user calls, and the line that calls it.
    """
    outer = getattr(_inside, "caller", None)
    if outer is not None:
        yield outer
        return
    frame, began = _outside(sys._getframe(1)), time.monotonic()
    caller = _caller(operation, frame)
    by_framework = frame is not None and module_of(frame).startswith(_FRAMEWORKS)
    _inside.caller = caller
    _waiting.add(threading.get_ident())
    try:
        yield caller
    finally:
        _inside.caller = None
        _waiting.discard(threading.get_ident())
        seconds = time.monotonic() - began
        tally.operations += 1
        tally.kinds[operation] += 1
        tally.seconds += seconds
        if not by_framework:
            times, before = tally.callers.get(caller, (0, 0.0))
            tally.callers[caller] = times + 1, before + seconds


@contextlib.contextmanager
def on_behalf(caller: Caller) -> Iterator[None]:
    """Context manager whose body is part of `caller`'s operation, which was counted when requested."""
    _inside.caller = caller
    try:
        yield
    finally:
        _inside.caller = None


@contextlib.contextmanager
def waiting(caller: Caller) -> Iterator[None]:
    """Context manager in which the script waits for an operation that was counted when requested."""
    began = time.monotonic()
    _waiting.add(threading.get_ident())
    try:
        yield
    finally:
        _waiting.discard(threading.get_ident())
        seconds = time.monotonic() - began
        times, before = tally.callers.get(caller, (0, 0.0))
        tally.callers[caller] = times, before + seconds
        tally.seconds += seconds


def is_waiting() -> bool:
    """Whether a thread of the script is in an operation over all learners now."""
    return bool(_waiting)


def module_of(frame: FrameType) -> str:
    """Return the name of the module of a frame."""
    return str(frame.f_globals.get("__name__", ""))


def _outside(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside of the libraries: None in backward() on a thread of torch."""
    while frame is not None and module_of(frame).startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def _caller(operation: str, frame: FrameType | None) -> Caller:
    if frame is None:
        return Caller(operation, "a thread of torch", 0)
    return Caller(operation, frame.f_code.co_filename, frame.f_lineno)


def end_step(warns: bool) -> None:
    """Count a step with operations before it; warn, once, after WINDOW steps with many or long operations.

    Args:
        warns: whether this learner is the one that logs the warning.
    """
    tally.steps += 1
    if 0 < tally.steps < WINDOW:
        return
    callers, tally.callers = tally.callers, {}
    began, tally.began = tally.began, time.monotonic()
    is_whole, tally.steps = tally.steps == WINDOW, 0
    number, lost = map(sum, zip(*callers.values(), strict=True)) if callers else (0, 0.0)
    many, long = number > LIMIT, lost > max(LONG_S, SHARE * (tally.began - began))
    if not (is_whole and (many or long) and warns) or tally.has_warned:
        return
    tally.has_warned = True
    most = max(callers, key=lambda caller: callers[caller][:: 1 if many else -1])
    log.warning(
        "%d operations over all learners in %d steps: %.1f s lost waiting for the slowest learner. %s at "
        "%s:%d is %d of them, %.1f s. Call it less often than every 10 steps, or inside the super learner "
        "only (process_set=hvd.super_learner, where the operation takes one). Take a mean by "
        "hvd.average_model_async, which does not wait.",
        *(number, WINDOW, lost, *most, *callers[most]),
    )


def calls(operations: Iterable[str]) -> int:
    """Return how many of these operations this process has made so far."""
    return sum(tally.kinds[operation] for operation in operations)


def totals() -> dict[str, float]:
    """Return how many operations over all learners this process has made so far, and their seconds."""
    return {"global_operations": tally.operations, "global_operations_s": tally.seconds}
