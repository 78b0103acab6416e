"""`bench peers` across hosts: each library finds its other learners, and trains over the link."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cluster.machines import Cluster, unavailable
from tests.launcher import environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

LONGEST_S = 900.0  # on a busy machine; no verdict is about it
NAMES = ["random_pairs", "horovod", "ddp", "post_local_sgd"]


@pytest.mark.timeout(LONGEST_S + 60)
def test_libraries_train_on_two_hosts() -> None:
    command = [sys.executable, "-m", "hvd_adpsgd", "bench", "peers", "--json", "--learners=2"]
    command += ["--hosts=node1:1,node2:1", "--rounds=1", "--steps=4", "--seconds=1", "--slow=0.2"]
    with Cluster(2) as cluster:
        cluster.shape("node2", "1gbit")
        done = cluster.run(
            [*command, "--schemes", *NAMES], env=environment({}), timeout=LONGEST_S,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["hosts"] == "node1:1,node2:1"
    for name in NAMES:
        assert isinstance(result[name], dict), result
        assert result[name]["samples_per_s"] > 0, result
        assert 0 < result[name]["slow_loss_after_time"] < 10, result
