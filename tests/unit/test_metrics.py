"""The trace is valid JSON whoever writes; counters and histogram against sums by hand."""

from __future__ import annotations

import json
import math
import multiprocessing
import threading

import numpy as np
import pytest

from hvd_adpsgd.engine.metrics import TRACKS, Counters, ExchangeMetrics, Timeline
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.theory.mixing import consensus_from_exchanges


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def events(path, kind="X"):
    return [event for event in json.loads(path.read_text()) if event["ph"] == kind]


# ---- timeline


def test_one_process_in_full(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0, origin_s=10.0, create=True, label="node01:0")
    timeline.complete("optimizer", "trainer", 10.0, 10.25, step=3)
    timeline.complete("exchange", "engine", 10.1, 10.3, peer=2, share=0.5)
    timeline.close()
    assert events(path) == [
        {"name": "optimizer", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 250000.0,
         "args": {"step": 3}},
        {"name": "exchange", "ph": "X", "pid": 0, "tid": 1, "ts": 100000.0, "dur": 200000.0,
         "args": {"peer": 2, "share": 0.5}},
    ]  # fmt: skip
    names = [(e["name"], e["tid"], e["args"].get("name")) for e in events(path, "M")]
    assert names == [
        ("process_name", 0, "node01:0"),
        ("thread_name", 0, "trainer"),
        ("thread_name", 1, "engine"),
        ("process_sort_index", 0, None),
    ]


def write_many(path, rank, count):
    timeline = Timeline(path, rank=rank)
    for i in range(count):
        timeline.complete("x" * (i % 97), "engine", i, i + 1, i=i)
    timeline.close()


def test_processes_share_a_file(tmp_path):
    path, count = tmp_path / "trace.json", 1500
    first = Timeline(path, rank=0, create=True)
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=write_many, args=(path, rank, count)) for rank in (1, 2, 3)]
    for other in others:
        other.start()
    for i in range(count):
        first.complete("y", "trainer", i, i + 1, i=i)
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    first.close()
    for rank in range(4):
        assert [e["args"]["i"] for e in events(path) if e["pid"] == rank] == list(range(count))


def test_threads_share_a_timeline(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0, create=True)

    def write(track):
        for i in range(1000):
            timeline.complete("e", track, i, i, i=i)

    threads = [threading.Thread(target=write, args=(track,)) for track in TRACKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    timeline.close()
    for tid in TRACKS.values():
        assert [e["args"]["i"] for e in events(path) if e["tid"] == tid] == list(range(1000))


def test_events_are_buffered_and_flushed(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0, create=True)
    lines = len(path.read_text().splitlines())
    for i in range(255):
        timeline.complete("e", "trainer", i, i)
    assert len(path.read_text().splitlines()) == lines
    timeline.complete("e", "trainer", 0, 0)
    assert len(path.read_text().splitlines()) == lines + 256
    timeline.complete("e", "trainer", 0, 0)
    timeline.flush()
    assert len(path.read_text().splitlines()) == lines + 257
    assert len(events(path)) == 257  # valid before it is closed
    timeline.close()
    timeline.close()
    assert len(events(path)) == 257


def test_create_empties_an_old_file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    Timeline(path, rank=0, create=True).close()
    assert events(path) == []


def test_values_that_json_does_not_know(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0, create=True)
    timeline.complete(
        "e", "trainer", 0, 1, nan=math.nan, inf=np.float32("inf"), n=np.int64(3), t=(1, 2),
        flag=np.bool_(True),
    )  # fmt: skip
    timeline.close()
    assert events(path)[0]["args"] == {
        "nan": "nan", "inf": "inf", "n": 3, "t": "(1, 2)", "flag": True,
    }  # fmt: skip


def test_a_timeline_that_cannot_be_written_gives_up_with_one_warning(caplog):
    timeline = Timeline("/dev/full", rank=0)
    for i in range(600):
        timeline.complete("e", "trainer", i, i + 1)
    timeline.flush()
    timeline.close()
    (warning,) = caplog.records
    assert "/dev/full ends here, training goes on: No space left" in warning.getMessage()


def test_wrong_use(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(ConfigError, match="rank 0 created"):
        Timeline(path, rank=1)
    with pytest.raises(ConfigError, match=r"HVD_ADPSGD_TIMELINE .* cannot be created"):
        Timeline(tmp_path / "no" / "t.json", rank=0, create=True)
    timeline = Timeline(path, rank=0, create=True)
    timeline.close()
    timeline.complete("e", "engine", 0, 1)  # nothing more is written
    assert events(path) == []


# ---- counters


def test_counters_by_hand():
    clock = Clock()
    counters = Counters(clock, decay=0.5)
    assert math.isnan(counters.steps_per_s)
    for optimizer_s in (1.0, 2.0, 4.0):
        clock.now += optimizer_s
        counters.add("optimizer", optimizer_s)
        counters.add("offer", 0.25)
        counters.add("offer", 0.25)
        clock.now += 1.0
        counters.end_step()
    assert counters.to_dict() == {
        "steps": 3,
        "seconds": 8.0,
        "steps_per_s": 0.25,
        "step_ema_s": 4.0,
        "inner_allreduce_s": 0.0,
        "inner_allreduce_ema_s": 0.0,
        "optimizer_s": 7.0,
        "optimizer_ema_s": 0.5 * (0.5 * 1 + 0.5 * 2) + 0.5 * 4,
        "collect_s": 0.0,
        "collect_ema_s": 0.0,
        "offer_s": 1.5,
        "offer_ema_s": 0.5,
    }


# ---- exchanges


def test_numbers_of_exchanges_by_hand():
    metrics = ExchangeMetrics(4)
    nothing = metrics.read(None)
    assert nothing["exchanges"] == 0 and nothing["peers"] == [] and sum(nothing["staleness"]) == 0
    assert math.isnan(nothing["staleness_mean"]) and math.isnan(nothing["consensus_distance"])
    counters = dict.fromkeys(nothing, 0) | {
        "exchanges_active": 2, "exchanges_passive": 3, "staleness": [1, 0, 3] + [0] * 61,
        "met": [0, 5, 0, 0], "compared": 5, "square": 20.0,
    }  # fmt: skip
    first = metrics.read(counters, 1.5)
    assert first["exchanges"] == 5 and first["staleness_mean"] == 1.5
    assert first["peers"] == [0, 5, 0, 0] and first["engine_cpu_s"] == 1.5
    assert first["consensus_distance"] == consensus_from_exchanges(4.0, 4)
    assert metrics.read(counters)["consensus_distance"] == first["consensus_distance"]
    later = metrics.read({**counters, "compared": 6, "square": 29.0})
    assert later["consensus_distance"] == consensus_from_exchanges(9.0, 4)
    of_all = {**counters, "compared": 0, "means": 1, "mean_square": 0.25}
    assert metrics.read(of_all)["consensus_distance"] == 0.5
