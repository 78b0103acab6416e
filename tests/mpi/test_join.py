"""hvd.join() with super learners of two and unequal numbers of steps."""

import functools
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
    size = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "ADPSGD_CHUNK_KIB": "64"}
    return run_learners(4, PROGRAM, env={**size, **dict(env)}).checked().by_case()


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


@pytest.mark.extended
@pytest.mark.parametrize("inner", ["horovod", "torch"])
def test_learning_rates_of_local_peers_that_differ_are_told_and_uneven_steps_are_not(
    inner: str,
) -> None:
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        hvd.init()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        data = torch.Generator().manual_seed(hvd.rank())
        def train(steps):
            for step in range(steps):
                optimizer.zero_grad()
                model(hvd.rank() + torch.randn(9, 5, generator=data)).sub(1).square().mean().backward()
                optimizer.step()
                scheduler.step(step if hvd.rank() == 1 else -step)
        train(9 if hvd.rank() == 3 else 12)
        hvd.join()
        train(12)
        for _ in range(2):
            with hvd.averaged(model, buffers=True):
                pass
        hvd.average_model(model)
    """
    env = {"HVD_ADPSGD_INNER": inner, "HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    result = run_learners(4, program, env=env).checked()
    words = "averaged: learner 1 holds another '0.weight' than learner 0 of the same super learner"
    assert result.stderr.count(words) == result.stderr.count(" holds another ") == 1, (
        result.report()
    )
