"""The timeline: valid JSON at any time, bounded, and on one clock with other learners'."""

import json
import math
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.training import timeline as marks
from hvd_adpsgd.watching.trace import TRACKS, Timeline


def events(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    listed = found["traceEvents"] if isinstance(found, dict) else found
    return [event for event in listed if event["ph"] == kind]


def old(path: Path) -> Path:
    return path.with_suffix(".old.json")


def test_one_process_in_full(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0, zero_s=1e9, label="node01:0")
    timeline.complete("optimizer", "trainer", 10.0, 10.25, step=3)
    timeline.complete("exchange", "engine", 10.1, 10.3, peer=2, share=0.5)
    timeline.close()
    assert events(path) == [
        {"name": "optimizer", "ph": "X", "pid": 0, "tid": 0, "ts": 1000000010e6, "dur": 250000.0,
         "args": {"step": 3}},
        {"name": "exchange", "ph": "X", "pid": 0, "tid": 1, "ts": 1000000010.1e6, "dur": 200000.0,
         "args": {"peer": 2, "share": 0.5}},
    ]  # fmt: skip
    names = [(e["name"], e["tid"], e["args"].get("name")) for e in events(path, "M")]
    assert names == [
        ("process_name", 0, "node01:0"),
        ("thread_name", 0, "trainer"),
        ("thread_name", 1, "engine"),
        ("process_sort_index", 0, None),
    ]


def test_threads_share_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0)

    def write(track: str) -> None:
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


def test_events_are_buffered_and_flushed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0)
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


def test_a_new_run_replaces_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("earlier")
    old(path).write_text("earlier")
    Timeline(path, rank=0).close()
    assert events(path) == [] and not old(path).exists()


def test_it_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    path, limit = tmp_path / "trace.json", 400_000
    timeline = Timeline(path, rank=0, limit_nbytes=limit)
    largest, count = 0, 256 * 60  # some 70 bytes each
    for i in range(count):
        timeline.complete("e", "trainer", i, i + 1, i=i)
        if i % 256 == 255:
            largest = max(largest, sum(p.stat().st_size for p in tmp_path.iterdir()))
    timeline.close()
    assert limit / 2 < largest <= limit
    kept = [e["args"]["i"] for e in events(old(path)) + events(path)]
    assert kept == list(range(kept[0], count)), "without a gap, up to the newest"
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) > limit / 2 - 40_000
    assert {len(events(p, "M")) for p in (path, old(path))} == {4}, "each opens by itself"


def test_values_that_json_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0)
    timeline.complete(
        "e", "trainer", 0, 1, nan=math.nan, inf=np.float32("inf"), n=np.int64(3), t=(1, 2),
        flag=np.bool_(True),
    )  # fmt: skip
    timeline.close()
    assert events(path)[0]["args"] == {
        "nan": "nan", "inf": "inf", "n": 3, "t": "(1, 2)", "flag": True,
    }  # fmt: skip


def test_a_timeline_that_cannot_be_written_gives_up_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timeline = Timeline("/dev/full", rank=0)
    for i in range(600):
        timeline.complete("e", "trainer", i, i + 1)
    timeline.flush()
    timeline.close()
    (warning,) = caplog.records
    assert "/dev/full ends here, training continues: No space left" in warning.getMessage()


def test_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"HVD_ADPSGD_TIMELINE .* cannot be created"):
        Timeline(tmp_path / "no" / "t.json", rank=0)
    timeline = Timeline(tmp_path / "trace.json", rank=0)
    timeline.close()
    timeline.complete("e", "engine", 0, 1)  # nothing more is written
    assert events(tmp_path / "trace.json") == []


def profiler(name: str) -> Any:
    """torch.profiler.profile, or what it is made of, which imports less."""
    if name == "autograd":
        return torch.autograd.profiler.profile(use_kineto=True)
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@pytest.mark.parametrize("which", ["autograd", pytest.param("torch", marks=pytest.mark.extended)])
def test_marks_are_there_for_a_profiler_and_else_nothing(which: str) -> None:
    record = marks.StepRecord(mock.Mock(config=Config()))
    with profiler(which) as profile, record.part("collect", 0):
        torch.zeros(3).add_(1)
    assert "hvd_adpsgd.collect" in {event.key for event in profile.key_averages()}
    with record.part("offer", 1), mock.patch.object(marks, "record_function", None):
        pass  # nothing is made if no profiler runs
