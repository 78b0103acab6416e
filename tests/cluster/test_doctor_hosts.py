"""The doctor on several hosts: it visits them, and launches on them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hvd_adpsgd_lab.machines import Cluster, unavailable

pytestmark = pytest.mark.mpi
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
OURS = ("HVD_ADPSGD_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_", "MPI4PY_")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as three:
        yield three


def doctor(cluster: Cluster, *args: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and findings by what they are about."""
    command = [sys.executable, "-m", "hvd_adpsgd", "doctor", "--json", *args]
    env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env["PYTHONPATH"] = str(ROOT)
    done = cluster.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=280)
    told: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, {row["what"]: row for row in told["findings"]}


@pytest.mark.slow
@pytest.mark.extended
def test_hosts_that_are_fit(cluster: Cluster) -> None:
    """One learner on each of three hosts; that of the third is killed, two go on."""
    hosts = ",".join(f"{host}:1" for host in cluster.hosts)
    status, found = doctor(cluster, "-H", hosts, "--patience", "110")
    assert status == 0, found
    assert found["host node1"]["found"].startswith("this host")
    assert found["host node2"]["found"].startswith("ssh works")
    assert found["launch"]["level"] == "ok", found
    assert "3 learners started, one was killed, 2 went on" in found["launch"]["found"]


@pytest.mark.slow
@pytest.mark.extended
def test_a_host_whose_cable_is_out(cluster: Cluster, tmp_path: Path) -> None:
    """It is named, and the others are visited all the same."""
    file = tmp_path / "hosts"
    file.write_text("".join(f"{host} slots=1\n" for host in cluster.hosts))
    cluster.cut("node2")
    try:
        status, found = doctor(cluster, "--quick", "--hostfile", str(file))
    finally:
        cluster.heal("node2")
    assert status == 1
    assert {what for what, row in found.items() if row["level"] == "FAIL"} == {"host node2"}
    assert "no ssh" in found["host node2"]["found"]
    assert found["host node3"]["level"] == "ok"
