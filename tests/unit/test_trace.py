"""The timeline: valid JSON at any time, bounded, and merged with other traces on one clock."""

from __future__ import annotations

import gzip
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.tools import timeline as command
from hvd_adpsgd.training import timeline as marks
from hvd_adpsgd.watching.trace import TRACKS, Timeline, learner_path, merge


def events(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    listed = found["traceEvents"] if isinstance(found, dict) else found
    return [event for event in listed if event["ph"] == kind]


def old(path: Path) -> Path:
    return path.with_suffix(".old.json")


# ---- one learner --------------------------------------------------------------------------------


def test_one_process_in_full(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path, rank=0, origin_s=10.0, unix_s=1e9, job=7.0, label="node01:0")
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
        ("hvd_adpsgd", 0, None),
        ("process_name", 0, "node01:0"),
        ("thread_name", 0, "trainer"),
        ("thread_name", 1, "engine"),
        ("process_sort_index", 0, None),
    ]
    assert events(path, "M")[0]["args"] == {"unix_s": 1e9, "job": 7.0}


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


def test_a_learner_that_replaces_another_keeps_its_records(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for name, continues in (("failed", False), ("new", True)):
        timeline = Timeline(path, rank=0, continues=continues)
        timeline.complete(name, "trainer", 0, 1)
        timeline.close()
    assert [e["name"] for e in events(old(path)) + events(path)] == ["failed", "new"]


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
    assert {len(events(p, "M")) for p in (path, old(path))} == {5}, "each opens by itself"


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


# ---- marks --------------------------------------------------------------------------------------


def profiler(name: str) -> Any:
    """torch.profiler.profile, or what it is made of, which imports less."""
    if name == "autograd":
        return torch.autograd.profiler.profile(use_kineto=True)
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@pytest.mark.parametrize("which", ["autograd", pytest.param("torch", marks=pytest.mark.extended)])
def test_marks_are_there_for_a_profiler_and_else_nothing(which: str) -> None:
    assert marks.mark("collect") is marks.mark("offer"), "nothing is made if no profiler runs"
    with profiler(which) as profile, marks.mark("collect"):
        torch.zeros(3).add_(1)
    assert "hvd_adpsgd.collect" in {event.key for event in profile.key_averages()}
    assert marks.mark("collect") is marks.mark("offer")


# ---- merging ------------------------------------------------------------------------------------


def written(folder: Path, rank: int, *, unix_s: float = 1e9, job: float = 5.0, n: int = 3) -> Path:
    """The timeline of a learner with an event per second of its clock, which begins at 100."""
    path = learner_path(folder / "trace.json", rank)
    timeline = Timeline(path, rank=rank, origin_s=100.0, unix_s=unix_s, job=job)
    for i in range(n):
        timeline.complete(f"e{i}", "trainer", 100.0 + i, 100.5 + i)
    timeline.close()
    return path


def event(**fields: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 77, "tid": 1, "name": "x", "dur": 1.0, **fields}


def profile(folder: Path, name: str, **content: Any) -> Path:
    """A trace as torch's profiler exports it, whose time 0 is the unix time 1 s."""
    text = json.dumps({"baseTimeNanoseconds": 10**9, **content})
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_all_learners_on_one_clock(tmp_path: Path) -> None:
    for rank in range(3):
        written(tmp_path, rank, unix_s=1e9 + 0.25 * rank)
    output = tmp_path / "merged.json"
    merged = merge([tmp_path], output)
    assert merged.learners == (0, 1, 2) and merged.events == 9 and not merged.left_out
    found = {(e["pid"], e["name"]): e["ts"] for e in events(output)}
    assert found == {(r, f"e{i}"): 1e6 * i + 250e3 * r for r in range(3) for i in range(3)}
    names = [e["args"]["name"] for e in events(output, "M") if e["name"] == "process_name"]
    assert names == ["learner 0", "learner 1", "learner 2"]
    assert merge([tmp_path], output).events == 9, "the output is none of its sources"


def test_old_records_and_a_line_that_is_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path, 0)
    timeline = Timeline(path, rank=0, origin_s=100.0, unix_s=1e9 + 10, continues=True)
    timeline.complete("late", "trainer", 100.0, 101.0)
    timeline.close()
    with open(path, "r+") as file:
        file.truncate(path.stat().st_size - 20)
    written(tmp_path, 1)
    merge([tmp_path / "trace.0.json", old(path), tmp_path / "trace.1.json"], tmp_path / "m")
    assert sorted(e["name"] for e in events(tmp_path / "m")) == ["e0", "e0", "e1", "e1", "e2", "e2"]


def test_an_earlier_launch_and_other_files_are_left_out(tmp_path: Path) -> None:
    for rank in range(2):
        written(tmp_path, rank, job=6.0)
    earlier = written(tmp_path, 2, job=5.0)
    (tmp_path / "other.json").write_text('{"loss": 3}')
    (tmp_path / "broken.json").write_text("[")
    merged = merge([tmp_path], tmp_path / "m.json")
    assert merged.learners == (0, 1)
    assert set(merged.left_out) == {earlier, tmp_path / "other.json", tmp_path / "broken.json"}


def test_a_profile_beside_the_learners(tmp_path: Path) -> None:
    """The marks of a profile lie where the timeline of the same process has the parts."""
    unix_s, origin_s = time.time(), time.monotonic()
    timeline = Timeline(
        tmp_path / "trace.0.json", rank=0, origin_s=origin_s, unix_s=unix_s, job=1.0
    )
    with profiler("autograd") as profile:
        for _ in range(3):
            began = time.monotonic()
            with marks.mark("collect"):
                torch.ones(100_000).sum()
            timeline.complete("collect", "trainer", began, time.monotonic())
    timeline.close()
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    merged = merge([tmp_path], tmp_path / "all.json")
    assert merged.profiles == (tmp_path / "profile.json",) and merged.learners == (0,)
    found = events(tmp_path / "all.json")
    ours = [e["ts"] for e in found if e["name"] == "collect"]
    seen = [e["ts"] for e in found if e["name"] == "hvd_adpsgd.collect"]
    assert len(ours) == len(seen) == 3
    assert max(abs(a - b) for a, b in zip(ours, seen, strict=True)) < 50e3, "microseconds"
    assert {e["pid"] for e in found if e["name"] == "hvd_adpsgd.collect"}.isdisjoint({0})


def test_arrows_of_two_profiles_are_kept_apart(tmp_path: Path) -> None:
    for k in range(2):
        arrow = {"ph": "s", "id": 3, "pid": 77, "tid": 1, "ts": 1.0, "name": "x"}
        name = {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}}
        content = {"baseTimeNanoseconds": 10**18 + 1000 * k, "traceEvents": [name, arrow]}
        (tmp_path / f"{k}.json").write_text(json.dumps(content))
    merge([tmp_path], tmp_path / "m")
    first, second = events(tmp_path / "m", "s")
    assert first["id"] != second["id"] and first["pid"] != second["pid"]
    assert (first["ts"], second["ts"]) == (1.0, 2.0)
    names = [e["args"]["name"] for e in events(tmp_path / "m", "M")]
    assert names == ["0: python", "1: python"]


def test_the_output_is_none_of_the_traces(tmp_path: Path) -> None:
    path = written(tmp_path, 0)
    linked = tmp_path / "linked.json"
    linked.symlink_to(path)
    before = path.read_bytes()
    for paths, output in [([path], path), ([path], linked), ([tmp_path], path), ([linked], path)]:
        with pytest.raises(ConfigError, match="would replace one of the traces"):
            merge(paths, output)
    assert path.read_bytes() == before
    linked.unlink()
    merge([tmp_path], tmp_path / "m.json")
    assert merge([tmp_path], tmp_path / "m.json").left_out == (), "an earlier merge is replaced"
    assert merge([tmp_path], tmp_path / "n").left_out == (tmp_path / "m.json",)


def test_an_output_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, 0)
    output = tmp_path / "m.json"
    output.write_text("before")

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(ConfigError, match="No space left"):
            merge([tmp_path], output)
    assert output.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["m.json", "trace.0.json"]


def test_a_profile_in_gzip(tmp_path: Path) -> None:
    for number in range(2):
        profile(tmp_path, f"{number}.json.gz", traceEvents=[event(name="x", ts=1.5)])
    merged = merge([tmp_path], tmp_path / "m")
    assert [path.name for path in merged.profiles] == ["0.json.gz", "1.json.gz"]
    assert [e["ts"] for e in events(tmp_path / "m")] == [1.5, 1.5]
    cut = tmp_path / "0.json.gz"
    cut.write_bytes(cut.read_bytes()[:-12])
    assert merge([tmp_path], tmp_path / "m").left_out == (cut,)


DEEP = "[" * 100_000
HEAD = '[\n{"name":"hvd_adpsgd","ph":"M","pid":0,"tid":0,"args":{"unix_s":%s,"job":%s}},\n'
NO_TRACES = {
    "late": HEAD % ("1e400", "5"),
    "nan": HEAD % ("NaN", "5"),
    "text": HEAD % ('"soon"', "5"),
    "job": HEAD % ("1e9", "[]"),
    "rank": (HEAD % ("1e9", "5")).replace('"pid":0', '"pid":1e400'),
    "deep": DEEP,
    "deep_head": HEAD % (DEEP[:900], "5"),
    "no_events": '{"baseTimeNanoseconds": 1}',
    "events": '{"baseTimeNanoseconds": 1, "traceEvents": 3}',
    "time": '{"baseTimeNanoseconds": 1e400, "traceEvents": []}',
    "huge": '{"baseTimeNanoseconds": 1%s, "traceEvents": []}' % ("0" * 400),
    "clock": '{"traceEvents": [3, {"ph": "X"}, {"ph": "X", "ts": "1"}]}',
}


@pytest.mark.parametrize("text", NO_TRACES.values(), ids=NO_TRACES)
def test_one_file_that_is_no_trace_is_left_out_and_named(tmp_path: Path, text: str) -> None:
    written(tmp_path, 0)
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    merged = merge([tmp_path], tmp_path / "m")
    assert merged.learners == (0,) and merged.events == 3 and merged.left_out == (bad,)
    with pytest.raises(ConfigError, match=r"not a timeline: .*bad\.json"):
        merge([bad], tmp_path / "n")


def test_events_that_do_not_fit_the_format(tmp_path: Path) -> None:
    odd = [
        3, None, [1], event(ts="1.0"), event(ts=[]), event(ts=None), event(ts=10**400),
        event(ts=math.nan), event(ts=1.0, dur=math.inf), event(ts=2.0, pid=[1]),
        event(ts=3.0, pid={}), {"ph": "M", "name": "process_name", "pid": [1]},
    ]  # fmt: skip
    profile(tmp_path, "0.json", traceEvents=odd)
    path = written(tmp_path, 0, unix_s=1.0)
    lines = path.read_text().splitlines()
    lines[2:2] = [DEEP, '{"a":' * 50_000, '{"ph":"X","pid":0,"ts":"1"},', "3,"]
    path.write_text("\n".join(lines))
    merge([tmp_path], tmp_path / "m")
    found = events(tmp_path / "m")
    assert sorted(e["ts"] for e in found if e["pid"] != 0) == [1.0, 2.0, 3.0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 0)
    written(tmp_path, 1, job=4.0)
    assert command.main(["merge", str(tmp_path), "-o", str(tmp_path / "m.json")]) == 0
    out, err = capsys.readouterr()
    assert "1 learners, 0 profiles, 3 events" in out and "trace.1.json" in err
    wrong = [
        (["merge", str(tmp_path / "none"), "-o", "x"], "not a timeline"),
        (["merge", str(tmp_path / "m.json"), "-o", "x"], "not a timeline"),
        (["merge", str(tmp_path), "-o", str(tmp_path / "no" / "x")], "cannot be written"),
    ]
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken\x1b[2J.json").write_text("[")
    assert command.main(["merge", str(tmp_path), "-o", str(tmp_path / "m.json")]) == 0
    assert "\x1b" not in capsys.readouterr().err
    wrong.append((["merge", str(tmp_path / "empty"), "-o", "x"], "HVD_ADPSGD_TIMELINE"))
    for arguments, text in wrong:
        assert command.main(arguments) == 2
        assert text in capsys.readouterr().err
