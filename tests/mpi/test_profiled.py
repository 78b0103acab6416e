"""Marks of the parts of a step, in traces of the learners and of torch's profiler; its Python calls."""

import json
from pathlib import Path

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "profiled.py"
PARTS = ("collect", "inner_allreduce", "offer", "optimizer")
STEPS = 3


def shown(path: Path) -> list[tuple[str, int]]:
    """What a learner's trace shows of its trainer: the part, and the step."""
    found = json.loads(path.read_text())
    return [(e["name"], e["args"]["step"]) for e in found if e["ph"] == "X" and e["tid"] == 0]


def test_the_parts_of_a_step_are_marked_and_in_the_timeline(tmp_path: Path) -> None:
    result = run_learners(4, PROGRAM, args=[str(tmp_path), str(STEPS)]).checked()
    for rank, facts in enumerate(result.by_rank()):
        assert facts["marks"] == [f"hvd_adpsgd.{part}" for part in PARTS]
        parts = shown(tmp_path / f"trace.{rank}.json")
        assert sorted(parts) == sorted((part, i) for part in PARTS for i in range(STEPS))


def test_one_super_learner_has_a_timeline_too(tmp_path: Path) -> None:
    said = run_learners(2, PROGRAM, args=[str(tmp_path), str(STEPS)]).checked().by_rank()
    for facts in said:
        assert facts["marks"] == ["hvd_adpsgd.inner_allreduce", "hvd_adpsgd.optimizer"]
    for rank in range(2):
        steps = shown(tmp_path / f"trace.{rank}.json")
        assert steps == [(n, i) for i in range(STEPS) for n in ("inner_allreduce", "optimizer")]


def test_one_super_learner_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = run_learners(2, PROGRAM, args=[str(tmp_path / "no"), str(STEPS)])
    assert result.returncode and "ConfigError: no timeline: by HVD_ADPSGD_TIMELINE" in result.stderr


def test_a_step_takes_few_calls_in_few_modules() -> None:
    """Of the leader, with torch inside, AdamW and four tensors; on all threads."""
    env = {"HVD_ADPSGD_INNER": "torch", "HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    traced = run_learners(4, PROGRAM.with_name("traced.py"), env=env).checked().by_rank()[0]
    print(traced)
    assert 0 < traced["calls"] <= 400, traced
    assert len(traced["modules"]) <= 25, sorted(traced["modules"])
