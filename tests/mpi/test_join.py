"""hvd.join() with super learners of two and unequal numbers of steps."""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "joins.py"
PLACES = [
    {},
    pytest.param({"HVD_ADPSGD_SHARD": "auto"}, marks=pytest.mark.extended, id="shards"),
    pytest.param({"TEST_DEVICES": "3"}, marks=pytest.mark.extended, id="devices"),
]


@functools.cache
def joined(*env: tuple[str, str]) -> dict[str, list[dict[str, Any]]]:
    size = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "HVD_ADPSGD_CHUNK_KIB": "64"}
    result = run_learners(4, PROGRAM, env={**size, **dict(env)}).checked()
    said: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for facts in sorted(result.said, key=lambda facts: facts["rank"]):
        said[facts["case"]].append(facts)
    return said


@pytest.mark.parametrize("env", PLACES)
def test_join_leaves_learners_alike_and_the_mean_exact(env: dict[str, str]) -> None:
    """Also where the leader has joined, and in the epochs after it."""
    said = joined(*env.items())
    assert [facts["again"] for facts in said["nothing wrapped"]] == [True] * 4
    for name in ("SGD", "Adam"):
        assert len(said[name]) == 4
        for facts in said[name]:
            assert facts["same"] == [True] * 5, facts
            assert facts["error"] < 1e-12, facts
            assert facts["returned"] == said[name][0]["returned"]


def test_join_is_refused_where_super_learners_wait_for_each_other() -> None:
    said = joined()["refused"]
    assert [facts.get("error") for facts in said] == ["StrategyMismatchError"] * 4
    for facts in said:
        assert "join() with averaging=periodic_averaging" in facts["text"]
        assert facts["kept"]


def test_another_operation_while_others_join_is_an_error_on_all() -> None:
    said = joined()["elsewhere"]
    assert [facts.get("error") for facts in said] == ["CollectiveMismatchError"] * 4
    for facts in said:
        assert "learner 0 is in join, learner 3 in barrier" in facts["text"]
    assert [facts["later"] for facts in said] == ["WorldError"] * 3 + [None]
