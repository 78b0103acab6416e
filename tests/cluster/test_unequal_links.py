"""prefer_fast on eight hosts: a quarter of the links is ten times slower."""

import itertools
import json
import random
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

PROGRAM = Path(__file__).parent / "programs" / "unequal_links.py"
N = 8
PAIRS = list(itertools.combinations(range(N), 2))
SLOW = random.Random(3).sample(PAIRS, len(PAIRS) // 4)
FAST_RATE, SLOW_RATE = "80mbit", "8mbit"


def trained(cluster: Cluster, folder: Path, prefer: str) -> list[dict]:
    """Train on all hosts; return what each learner has written."""
    folder.mkdir()
    hosts = ",".join(f"{host}:1" for host in cluster.hosts)
    command = ["horovodrun", "-np", str(N), "-H", hosts, sys.executable, str(PROGRAM), str(folder)]
    options = {
        "HVD_ADPSGD_WIRE": "tcp",
        "HVD_ADPSGD_AVERAGING": f"random_pairs:prefer_fast={prefer}",
    }
    with open(folder / "log", "w") as log:
        done = cluster.run(
            command, env=environment(options, [QUICK]), timeout=300, stdout=log, stderr=subprocess.STDOUT
        )  # fmt: skip
    assert done.returncode == 0, (folder / "log").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(N)]


def test_slow_links_are_used_less_and_the_mean_is_kept(tmp_path: Path) -> None:
    shares = {}
    with Cluster(N) as cluster:
        for i, j in PAIRS:
            rate = SLOW_RATE if (i, j) in SLOW else FAST_RATE
            cluster.thin(cluster.hosts[i], cluster.hosts[j], rate)
        for prefer in ("0", "0.95"):
            found = trained(cluster, tmp_path / prefer, prefer)
            assert max(facts["drift"] for facts in found) < 1e-4
            met = {(i, j): found[i]["met"][j] for i, j in PAIRS}
            assert min(met.values()) > 0
            shares[prefer] = sum(met[pair] for pair in SLOW) / sum(met.values())
            rates = sorted(facts["exchanges_per_s"] for facts in found)
            print(f"prefer {prefer}: {shares[prefer]:.3f} over slow links; exchanges/s {rates}")
    assert shares["0.95"] < 0.8 * shares["0"]
