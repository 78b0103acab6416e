"""The stragglers of `make bench-cluster`, made small: the slow learner is slow, and all is counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "acoustic_model")]

pytest.importorskip("torch")

from disturbed import jobs, stragglers  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("scheme", ["random_pairs", "delay_by_one"])
def test_a_straggler_is_measured(scheme: str, tmp_path: Path) -> None:
    settings = {
        **stragglers.SETTINGS,
        "sizes": (16, 32, 10),
        "wait_s": 0.01,
        "block_s": 0.5,
        "warm_up": 3,
        "slowdowns": (1.0, 30.0),
    }
    job = stragglers.job(scheme, 0, settings)
    (record,), failures = jobs.perform([job], tmp_path)
    assert not failures
    assert record is not None
    assert [slowdown for slowdown, _ in record["blocks"]] == [1.0, 30.0, 1.0]
    *healthy, slow = record["blocks"][1][1]
    assert len(healthy) == 3
    assert slow["seconds"] / slow["steps"] > 0.3
    if stragglers.waits(scheme):
        assert all(learner["steps"] == slow["steps"] for learner in healthy)
    else:
        assert all(learner["steps"] > slow["steps"] for learner in healthy)
        assert sum(learner["exchanges"] for learner in healthy) > 0
