"""Reports in messages, rates from counters, alerts, and the record: bounded, readable, whole in time."""

import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.tools import report as report_command
from hvd_adpsgd.tools import top
from hvd_adpsgd.watching.alerts import Alerts
from hvd_adpsgd.watching.health import aged, late_after_s
from hvd_adpsgd.watching.record import Record, Run, Track, read
from hvd_adpsgd.watching.reports import REPORT_NBYTES, Report, decode, encode, main_scalar
from hvd_adpsgd.watching.sampler import Sample, Sampler
from hvd_adpsgd.watching.table import rows

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
REPORTS = st.builds(
    Report,
    time_s=st.floats(0, 4e9),
    step=st.integers(0, 2**60),
    steps_per_s=NUMBERS,
    staleness_p50=st.integers(0, 63),
    staleness_p95=st.integers(0, 63),
    distance=NUMBERS,
    exchanges=st.integers(0, 2**60),
    apart_s=NUMBERS,
    apart_steps=st.integers(0, 2**40),
    offer=st.floats(0, 1),
    left_out=st.integers(0, 2**40),
    share=NUMBERS,
    idle_s=NUMBERS,
    longest_idle_s=NUMBERS,
    bits=st.sampled_from((0, 4, 8, 16)),
    scalars=st.dictionaries(st.text(max_size=40), NUMBERS, max_size=20),
)


@given(REPORTS)
def test_any_report_fits_and_comes_back(report: Report) -> None:
    data = encode(report)
    back = decode(data)
    assert len(data) <= REPORT_NBYTES and back is not None
    for name in ("time_s", "step", "exchanges", "staleness_p95"):
        assert getattr(back, name) == getattr(report, name)
    assert abs(back.offer - report.offer) <= 0.005 + 1e-9 and back.inner_allreduce == 0
    assert back.left_out == min(report.left_out, 2**32 - 1)
    if math.isfinite(report.distance) and abs(report.distance) < 1e38:
        assert back.distance == pytest.approx(report.distance, rel=1e-6, abs=1e-40)


def test_scalars_that_do_not_fit_are_left_out_whole() -> None:
    scalars = {f"a_scalar_with_a_name_{k}": float(k) for k in range(20)}
    back = decode(encode(Report(scalars=scalars)))
    assert back is not None and 3 <= len(back.scalars) < 20
    assert all(scalars[name] == value for name, value in back.scalars.items())
    assert "a_scalar_with_a_name_0" in back.scalars, "the first names go first"


@given(st.binary(max_size=REPORT_NBYTES))
def test_any_bytes_are_a_report_or_none(data: bytes) -> None:
    decode(data)


def test_a_report_that_is_cut_off_is_none() -> None:
    whole = encode(Report(scalars={"loss": 1.0}))
    assert decode(whole) is not None
    assert decode(whole[:-1]) is None and decode(whole[:10]) is None and decode(b"") is None
    assert decode(b"\x01" + whole[1:]) is None, "another form"


def test_the_loss_is_found_by_its_name() -> None:
    assert main_scalar(Report(scalars={"lr": 0.1, "train_loss": 2.0})) == ("train_loss", 2.0)
    assert main_scalar(Report(scalars={"val_loss": 3.0, "loss": 2.0})) == ("loss", 2.0)
    assert main_scalar(Report(scalars={"lr": 0.1})) is None


def counters(
    exchanges: int, square: float, ages: Mapping[int, int] = {}, **more: Any
) -> dict[str, Any]:
    staleness = [ages.get(k, 0) for k in range(64)]
    return {
        "exchanges_active": exchanges, "exchanges_passive": 0, "means": 0, "mean_square": 0.0,
        "compared": exchanges, "square": square, "bytes_sent": 1000 * exchanges,
        "staleness": staleness, **more,
    }  # fmt: skip


def test_rates_are_those_of_the_last_seconds() -> None:
    sampler = Sampler(4)
    for second in range(31):  # 5 steps/s and 2 exchanges/s; from second 20 on twice that
        fast = max(0, second - 20)
        exchanges = 2 * (second + fast)
        sample = Sample(
            100.0 + second,
            5 * (second + fast),
            {"offer": 0.1 * second, "global_operations": 0.25 * second},
            counters(exchanges, 6.0 * exchanges, {1: 10 * second, 7: second}),
        )
        report = sampler.report(sample, time_s=second)
    assert report.steps_per_s == pytest.approx(10)
    assert report.exchanges_per_s == pytest.approx(4)
    assert report.sent_per_s == pytest.approx(4000)
    assert report.offer == pytest.approx(0.1)
    assert report.global_operations == pytest.approx(0.25)
    assert (report.staleness_p50, report.staleness_p95) == (1, 7)
    assert report.distance == pytest.approx(1.5)
    assert report.apart_s == 0


def test_time_and_steps_since_the_last_exchange() -> None:
    sampler = Sampler(2)
    for second in range(21):
        now = counters(min(second, 5), 1.0)
        report = sampler.report(Sample(second, 3 * second, {}, now), time_s=0.0)
    assert (report.apart_s, report.apart_steps) == (15, 45)


def test_the_first_report_and_one_without_an_engine() -> None:
    first = Sampler(2).report(Sample(1.0, 3, {}, counters(0, 0.0)), time_s=7.0)
    assert math.isnan(first.steps_per_s) and math.isnan(first.distance) and first.step == 3
    alone = Sampler(1)
    alone.report(Sample(1.0, 0, {}), time_s=7.0)
    assert alone.report(Sample(2.0, 4, {}), time_s=8.0).steps_per_s == pytest.approx(4)


def test_counters_of_a_new_engine_start_anew() -> None:
    sampler = Sampler(2)
    sampler.report(Sample(0.0, 100, {}, counters(50, 1.0)), time_s=0.0)
    first = sampler.report(Sample(1.0, 101, {}, counters(0, 0.0)), time_s=1.0)
    assert math.isnan(first.exchanges_per_s) and first.apart_s == 0
    assert sampler.report(Sample(2.0, 103, {}, counters(4, 0.0)), 2.0).exchanges_per_s == 4


FINE = Report(steps_per_s=10.0, distance=1.0, scalars={"loss": 2.0})


def told(
    seconds: int, reports: Any, alive: Any = (0, 1, 2), every: int = 1
) -> list[tuple[int, str, int | None]]:
    """(second, kind, about) of the alerts of a run of so many seconds; `reports` by second."""
    alerts = Alerts(["a", "b", "c"])
    return [
        (second, alert.kind, alert.about)
        for second in range(0, seconds, every)
        for alert in alerts.check(float(second), reports(second), alive)
    ]


def test_nothing_is_told_of_a_run_that_is_well() -> None:
    assert told(1200, lambda s: dict.fromkeys(range(3), FINE), every=5) == []


def test_a_slow_one_is_told_once_after_a_while() -> None:
    slow = replace(FINE, steps_per_s=4.0)
    assert told(200, lambda s: {0: FINE, 1: FINE, 2: slow}) == [(30, "slow", 2)]
    assert told(200, lambda s: {0: FINE, 1: FINE, 2: slow if s % 20 else FINE}) == []
    assert told(200, lambda s: {0: FINE, 1: FINE, 2: slow}, alive=(0, 1)) == [], "it is suspect"


class Watched:
    """Three super learners whose trainers make steps of a second, in reports as their leaders send them.

    Args:
        begins: by super_rank, the second of the first step of a trainer; else 1.
        still: (super_rank, first second, end) of times in which a trainer makes no step.
        waits: those in which it also says that it waits, or has asked for a pause.
        mute: those in which no report arrives.
    """

    def __init__(self, *still: Any, waits: Any = (), mute: Any = (), begins: Any = None):
        self._still, self._waits, self._mute = (*still, *waits), waits, mute
        self._begins = begins or {}
        self._samplers = [Sampler(3) for _ in range(3)]
        self._steps, self._heard = [0, 0, 0], [0, 0, 0]
        self.reports: dict[int, Report] = {}

    def at(self, s: int) -> dict[int, Report]:
        """The reports of all, as another leader knows them at second s; call it for each second."""
        for i in range(3):
            self._steps[i] += s >= self._begins.get(i, 1) and not within(self._still, i, s)
            if within(self._mute, i, s):
                continue
            self._heard[i] = s
            sample = Sample(
                float(s), self._steps[i], {}, steps=self._steps[i], waits=within(self._waits, i, s)
            )
            sent = decode(encode(self._samplers[i].report(sample, time_s=float(s))))
            assert sent is not None
            self.reports[i] = sent
        late_s = late_after_s(1.0, 3)
        return {i: aged(r, s - self._heard[i], late_s) for i, r in self.reports.items()}


def within(times: Any, i: int, s: int) -> bool:
    return any(i == who and begin <= s < end for who, begin, end in times)


HUNG_1 = [("hung", 1)]
HANGS = {  # a run, and what is reported of it
    "hangs": (lambda: Watched((1, 100, 5000)), HUNG_1),
    # with the GIL held, or a GPU that never answers the thread that reports
    "sends no reports": (lambda: Watched(mute=[(1, 100, 5000)]), HUNG_1),
    "two of three hang": (lambda: Watched((1, 100, 5000), (2, 300, 5000)), [*HUNG_1, ("hung", 2)]),
    "the others wait for it": (
        lambda: Watched((1, 100, 5000), waits=[(0, 110, 5000), (2, 110, 5000)]), HUNG_1),
    "evaluates alone, in every 360 s": (
        lambda: Watched(*[(1, s, s + 120) for s in range(300, 3600, 360)]), HUNG_1),
    "pauses": (lambda: Watched(waits=[(1, 100, 900)]), []),
    "all evaluate": (lambda: Watched((0, 100, 250), (1, 100, 255), (2, 100, 252)), []),
    "evaluates for longer": (lambda: Watched((0, 100, 160), (1, 100, 210), (2, 100, 165)), []),
    "took as long before": (lambda: Watched((0, 100, 130), (1, 140, 170), (1, 300, 355)), []),
    "long steps": (lambda: Watched(*[(1, s, s + 8) for s in range(20, 900, 9)]), []),
    "compiles": (lambda: Watched(begins={0: 200, 1: 500}), []),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGS)
def test_trainers_that_hang_are_reported_once_within_a_minute_and_no_others(case: str) -> None:
    run, expected = HANGS[case]
    alerts = told(3600 if "every" in case else 950, run().at)
    assert [(kind, about) for _, kind, about in alerts if expected or kind == "hung"] == expected
    assert case not in ("hangs", "sends no reports") or 140 <= alerts[0][0] <= 160


def test_the_table_shows_a_hung_trainer() -> None:
    run = Watched((1, 100, 5000))
    for second in range(150):
        run.at(second)
    shown = Run({i: Track(f"h{i}", [r]) for i, r in run.reports.items()})
    assert [(row.state, row.since_s) for row in rows(shown, 150.0)][:2] == [("ok", 0), ("HUNG", 51)]


def test_one_without_an_exchange_for_a_minute() -> None:
    def apart(s: int, due: float = 1.0) -> dict[int, Report]:
        return {0: FINE, 1: replace(FINE, apart_s=float(s), apart_steps=10 * s, due_steps=due)}

    assert told(100, apart) == [(60, "apart", 1)]
    assert told(100, lambda s: apart(s, due=1000)) == [], "the strategy asks for no more"
    assert told(100, lambda s: {1: apart(s)[1]}) == [], "it is the only one"


def test_one_that_does_not_answer_is_told_once_after_a_minute() -> None:
    alerts = Alerts(["a", "b", "c"])
    found = [
        (second, alert.kind, alert.about)
        for second in range(100, 300)
        for alert in alerts.check(float(second), {0: FINE}, {0, 1}, {2: 105.0})
    ]
    assert found == [(165, "silent", 2)]


@pytest.mark.parametrize(
    ("steps", "chunks", "cause"),
    [(750, 0, "not finite after 750"), (0, 3, "3 chunks of its"), (5, 0, "its network")],
)
def test_why_there_is_no_exchange(steps: int, chunks: int, cause: str) -> None:
    bad = replace(FINE, apart_s=75.0, apart_steps=812, nonfinite_steps=steps, left_out=chunks)
    found = Alerts(["a", "b"]).check(0.0, {0: FINE, 1: bad}, {0, 1})
    (text,) = [alert.text for alert in found if alert.kind == "apart"]
    assert cause in text and ("network" in cause or "network" not in text)


def test_huge_losses_do_not_end_the_alerts() -> None:
    huge = replace(FINE, scalars={"loss": sys.float_info.max})
    assert told(300, lambda s: dict.fromkeys(range(3), huge)) == []


def test_what_is_over_may_be_told_again() -> None:
    bad = replace(FINE, global_operations=0.7)
    found = told(1000, lambda s: {0: bad if s < 40 or s > 600 else FINE, 1: FINE})
    assert found == [(30, "operations", 0), (631, "operations", 0)]
    assert told(100, lambda s: {0: bad if s < 25 else FINE, 1: FINE}) == [], "how a run begins"


def test_chunks_that_are_never_averaged() -> None:
    assert told(3, lambda s: {0: replace(FINE, left_out=2), 1: FINE}) == [(0, "left_out", 0)]


@pytest.mark.parametrize(
    ("rise", "fall", "finds"), [(4.0, 0.0, True), (2.0, 0.0, False), (4.0, 0.5, False)]
)
def test_models_drift_apart_while_the_loss_is_flat(rise: float, fall: float, finds: bool) -> None:
    def reports(s: int) -> dict[int, Report]:
        late = s > 300
        one = replace(FINE, distance=rise if late else 1.0, scalars={"loss": 2.0 - fall * late})
        return {0: one, 1: one}

    found = told(900, reports, every=5)
    assert [(kind, about) for _, kind, about in found] == [("drifting", None)] * finds
    assert told(900, lambda s: {0: replace(reports(s)[0], scalars={})}) == [], "nothing is logged"


def recorded(folder: Path, n: int = 2, seconds: int = 30, **how: Any) -> None:
    """A record of n super learners; the last one fails in the middle."""
    for i in range(n):
        record = Record(folder, i, **how)
        record.write("start", time_s=0.0, name=f"host{i}, learner {i}", every_s=1.0)
        for s in range(seconds if i < n - 1 else seconds // 2):
            report = replace(FINE, time_s=float(s), step=10 * s, scalars={"loss": 1 / (s + 1)})
            record.report(i, report, peers={str((i + 1) % n): s}, staleness={"1": 5 * s})
        record.close()
    record = Record(folder, 0)
    record.write("event", time_s=seconds / 2, event="failed", about=n - 1, text="failed")
    record.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    recorded(tmp_path)
    run = read(tmp_path)
    assert [len(track.reports) for track in run.tracks.values()] == [30, 15]
    assert run.tracks[0].name == "host0, learner 0"
    assert run.tracks[0].reports[-1].scalars == {"loss": 1 / 30}
    assert run.tracks[0].tables == {"peers": {1: 29}, "staleness": {1: 145}}
    assert [event.what for event in run.events] == ["start", "start", "failed"]


def test_reports_become_rarer_as_the_run_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_adpsgd.watching.record._REPORTS", 100)
    record = Record(tmp_path, 0, every_s=1.0)
    for s in range(2000):
        record.thin(float(s))
        record.report(0, replace(FINE, time_s=float(s)))
    record.close()
    times = [report.time_s for report in read(tmp_path).tracks[0].reports]
    assert times[:100] == list(range(100)) and times[-1] > 1980
    assert len(times) < 100 * (1 + math.log(2000 / 100)) + 20


def test_not_finite_numbers_are_json_and_come_back(tmp_path: Path) -> None:
    record = Record(tmp_path, 0)
    record.report(0, Report(time_s=1.0, scalars={"loss": math.nan, "lr": math.inf, "x": -math.inf}))
    record.close()
    json.loads((tmp_path / "0.jsonl").read_text(), parse_constant=lambda text: pytest.fail(text))
    scalars = read(tmp_path).tracks[0].reports[0].scalars
    assert math.isnan(scalars["loss"])
    assert (scalars["lr"], scalars["x"]) == (math.inf, -math.inf)


def test_reports_of_others_count_where_they_have_no_file(tmp_path: Path) -> None:
    record = Record(tmp_path, 0)
    record.report(1, replace(FINE, time_s=1.0, step=7))
    record.close()
    assert read(tmp_path).tracks[1].reports[0].step == 7
    own = Record(tmp_path, 1)
    own.report(1, replace(FINE, time_s=1.0, step=8))
    own.close()
    assert [report.step for report in read(tmp_path).tracks[1].reports] == [8]


def noted(folder: Path, writer: int, *changes: tuple[float, str]) -> None:
    """Events about super learner 2 in the file of a leader."""
    record = Record(folder, writer)
    for time_s, what in changes:
        record.write("event", time_s=time_s, event=what, about=2, text=what)
    record.close()


def test_what_several_leaders_note_is_one_event(tmp_path: Path) -> None:
    noted(tmp_path, 0, (10.0, "suspect"), (11.0, "alive"), (12.0, "suspect"), (50.0, "failed"))
    noted(tmp_path, 1, (10.2, "suspect"), (11.1, "alive"), (12.1, "suspect"), (52.0, "failed"))
    noted(tmp_path, 3, (10.3, "suspect"), (11.2, "alive"), (11.9, "suspect"), (58.0, "failed"))
    assert [event.time_s for event in read(tmp_path).events] == [10.0, 11.0, 11.9, 50.0, 58.0]


@pytest.mark.parametrize("newest", [None, 1000])
def test_super_learners_of_an_earlier_larger_run_are_dropped(
    tmp_path: Path, newest: int | None
) -> None:
    for size, began_s in ((4, 0.0), (2, 1000.0)):
        for i in range(size):
            record = Record(tmp_path, i)
            record.write(
                "start", time_s=began_s, super_learner=i, super_size=size, averaging=str(size)
            )
            for s in range(20):
                record.report(i, replace(FINE, time_s=began_s + s))
            record.close()
    run = read(tmp_path, newest)
    assert list(run.tracks) == [0, 1] and run.about["super_size"] == 2
    assert [row.super_learner for row in rows(run, 1020.0)] == [0, 1]
    assert newest or run.about["averaging"] == "2", "of the newest start, not of the last file"


def test_a_super_learner_that_is_replaced_is_joining(tmp_path: Path) -> None:
    record = Record(tmp_path, 1)
    record.write("event", time_s=5.0, event="failed", about=1, text="")
    record.write("start", time_s=10.0, joining=True, name="b")
    for s in range(20):
        record.report(1, replace(FINE, time_s=10.0 + s))
    assert [row.state for row in rows(read(tmp_path), 30.0)] == ["JOINING"]
    assert [row.state for row in rows(read(tmp_path), 60.0)] == ["SILENT"]
    record.write("event", time_s=29.0, event="joined", about=1, text="")
    assert [row.state for row in rows(read(tmp_path), 30.0)] == ["ok"]
    record.close()


def test_the_age_of_a_report_counts_as_time_without_an_exchange(tmp_path: Path) -> None:
    record = Record(tmp_path, 0)
    record.report(0, replace(FINE, time_s=10.0, apart_s=2.0))
    record.close()
    assert rows(read(tmp_path), 50.0)[0].apart_s == 42.0


def test_a_full_disk_ends_the_record_not_the_training(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    record = Record(tmp_path, 0)
    record._file = open("/dev/full", "w")  # noqa: SIM115
    with caplog.at_level(logging.WARNING):
        for k in range(3):
            record.report(0, replace(FINE, time_s=float(k)))
    assert len(caplog.records) == 1 and "training continues" in caplog.text


def test_folders_that_cannot_be_used_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="HVD_ADPSGD_RECORD"):
        Record(tmp_path / "file", 0)
    with pytest.raises(ConfigError, match="no record"):
        read(tmp_path)


def test_rows_say_how_each_is(tmp_path: Path) -> None:
    recorded(tmp_path, n=3)
    run = read(tmp_path)
    assert [row.state for row in rows(run, 30.0)] == ["ok", "ok", "FAILED"]
    assert [row.state for row in rows(run, 300.0)] == ["SILENT", "SILENT", "FAILED"]
    last = run.tracks[1].reports[-1]
    run.tracks[1].reports[-1] = replace(last, steps_per_s=1.0)
    assert [row.state for row in rows(run, 30.0)] == ["ok", "SLOW", "FAILED"]
    assert rows(run, 30.0)[0].loss == 1 / 30


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    recorded(tmp_path)
    assert report_command.main([str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert report_command.main([str(tmp_path), "-o", str(tmp_path / "no" / "x")]) == 2
    before = (tmp_path / "0.jsonl").read_bytes()
    assert report_command.main([str(tmp_path), "-o", str(tmp_path / "0.jsonl")]) == 2
    assert (tmp_path / "0.jsonl").read_bytes() == before
    monkeypatch.setenv("HVD_ADPSGD_RECORD", str(tmp_path))
    capsys.readouterr()
    assert top.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in found["super_learners"]] == ["SILENT", "FAILED"]
    monkeypatch.delenv("HVD_ADPSGD_RECORD")
    assert top.main(["--once"]) == 2
    assert "HVD_ADPSGD_RECORD" in capsys.readouterr().err
