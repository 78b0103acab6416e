"""A super learner that has failed on one of several hosts is replaced: there, or where somebody lives."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hvd_adpsgd_lab.machines import Cluster, unavailable

from tests.launcher import QUICK, environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

PROGRAM = Path(__file__).parents[1] / "faults" / "programs" / "replaced.py"


@pytest.mark.parametrize(
    ("layout", "victim", "host"),
    [("node1:1,node2:2", 2, "node2"), ("node1:1,node2:1,node3:1", 1, "node1")],
    ids=["somebody-lives-there", "nobody-lives-there"],
)
def test_replaced_on_a_host(tmp_path: Path, layout: str, victim: int, host: str) -> None:
    """The joining learner has the lost one's number, and trains on with all others."""
    command = ["horovodrun", "-np", "3", "-H", layout, sys.executable, str(PROGRAM)]
    command += ["--folder", str(tmp_path), "--victims", str(victim), "--after", "10"]
    with Cluster(layout.count(",") + 1) as cluster, open(tmp_path / "log", "w+") as log:
        options = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_SPARE_SLOTS": "1"}
        env = environment(options, [QUICK])
        cluster.run(command, env=env, timeout=150, stdout=log, stderr=subprocess.STDOUT)
    said = (tmp_path / "log").read_text()
    learners = sorted(facts(said), key=lambda one: one["rank"])
    assert [one["rank"] for one in learners] == [0, 1, 2], said
    assert [one["rank"] for one in learners if one["new"]] == [victim], said
    assert all(one["told"][-1][2] == [0, 1, 2] for one in learners), said
    assert {one["rank"]: one["host"] for one in learners}[victim] == host, said


def facts(said: str) -> list[dict[str, Any]]:
    """What the learners said; horovodrun puts their numbers in front."""
    mark = "@learner "
    return [json.loads(line.split(mark, 1)[1]) for line in said.splitlines() if mark in line]
