"""One view of trainers, engines and torch's profiler: marks of the parts of a step, merged traces."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from hvd_adpsgd.watching.trace import merge
from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "profiled.py"
PARTS = ("collect", "inner_allreduce", "offer", "optimizer")
STEPS = 3
# Of two clocks of one host; a process may be stopped for seconds between reading one and the other.
# Not converted they are years apart: one counts from the start of the machine.
APART_US = 60e6


def test_the_parts_of_a_step_are_marked_where_the_timeline_has_them(tmp_path: Path) -> None:
    result = run_learners(4, PROGRAM, args=[str(tmp_path), str(STEPS)]).checked()
    for facts in result.by_rank():
        assert facts["marks"] == [f"hvd_adpsgd.{part}" for part in PARTS]
    merged = merge([tmp_path], tmp_path / "all.json")
    assert merged.learners == (0, 1, 2, 3) and len(merged.profiles) == 4
    began = defaultdict(list)
    for event in json.loads((tmp_path / "all.json").read_text())["traceEvents"]:
        if event.get("ph") == "X":
            began[event["name"]].append(event["ts"])
    for part in PARTS:
        ours, seen = sorted(began[part]), sorted(began[f"hvd_adpsgd.{part}"])
        assert len(ours) == len(seen) == 4 * STEPS
        assert max(abs(a - b) for a, b in zip(ours, seen, strict=True)) < APART_US


def test_one_super_learner_has_a_timeline_too(tmp_path: Path) -> None:
    said = run_learners(2, PROGRAM, args=[str(tmp_path), str(STEPS)]).checked().by_rank()
    for facts in said:
        assert facts["marks"] == ["hvd_adpsgd.inner_allreduce", "hvd_adpsgd.optimizer"]
    merged = merge([tmp_path], tmp_path / "all.json")
    assert merged.learners == (0, 1) and len(merged.profiles) == 2
    for rank in range(2):
        found = json.loads((tmp_path / f"trace.{rank}.json").read_text())
        steps = [(e["name"], e["args"]["step"]) for e in found if e["ph"] == "X"]
        assert steps == [(n, i) for i in range(STEPS) for n in ("inner_allreduce", "optimizer")]


def test_one_super_learner_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = run_learners(2, PROGRAM, args=[str(tmp_path / "no"), str(STEPS)])
    assert result.returncode and "ConfigError: no timeline: by HVD_ADPSGD_TIMELINE" in result.stderr
