"""Gives the Horovod world of each super learner a HOROVOD_TIMELINE file of its own."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NAME = "HOROVOD_TIMELINE"


@contextlib.contextmanager
def own_timeline(super_rank: int, super_size: int) -> Iterator[None]:
    """Context manager in which Horovod starts, with HOROVOD_TIMELINE naming this super learner's file.

    trace.json becomes trace.0.json, trace.1.json, ...; with one super learner the name is unchanged.
    """
    asked = os.environ.get(_NAME, "")
    if super_size == 1 or asked in ("", "DYNAMIC"):  # DYNAMIC names no file; see start_timeline
        yield
        return
    path = Path(asked)
    os.environ[_NAME] = str(path.with_name(f"{path.stem}.{super_rank}{path.suffix}"))
    try:
        yield
    finally:
        os.environ[_NAME] = asked
