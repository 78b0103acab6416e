"""Many real engines on one machine, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "mean.py"
ENGINES = 64
LEAST_S = 60


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.alone
def test_64_engines_for_a_minute_lose_nothing() -> None:
    """The mean of all models moves by local updates only, in 64 processes that exchange all the time."""
    arguments = (
        f"--seed 64 --steps 160 --check 40 --step-s 1.0 --rate 2 --least {20 * ENGINES}".split()
    )
    result = run_learners(ENGINES, PROGRAM, args=arguments, timeout=400, fresh=True).checked()
    found = json.loads(result.stdout.splitlines()[-1])
    print(f"\n{found}")
    assert found["engines"] == ENGINES and found["seconds"] >= LEAST_S, found
    assert found["worst"]["float32"] <= 1e-6, found
    assert found["worst"]["float64"] <= 1e-12, found
    assert found["exchanges"] >= 20 * ENGINES, found
    assert found["pss_mib"] < 100, found
