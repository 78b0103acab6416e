"""Shows the progress of a long simulation: one line, updated on a terminal, else printed every 10 s."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from hvd_adpsgd_lab.simulation.campaign import BLOCK, Report

_BAR = 24  # characters of a bar


class _Line:
    """The progress line on stderr."""

    def __init__(self) -> None:
        self.began = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, text: Callable[[], str], last: bool = False) -> None:
        """Print text() if it is the `last` one, or 0.2 s (without a terminal 10 s) after the last text."""
        now = time.monotonic()
        if now - self._shown < (0.2 if self._terminal else 10) and not last:
            return
        self._shown = now
        end = "\r" if self._terminal and not last else "\n"
        print(text().ljust(78), end=end, file=sys.stderr, flush=True)

    def left(self, share: float) -> str:
        """The time that is left when this share is over, as text."""
        took = time.monotonic() - self.began
        return f", {took * (1 - share) / share:.0f} s left" if share > 0 else ""


def of_seeds(runs: int) -> Callable[[Report], None]:
    """Return a callback that shows how many of `runs` seeds have run, and the time that the rest takes."""
    line = _Line()
    before: int | None = None  # seeds that earlier calls of the command have run (--keep)

    def show(report: Report) -> None:
        nonlocal before
        before = max(report.runs - BLOCK, 0) if before is None else before
        rate = max(report.runs - before, 1) / max(time.monotonic() - line.began, 1e-9)
        line.show(
            lambda: (
                f"{report.runs} of {runs} seeds, {rate:.0f}/s, {(runs - report.runs) / rate:.0f} s left, "
                f"{len(report.failures)} broken"
            ),
            last=report.runs >= runs,
        )

    return show


def of_states(name: str) -> Callable[[int], None]:
    """Return a callback for `--explore` that shows how many states of the job `name` were reached."""
    line = _Line()
    return lambda states: line.show(lambda: f"{name}: {states:,} states so far")


def of_plan() -> Callable[[float], None]:
    """Return a callback that shows how much of the planned time is simulated, and the time left."""
    line = _Line()
    return lambda share: line.show(lambda: f"simulated {share:.0%}{line.left(share)}")


def of_training(name: str) -> Callable[[float], None]:
    """Return a callback that shows the share of a training that is over, with a bar."""
    line = _Line()

    def text(share: float) -> str:
        full = int(_BAR * share)
        return f"{name[:24]:24} [{'#' * full}{'.' * (_BAR - full)}] {share:.0%}{line.left(share)}"

    return lambda share: line.show(lambda: text(share))
