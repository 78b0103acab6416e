"""exchange_share="auto" where the link becomes a thousandth of what it was, and recovers."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hvd_adpsgd_lab.machines import Cluster, unavailable

from tests.launcher import QUICK, environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.alone, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "auto_share.py"
RATES = ("10mbit", "10gbit", None)  # after each phase
DEADLINE_S = 300.0


@pytest.mark.parametrize("wire", ["None", "auto"])
def test_the_share_follows_the_link(tmp_path: Path, wire: str) -> None:
    """With wire_dtype="auto" the bits do."""
    command = ["horovodrun", "-np", "2", "-H", "node1:1,node2:1", sys.executable, str(PROGRAM)]
    options = {
        "ADPSGD_CHUNK_KIB": "64",
        "HVD_ADPSGD_MAX_OVERHEAD": "1",  # only the link counts
        "HVD_ADPSGD_WIRE": "tcp",
        "HVD_ADPSGD_WIRE_DTYPE": wire,
    }
    ends = time.monotonic() + DEADLINE_S
    with Cluster(2) as cluster, open(tmp_path / "log", "w") as log:
        cluster.shape("node2", "10gbit")
        with cluster.started(
            [*command, str(tmp_path)], env=environment(options, [QUICK]),
            stdout=log, stderr=subprocess.STDOUT,
        ) as job:  # fmt: skip
            for number, rate in enumerate(RATES):
                agreed = any if rate == "10gbit" else all  # of two shares the smaller one counts
                while not agreed((tmp_path / f"{number}.{rank}").exists() for rank in range(2)):
                    said = (tmp_path / "log").read_text()
                    assert job.poll() is None and time.monotonic() < ends, said
                    time.sleep(0.05)
                cluster.shape("node2", rate)
                (tmp_path / f"{number}.changed").touch()
            assert job.wait(120) == 0, (tmp_path / "log").read_text()
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert max(facts["drift"] for facts in both) < 1e-4
    for number, phase in enumerate(("fast", "slow", "fast")):
        found = [seen for facts in both for seen in facts["seen"] if seen["number"] == number]
        print(phase, found)
        assert len(found) == 2 or (found and phase == "slow")
