"""What a Horovod user expects beside training (programs/behaviour.py): one launch of four learners."""

from pathlib import Path
from typing import Any

import pytest

from tests.launcher import needs_horovod_inside, run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "behaviour.py"

Said = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("timeline")


@pytest.fixture(scope="module")
def said(folder: Path) -> Said:
    env = {"HOROVOD_TIMELINE": str(folder / "trace.json"), "HVD_ADPSGD_LOG_LEVEL": "warning"}
    return run_learners(4, PROGRAM, env=env).checked().by_case()


@pytest.mark.parametrize("averaging", ["random_pairs", "delay_by_one"])
@pytest.mark.parametrize("place", ["2x2", "4x1"])
def test_averaged_shows_the_mean_and_gives_back_the_own_model(
    said: Said, place: str, averaging: str
) -> None:
    everybody = said[f"{place}/averaged/{averaging}"]
    assert len(everybody) == 4
    for facts in everybody:
        assert facts["error"] < 1e-6, facts
        assert facts["nested"] < 1e-6, facts
        assert facts["same"] and facts["buffers_own"] and facts["back"], facts
        assert facts["refused"] == ["WorldError", "WorldError"], facts
        assert place == "4x1" or facts["backward"]["error"] == "WorldError", facts


@pytest.mark.parametrize("place", ["2x2", "4x1"])
def test_what_is_pending_counts_in_the_mean(said: Said, place: str) -> None:
    for facts in said[f"{place}/of the run"]:
        assert facts["error"] < 1e-6 and facts["same"] and facts["back"], facts


def test_looking_at_the_mean_does_not_disturb_training(said: Said) -> None:
    assert [facts["alike"] for facts in said["undisturbed"]] == [True] * 4


def test_averaged_does_not_show_what_is_not_finite(said: Said) -> None:
    for facts in said["not finite/raise"]:
        assert facts["error"] == "NonFiniteModelError", facts
        assert facts["text"].startswith("averaged: ") and facts["kept"], facts
    for facts in said["not finite/skip"]:
        assert facts["inside"] == [3.0] and facts["kept"], facts


@pytest.mark.parametrize("mode", ["seldom", "inner"])
def test_few_operations_over_all_learners_are_not_told_of(said: Said, mode: str) -> None:
    for facts in said[f"synchronous/{mode}"]:
        assert not facts["told"], facts
        assert facts["count"] == (20 if mode == "seldom" else 0), facts


def test_one_operation_per_step_is_told_of_once(said: Said) -> None:
    told = [line for facts in said["synchronous/every"] for line in facts["told"]]
    assert len(told) == 1
    assert "allreduce at " in told[0] and "programs/behaviour.py:" in told[0], told
    assert (
        "100 operations over all learners in 100 steps" in told[0]
        and "process_set=hvd.super_learner" in told[0]
    ), told
    for facts in said["synchronous/every"]:
        assert facts["count"] == 200 and facts["seconds"] > 0, facts


@needs_horovod_inside("HOROVOD_TIMELINE")
def test_each_super_learner_writes_its_own_timeline(said: Said, folder: Path) -> None:
    assert said
    assert sorted(path.name for path in folder.iterdir()) == ["trace.0.json", "trace.1.json"]
    for path in folder.iterdir():
        assert "allreduce" in path.read_text()
    assert {facts["timeline"] for facts in said["names"]} == {str(folder / "trace.json")}


def test_names_of_horovods_modules(said: Said) -> None:
    for facts in said["names"]:
        assert facts["homogeneous"] is True and facts["gpu"] is False and facts["average"] is True
        assert facts["powers"] == [False, True] and facts["functions"] == [True, True]


@needs_horovod_inside("horovod.torch.elastic, which the torch backend refuses")
def test_elastic_modules_are_horovods(said: Said) -> None:
    for facts in said["names"]:
        assert facts["modules"] == ["horovod.torch.elastic.state", "horovod.torch.elastic.sampler"]
