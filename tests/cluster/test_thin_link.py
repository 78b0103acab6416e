"""A link on which an exchange takes seconds: the engine looks seldom, and who leaves is not lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hvd_adpsgd_lab.machines import Cluster, unavailable

from tests.launcher import QUICK, environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.alone, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "thin.py"
RATE = "8mbit"  # 0.26 s for a chunk, 31 s for a model; leave_deadline_s is 5 s
CHUNKS = 120


def test_a_long_exchange_is_looked_at_seldom_and_cut_short_by_who_leaves(tmp_path: Path) -> None:
    command = ["horovodrun", "-np", "2", "-H", "node1:1,node2:1", sys.executable, str(PROGRAM)]
    with Cluster(2) as cluster, open(tmp_path / "log", "w") as log:
        cluster.shape("node2", RATE)
        done = cluster.run(
            [*command, str(tmp_path)], env=environment({}, [QUICK]), timeout=240,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0, said
    assert "has failed" not in said, said
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert second["state"] == "left", said
    assert first["lost"] == second["lost"] == [], said
    assert first["merged"] < CHUNKS, first  # or the exchange was not under way when it left
    for facts in (first, second):  # 1 ms at most between two looks; 50 us would be some 10,000
        assert facts["turns_per_s"] < 2500, facts
