"""hvd.log_to: sends the numbers of reports as scalars to TensorBoard, Weights & Biases, Trackio or MLflow."""

from __future__ import annotations

import contextvars
import inspect
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.watching.reports import METRICS, Report

log = logging.getLogger("hvd_adpsgd")

EACH = 64  # up to this many super learners each has its own scalars; with more, only means are sent
_CLOSE_S = 5.0  # longest wait of close() for a running call of the writer
_NAMES = [metric.name for metric in METRICS if metric.prometheus]


class Scalar(NamedTuple):
    """A point of a curve: the curve's tag, a value and the step; whether it is a mean over super learners."""

    tag: str
    value: float
    step: int
    is_mean: bool = False


Send = Callable[[list[Scalar], int], object]

_outlet: Outlet | None = None  # where log_to sends


def scalars(known: Mapping[int, Report], own: Report) -> list[Scalar]:
    """Return the scalars of reports: hvd_adpsgd/NAME/SUPER_LEARNER, and their means hvd_adpsgd/NAME.

    Numbers that are not known yet (NaN) are left out; scalars that the script logs are sent even if NaN.

    Args:
        known: reports by super_rank.
        own: report of this super learner, whose step is used for the means.
    """
    points: list[Scalar] = []
    values: dict[str, list[float]] = {}
    for i, report in sorted(known.items()):
        for name, value in _numbers(report):
            values.setdefault(name, []).append(value)
            if len(known) <= EACH:
                points.append(Scalar(f"hvd_adpsgd/{name}/{i}", value, report.step))
    for name, each in values.items():
        points.append(Scalar(f"hvd_adpsgd/{name}", sum(each) / len(each), own.step, is_mean=True))
    points.append(Scalar("hvd_adpsgd/super_learners", float(len(known)), own.step))
    return points


def _numbers(report: Report) -> Iterator[tuple[str, float]]:
    """Yield (name, value): the script's scalars, except names of measured numbers; the measured numbers."""
    for name, value in report.scalars.items():
        if name not in _NAMES:
            yield name, value
    for name in _NAMES:
        value = float(getattr(report, name))
        if not math.isnan(value):
            yield name, value


class Outlet:
    """Sends scalars to a writer at intervals; an exception of the writer ends the sending, with one warning.

    Args:
        writer: has add_scalar(tag, value, step), as torch's SummaryWriter, or log(numbers, step=...), as a
            run of Weights & Biases and Trackio, or log_metrics(numbers, step=...), as MLflow and Lightning's
            loggers; it is called in the context of this call, where Trackio's module finds its run.
        every_s: least seconds between two sendings.

    Raises:
        ConfigError: if the writer has none of these methods, or every_s is negative or no number.
    """

    def __init__(self, writer: Any, every_s: float):
        if not isinstance(every_s, (int, float)) or not 0 <= every_s < math.inf:
            raise ConfigError(
                f"hvd.log_to(every_s={every_s!r}): allowed are seconds >= 0. Pass 10, for instance."
            )
        self._kind = type(writer).__name__
        self._context = contextvars.copy_context()
        self._send: Send | None = _sender(writer)
        self._every_s = every_s
        self._due_s = -math.inf
        self._sent: Mapping[int, Report] = {}
        self._lock = threading.Lock()  # held while the writer is called

    def close(self) -> None:
        """Stop sending scalars; wait at most 5 s for a running call of the writer."""
        self._send = None
        if self._lock.acquire(timeout=_CLOSE_S):
            self._lock.release()

    def send(
        self,
        now_s: float,
        reports: Mapping[int, Report],
        own: int,
        alive: Collection[int],
        *,
        last: bool = False,
    ) -> None:
        """Send new reports of surviving super learners, unless the last were sent less than `every_s` ago.

        Args:
            now_s: time of a clock that is never set (time.monotonic).
            reports: reports by super_rank.
            own: super_rank of this super learner.
            alive: super_ranks of the surviving super learners.
            last: send even if `every_s` seconds are not over, because nothing will be sent later.
        """
        if reports is self._sent or (now_s < self._due_s and not last):
            return
        self._due_s, self._sent = now_s + self._every_s, reports
        known = {i: report for i, report in reports.items() if i in alive or i == own}
        with self._lock:
            try:
                if self._send is not None:
                    points, step = scalars(known, reports[own]), reports[own].step
                    self._context.run(self._send, points, step)
            except (Exception, SystemExit) as error:  # SystemExit: the thread is ours
                self._send = None
                log.warning(
                    "hvd.log_to: %s raises %s (%s). Nothing more is sent to it, training continues. If the "
                    "script closes it before hvd.shutdown(), call hvd.log_to(None) first.",
                    self._kind,
                    type(error).__name__,
                    error,
                )


def log_to(writer: Any, every_s: float = 10.0) -> None:
    """Send the numbers of the run to a writer of TensorBoard, Weights & Biases, Trackio or MLflow.

    The first surviving leader sends, on a separate thread: the numbers that each super learner logs and
    reports as hvd_adpsgd/NAME/SUPER_LEARNER, the means over super learners as hvd_adpsgd/NAME, by log_metrics
    as hvd_adpsgd/NAME/mean. Another leader sends nothing until it is the first surviving one; pass a writer
    on every leader if the curves must continue after a failure. A writer that raises is not called again,
    with one warning; training continues.

    Args:
        writer: a torch.utils.tensorboard.SummaryWriter, a run of wandb.init() or trackio.init(), mlflow with
            an active run, or an object with their add_scalar(tag, value, step), log(numbers, step=...) or
            log_metrics(numbers, step=...). It replaces the writer of an earlier call; None: nothing more is
            sent after the return.
        every_s: least seconds between two sends; the last numbers are sent in shutdown().

    Raises:
        ConfigError: for an object without these methods, or every_s below 0.
    """
    global _outlet
    before, _outlet = _outlet, None if writer is None else Outlet(writer, every_s)
    if before is not None:
        before.close()


def outlet() -> Outlet | None:
    """Return where the numbers of the run are sent; None without a writer."""
    return _outlet


def _sender(writer: Any) -> Send:
    """Return the function that sends scalars to this writer; raise ConfigError if it has no known method."""
    if not isinstance(writer, type):
        if _takes(getattr(writer, "add_scalar", None), "tag", 0.0, 0):
            return lambda points, step: [writer.add_scalar(*one[:3]) for one in points]
        if _takes(getattr(writer, "log", None), {}, step=0):
            return lambda points, step: _log(writer, points, step)
        if _takes(getattr(writer, "log_metrics", None), {}, step=0):
            run = _run_of(writer)
            return lambda points, step: writer.log_metrics(_in_folders(points), step=step, **run)
    kind = f"the class {writer.__name__}" if isinstance(writer, type) else type(writer).__name__
    raise ConfigError(
        f"hvd.log_to({kind}): it has neither add_scalar(tag, value, step) nor log(numbers, step=...) or "
        "log_metrics(numbers, step=...). Pass a torch.utils.tensorboard.SummaryWriter(), a run that "
        "wandb.init() or trackio.init() returns, mlflow, or None."
    )


def _takes(function: Any, *arguments: Any, **named: Any) -> bool:
    """Whether `function` accepts these arguments: a logging.Logger, say, has a method log with other ones."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # a compiled function without a signature
        return True
    return True


def _log(run: Any, points: list[Scalar], step: int) -> None:
    """Log one row of a Weights & Biases run, which drops rows whose step is below the last row's."""
    seen = getattr(run, "step", 0)
    run.log(_numbers_of(points), step=max(step, seen if type(seen) is int else 0))


def _numbers_of(points: list[Scalar]) -> dict[str, float]:
    return {one.tag: one.value for one in points}


def _in_folders(points: list[Scalar]) -> dict[str, float]:
    """The numbers by tag; MLflow's file store cannot have hvd_adpsgd/loss beside hvd_adpsgd/loss/0."""
    return {f"{one.tag}/mean" if one.is_mean else one.tag: one.value for one in points}


def _run_of(writer: Any) -> dict[str, str]:
    """Return the argument run_id of MLflow's active run, which only the thread that started it knows."""
    active = getattr(writer, "active_run", None)
    run: Any = active() if callable(active) else None
    if run is None or not _takes(writer.log_metrics, {}, step=0, run_id=""):
        return {}
    return {"run_id": run.info.run_id}
