"""hvd.log_to: tags and steps against reports by hand, writers as they are, and those that fail."""

import logging
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.training import watching
from hvd_adpsgd.watching import scalars as logged_scalars
from hvd_adpsgd.watching import writers
from hvd_adpsgd.watching.reports import Report
from hvd_adpsgd.watching.writers import EACH, Outlet, scalars

LONG_S = 30.0
FINE = Report(time_s=1.0, step=10, steps_per_s=4.0, scalars={"loss": 2.0})
TWO = {0: FINE, 1: replace(FINE, step=30, steps_per_s=8.0, scalars={"loss": 1.0, "lr": 0.5})}


class TensorBoard:
    """add_scalar with the signature of torch's SummaryWriter."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int | None]] = []

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: Any = None
    ) -> None:
        self.points.append((tag, scalar_value, global_step))


class WandbRun:
    """log and step of a wandb Run: a row below a step that it has seen is dropped."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: dict[int, dict[str, Any]] = {}

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        at = self.step if step is None else step
        if at >= self.step:
            self.rows.setdefault(at, {}).update(data)
            self.step = at + (step is None or bool(commit))


class Full:
    """A writer whose disk is full."""

    def __init__(self) -> None:
        self.calls = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.calls += 1
        raise OSError("no space left on device")


def test_each_super_learner_and_the_means() -> None:
    found = {one.tag: (one.value, one.step) for one in scalars(TWO, TWO[0])}
    assert found["hvd_adpsgd/loss/0"] == (2.0, 10) and found["hvd_adpsgd/loss/1"] == (1.0, 30)
    assert found["hvd_adpsgd/loss"] == (1.5, 10), "the mean, at the step of who sends"
    assert found["hvd_adpsgd/lr"] == (0.5, 10), "of those that log it"
    assert found["hvd_adpsgd/steps_per_s"] == (6.0, 10)
    assert found["hvd_adpsgd/super_learners"] == (2.0, 10)
    assert not any("distance" in tag for tag in found), "it is not known yet"


def test_a_loss_that_is_not_finite_is_shown_and_a_measured_number_keeps_its_name() -> None:
    reports = {0: replace(FINE, scalars={"loss": math.nan, "step": 3.0})}
    found = {one.tag: one.value for one in scalars(reports, FINE)}
    assert math.isnan(found["hvd_adpsgd/loss/0"]) and math.isnan(found["hvd_adpsgd/loss"])
    assert found["hvd_adpsgd/step/0"] == 10


def test_of_many_super_learners_only_the_means() -> None:
    tags = [one.tag for one in scalars(dict.fromkeys(range(EACH + 1), FINE), FINE)]
    assert "hvd_adpsgd/loss" in tags and not any(tag.endswith("/0") for tag in tags)
    tags = [one.tag for one in scalars(dict.fromkeys(range(EACH), FINE), FINE)]
    assert f"hvd_adpsgd/loss/{EACH - 1}" in tags


@pytest.mark.parametrize(("logged", "step"), [({"step": 7}, 7), ({}, 0), ({"step": math.nan}, 0)])
def test_with_one_super_learner_the_script_counts_steps(
    monkeypatch: pytest.MonkeyPatch, logged: dict[str, float], step: int
) -> None:
    monkeypatch.setattr(logged_scalars, "_scalars", {})
    logged_scalars.log(**logged)
    assert watching._sample(None, None).step == step


@pytest.mark.extended
def test_tensorboard_reads_what_was_sent(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    outlet = Outlet(writer, 0.0)
    for step in (1, 2, 3):
        outlet.send(step, {0: replace(FINE, step=step, scalars={"loss": 1 / step})}, 0, {0})
    writer.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    points = [(one.step, one.value) for one in read.Scalars("hvd_adpsgd/loss/0")]
    assert points == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]


def test_a_run_of_wandb_gets_rows() -> None:
    run = WandbRun()
    outlet = Outlet(run, 0.0)
    outlet.send(0.0, TWO, 0, {0, 1})
    assert run.rows[10]["hvd_adpsgd/loss/1"] == 1.0 and run.rows[10]["hvd_adpsgd/step/1"] == 30
    run.log({"mine": 1}, step=17)
    outlet.send(1.0, dict(TWO), 0, {0, 1})
    assert run.rows[17] == {**run.rows[10], "mine": 1}, "it is not dropped"


def test_other_objects_are_errors() -> None:
    wrong = [logging.getLogger(), object(), "runs", TensorBoard, WandbRun, print, {"log": 1}]
    for writer in wrong:
        with pytest.raises(ConfigError, match=r"add_scalar\(tag, value, step\).*Pass a"):
            Outlet(writer, 1.0)
    for seconds in (-1, math.nan, math.inf, "10", None):
        with pytest.raises(ConfigError, match="every_s"):
            Outlet(TensorBoard(), seconds)  # type: ignore[arg-type]


def test_a_writer_that_raises_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    writer = Full()
    outlet = Outlet(writer, 0.0)
    with caplog.at_level(logging.WARNING):
        for now in range(3):
            outlet.send(float(now), dict(TWO), 0, {0, 1})
    (record,) = caplog.records
    assert "Full raises OSError (no space left on device)" in record.getMessage()
    assert writer.calls == 1


def test_it_is_sent_now_and_then_and_at_the_end() -> None:
    writer = TensorBoard()
    outlet = Outlet(writer, 10.0)
    sent = []
    for now, last in [(0.0, False), (9.9, False), (10.0, False), (10.1, True), (10.2, True)]:
        reports = TWO if now > 10.0 else dict(TWO)
        outlet.send(now, reports, 0, {0, 1}, last=last)
        sent.append(len(writer.points))
    one = sent[0]
    assert sent == [one, one, 2 * one, 3 * one, 3 * one], "the same reports are sent once"


def test_super_learners_that_are_gone_are_not_in_the_means() -> None:
    writer = TensorBoard()
    Outlet(writer, 0.0).send(0.0, TWO, 0, {0})
    assert ("hvd_adpsgd/loss", 2.0, 10) in writer.points
    assert not any(tag.endswith("/1") for tag, _, _ in writer.points)
    Outlet(writer, 0.0).send(0.0, TWO, 0, {0, 1})
    assert ("hvd_adpsgd/loss/1", 1.0, 30) in writer.points


def test_close_waits_for_the_call_under_way() -> None:
    inside, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    class Slow(TensorBoard):
        def add_scalar(self, *arguments: Any, **named: Any) -> None:
            inside.set()
            assert go_on.wait(LONG_S)
            order.append("sent")

    def close() -> None:
        outlet.close()
        order.append("closed")

    outlet = Outlet(Slow(), 0.0)
    sender = threading.Thread(target=outlet.send, args=(0.0, TWO, 0, {0, 1}))
    closer = threading.Thread(target=close)
    sender.start()
    assert inside.wait(LONG_S)
    closer.start()
    closer.join(0.2)  # time to be wrong
    go_on.set()
    closer.join(LONG_S)
    sender.join(LONG_S)
    assert order[0] == "sent" and order[-1] == "closed"
    outlet.send(1.0, dict(TWO), 0, {0, 1})
    assert order[-1] == "closed", "nothing more is sent"


def test_a_new_writer_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_outlet", None)
    first, second = TensorBoard(), TensorBoard()
    writers.log_to(first, every_s=0)
    old = writers._outlet
    writers.log_to(second, every_s=0)
    new = writers._outlet
    assert old is not None and new is not None
    for outlet in (old, new):
        outlet.send(0.0, TWO, 0, {0, 1})
    assert not first.points and second.points
    with pytest.raises(ConfigError):
        writers.log_to("runs")
    assert writers._outlet is new, "a wrong one changes nothing"
    writers.log_to(None)
    assert writers._outlet is None


class MLflow:
    """log_metrics as a module's function; the active run belongs to the thread that started it."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str | None, int | None], dict[str, float]] = {}
        self._thread = threading.get_ident()

    def active_run(self) -> Any:
        here = threading.get_ident() == self._thread
        return SimpleNamespace(info=SimpleNamespace(run_id="7")) if here else None

    def log_metrics(
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
    ) -> None:
        self.rows[run_id, step] = metrics


class Logger:
    """As Lightning's: no run."""

    def __init__(self) -> None:
        self.rows: dict[int | None, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows[step] = metrics


def test_log_metrics_gets_the_numbers_and_the_run_of_the_script() -> None:
    run, logger = MLflow(), Logger()
    outlets = [Outlet(run, LONG_S), Outlet(logger, LONG_S)]
    sending = threading.Thread(target=lambda: [o.send(1.0, TWO, 0, (0, 1)) for o in outlets])
    sending.start()
    sending.join(60)
    for row in (run.rows["7", 10], logger.rows[10]):
        assert row["hvd_adpsgd/loss/mean"] == 1.5 and row["hvd_adpsgd/loss/1"] == 1.0
        folders = {tag.rpartition("/")[0] for tag in row}
        assert not folders & set(row), "no file can be a folder, too"
