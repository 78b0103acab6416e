"""Shared moments in jobs: mates stay equal, and the state means what it means in torch."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import run_learners

PROGRAM = Path(__file__).parent / "programs" / "shared_moments.py"
FOUND: dict[str, dict[str, Any]] = {
    "hooks": {"own": True},
    "emptied": {"steps": [10]},
    "from_plain": {"steps": [60], "cross": True},
    "to_plain": {"keys": ["averaging", "param_groups", "state"]},
    "joined": {},
    "momentum": {"kept": True},
    "periods": {},
    "replaced_groups": {"steps": [10], "rates": [0.01, 0.005]},
    "refused": {"errors": ["UnsupportedOptimizerError"] * 3, "groups": 1},
}


@functools.cache
def said() -> dict[str, list[dict[str, Any]]]:
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "ADPSGD_CHUNK_KIB": "64"}
    return run_learners(4, PROGRAM, env=env).checked().by_case()


@pytest.mark.parametrize("case", FOUND)
def test_learners_of_a_super_learner_stay_equal(case: str) -> None:
    assert len(said()[case]) == 4
    for facts in said()[case]:
        assert facts["same"] and facts["finite"], facts
        assert {key: facts[key] for key in FOUND[case]} == FOUND[case]


def test_an_exchange_moves_a_quarter_of_the_moments() -> None:
    """That of the leaders; other learners exchange nothing."""
    moved = [facts["moved"] for facts in said()["periods"] if facts["leads"]]
    assert moved == pytest.approx([1.25, 1.25], rel=0.02)
