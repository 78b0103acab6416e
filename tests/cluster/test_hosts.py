"""Hosts that are cut off or die while they train, under a plain horovodrun."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.machines import unavailable
from tests.cluster.training import training

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

PATIENCE = {"OMPI_MCA_mpi_ft_detector_period": "2", "OMPI_MCA_mpi_ft_detector_timeout": "8"}


@pytest.mark.extended
def test_a_host_that_is_cut_off_for_5_s_comes_back(tmp_path: Path) -> None:
    with training(tmp_path, 18) as run:
        cut = time.time()
        run.cluster.cut("node3")
        time.sleep(5)  # the injected cut
        run.cluster.heal("node3")
        healed = time.time()
    assert run.status == 0, run.said
    for rank, other in ((0, 1), (1, 0)):
        before, after = run.at(rank, cut + 1.5), run.at(rank, healed)  # deadline_s is 1
        assert after["met"][other] > before["met"][other] + 10, "the others exchange on"
        assert after["met"][2] <= before["met"][2] + 1, "nobody was cut off"
        back = [f for f in run.facts(rank) if "met" in f][-1]
        assert back["met"][2] > after["met"][2] + 10, "it contributes again"
    steps = [run.at(2, when)["step"] for when in (cut + 1, healed)]
    assert steps[1] > steps[0] + 20, "nor does the one that is cut off wait"
    assert [run.facts(rank)[-1]["living"] for rank in range(3)] == [3, 3, 3]


def test_a_host_without_power_is_left_behind(tmp_path: Path) -> None:
    """No connection is closed: only heartbeats tell. The others train to the end, the command ends."""
    with training(tmp_path, 20, **PATIENCE) as run:
        killed = time.time()
        run.cluster.kill("node3", silently=True)
    assert run.status not in (None, 0), f"the command has not returned: {run.said}"
    for rank, other in ((0, 1), (1, 0)):
        end = run.facts(rank)[-1]
        assert end["living"] == 2, end
        assert end["lost"] == [2]
        assert end["first"] == (rank == 0)
        before = run.at(rank, killed + 1.5)
        last = [f for f in run.facts(rank) if "met" in f][-1]
        assert last["met"][other] > before["met"][other] + 50
        assert last["time"] > killed + 12  # they were told after 8 to 10 s
    assert "super learner 2 (node3, learner 2) has failed" in run.said


@pytest.mark.extended
def test_a_host_that_is_cut_off_for_good_ends_on_its_own(tmp_path: Path) -> None:
    """Each side counts the other as lost, and ends; the command returns."""
    with training(tmp_path, 24, **PATIENCE) as run:
        run.cluster.cut("node3")
    assert run.status not in (None, 0), f"the command has not returned: {run.said}"
    assert [run.facts(rank)[-1]["living"] for rank in range(3)] == [2, 2, 1]


@pytest.mark.extended
def test_a_host_that_dies_with_its_launcher_daemon_ends_the_job(tmp_path: Path) -> None:
    """A limit of Open MPI's launcher, which sees the connection closed: at once, with any status."""
    with training(tmp_path, 30) as run:
        run.cluster.kill("node3")
    assert run.took < 20, "the launcher can bear it now: the docs are to be changed"
    assert "node3" in run.said
