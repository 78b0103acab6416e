"""The learners of `lab.studies.cluster`, made small and on one host: all that is told is counted."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from examples.acoustic_model.speech.keeper import perform_jobs
from lab.studies.disturbed import jobs, network, stragglers
from tests.launcher import QUICK

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def cheap_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(QUICK))  # jobs.environment adds this tree


@pytest.mark.extended
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
    (record,), failures = perform_jobs([job], tmp_path)
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


def _far_learners(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    out = folder / "told.json"
    small = {"sizes": [4, 32, 3], "rate": 0.05, "momentum": 0.9, "seed": 5, **options}
    command = ["horovodrun", "-np", "2", *jobs.learner("far_learner", small, out)]
    env = {**stragglers.ENVIRONMENT, "ADPSGD_SAME_HOST": "mpi"}  # as between hosts
    jobs.run(command, env, 120, folder / "log")
    return jobs.told(out)


@pytest.mark.extended
@pytest.mark.parametrize("scheme", [network.GOSSIP, network.SYNCHRONOUS])
def test_blocks_with_averaging_on_and_off(scheme: str, tmp_path: Path) -> None:
    options = {
        **network.SCHEMES[scheme],
        "computations": ["2:0", "2:0.01"],
        "block_s": 0.2,
        "on_s": 0.3,
        "repetitions": 2,
    }
    told = _far_learners(tmp_path, options)
    found = network.results({("1 Gb/s", "1 M", scheme): told})["1 Gb/s"]["1 M"]
    gossip = scheme == network.GOSSIP
    for kind in network.KINDS:
        one = found[kind][scheme]
        assert one["steps_per_s"] > 0 < one["off_steps_per_s"]
        assert (one["exchanges_per_step"] > 0) == gossip
        assert (one["bytes_sent_per_step"] > 0) == gossip
        assert one["off_exchanges_per_step"] == 0
    assert found["accelerator"][scheme]["off_steps_per_s"] < 100, "nobody waited"


@pytest.mark.parametrize("scheme", [network.GOSSIP, network.SYNCHRONOUS, network.ALONE])
@pytest.mark.extended
def test_curves(scheme: str, tmp_path: Path) -> None:
    """Copies are taken where they shall be, models are equal where they must be, and they learn."""
    options = {
        **network.SCHEMES[scheme],
        "computations": ["16:0.005"],
        **dict.fromkeys(("block_s", "on_s", "repetitions"), 0),
        "curve_s": 1.0,
    }
    curve = _far_learners(tmp_path, options)["curve"]
    assert {"steps 4", "steps 8", "time 0.25", "time 1"} <= {copy["at"] for copy in curve}
    last, early = network.at(curve, "time 1"), network.at(curve, "steps 4")
    assert last is not None and early is not None
    assert last["loss"] < early["loss"]
    assert early["steps"] == [4, 4]
    assert (last["consensus_distance"] == 0) == (scheme == network.SYNCHRONOUS)
    assert (last["own_loss"] == last["loss"]) == (scheme != network.GOSSIP)
