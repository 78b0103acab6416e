"""Hosts that are cut off for good or die while they train, under a plain horovodrun."""

from pathlib import Path

import pytest
from hvd_adpsgd_lab.machines import unavailable

from tests.cluster.training import training

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

PERIOD, TIMEOUT = "OMPI_MCA_mpi_ft_detector_period", "OMPI_MCA_mpi_ft_detector_timeout"
IMPATIENT = {PERIOD: "2", TIMEOUT: "8"}


@pytest.mark.extended
def test_a_host_without_power_is_left_behind(tmp_path: Path) -> None:
    """No connection is closed: only heartbeats tell. The others train to the end, the command ends."""
    with training(tmp_path, **IMPATIENT) as run:
        run.cluster.kill("node3", silently=True)
        run.wait_failed((0, 1), [2])
        run.wait_exchanges(0, 1)
    assert run.status not in (None, 0), f"the command has not returned: {run.said}"
    for rank in (0, 1):
        end = run.facts(rank)[-1]
        assert end["living"] == 2, end
        assert end["failed"] == [2]
        assert end["first"] == (rank == 0)
    assert "super learner 2 (node3, learner 2) has failed" in run.said


@pytest.mark.extended
def test_a_host_that_is_cut_off_for_good_ends_on_its_own(tmp_path: Path) -> None:
    """Each side counts the other as failed, and ends; the command returns."""
    with training(tmp_path, **IMPATIENT) as run:
        run.cluster.cut("node3")
        run.wait_failed((0, 1), [2])
        run.wait_failed((2,), [0, 1])
    assert run.status not in (None, 0), f"the command has not returned: {run.said}"
    assert [run.facts(rank)[-1]["living"] for rank in range(3)] == [2, 2, 1]


@pytest.mark.extended
def test_a_host_that_dies_with_its_launcher_daemon_ends_the_job(tmp_path: Path) -> None:
    """A limit of Open MPI's launcher, which sees the connection closed: with any status."""
    with training(tmp_path) as run:
        run.cluster.kill("node3")
        # though nobody has said that it is enough
        run.wait_for(lambda: run.process.poll() is not None)
    assert "node3" in run.said
