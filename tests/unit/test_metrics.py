"""The trace is valid JSON whoever writes; counters and histogram against sums by hand."""

from __future__ import annotations

import json
import math
import multiprocessing
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.engine.metrics import PARTS, TRACKS, Counters, StalenessHistogram, Timeline
from hvd_adpsgd.errors import ConfigError


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
    path, clock = tmp_path / "trace.json", Clock(10.0)
    timeline = Timeline(path, rank=0, clock=clock, origin_s=10.0, create=True, label="node01:0")
    with timeline.span("optimizer", step=3):
        clock.now = 10.25
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
    timeline = Timeline(path, rank=rank, clock=Clock())
    for i in range(count):
        timeline.complete("x" * (i % 97), "engine", i, i + 1, i=i)
    timeline.close()


def test_processes_share_a_file(tmp_path):
    path, count = tmp_path / "trace.json", 1500
    first = Timeline(path, rank=0, clock=Clock(), create=True)
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
    timeline = Timeline(path, rank=0, clock=Clock(), create=True)

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
    timeline = Timeline(path, rank=0, clock=Clock(), create=True)
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
    Timeline(path, rank=0, clock=Clock(), create=True).close()
    assert events(path) == []


def test_values_that_json_does_not_know(tmp_path):
    path = tmp_path / "trace.json"
    with Timeline(path, rank=0, clock=Clock(), create=True) as timeline:
        timeline.complete(
            "e", "trainer", 0, 1, nan=math.nan, inf=np.float32("inf"), n=np.int64(3), t=(1, 2),
            flag=np.bool_(True),
        )  # fmt: skip
        timeline.close()
    assert events(path)[0]["args"] == {
        "nan": "nan", "inf": "inf", "n": 3, "t": "(1, 2)", "flag": True,
    }  # fmt: skip


def test_span_is_kept_when_the_block_raises(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0, clock=Clock(), create=True)
    with pytest.raises(ZeroDivisionError), timeline.span("bad"):
        1 / 0  # noqa: B018
    timeline.close()
    assert [e["name"] for e in events(path)] == ["bad"]


def test_wrong_use(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(ConfigError, match="rank 0 created"):
        Timeline(path, rank=1, clock=Clock())
    with pytest.raises(ConfigError, match=r"HVD_ADPSGD_TIMELINE .* cannot be created"):
        Timeline(tmp_path / "no" / "t.json", rank=0, clock=Clock(), create=True)
    timeline = Timeline(path, rank=0, clock=Clock(), create=True)
    with pytest.raises(ConfigError, match="trainer, engine"):
        timeline.complete("e", "gpu", 0, 1)
    timeline.close()
    with pytest.raises(ConfigError, match="closed"):
        timeline.complete("e", "engine", 0, 1)


# ---- counters


def test_counters_by_hand():
    clock = Clock()
    counters = Counters(clock, decay=0.5)
    assert math.isnan(counters.steps_per_s)
    for optimizer_s in (1.0, 2.0, 4.0):
        with counters.measure("optimizer"):
            clock.now += optimizer_s
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


def test_counters_count_a_part_that_raises():
    clock = Clock()
    counters = Counters(clock)
    with pytest.raises(KeyError), counters.measure("collect"):
        clock.now = 3.0
        raise KeyError
    counters.end_step()
    assert counters.sums["collect"] == 3.0


def test_counters_refuse():
    with pytest.raises(ConfigError, match=", ".join(PARTS)):
        Counters(Clock()).add("forward", 1.0)
    for decay in (-0.1, 1.0, math.nan):
        with pytest.raises(ConfigError, match="decay"):
            Counters(Clock(), decay)


# ---- staleness


@given(st.lists(st.integers(0, 63), max_size=200), st.floats(0, 1))
def test_histogram_against_the_list(values, q):
    histogram = StalenessHistogram(np.bincount(values, minlength=64))
    assert histogram.total == len(values)
    assert sum(histogram.to_dict().values()) == len(values)
    if not values:
        assert math.isnan(histogram.mean)
        assert histogram.quantile(q) is None
        return
    assert histogram.mean == pytest.approx(np.mean(values))
    assert histogram.quantile(q) == np.quantile(values, q, method="inverted_cdf")
    assert histogram.quantile(1.0) == max(values)


def test_histogram_is_a_view():
    counts = np.zeros(64, dtype=np.int64)
    histogram = StalenessHistogram(counts)
    counts[[0, 63]] = 2, 1
    assert histogram.to_dict() == {"0": 2, "63+": 1}
    assert StalenessHistogram([0] * 64).total == 0


def test_histogram_refuses():
    with pytest.raises(ConfigError, match=r"\(63,\)"):
        StalenessHistogram([0] * 63)
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="quantile"):
            StalenessHistogram([0] * 64).quantile(q)
