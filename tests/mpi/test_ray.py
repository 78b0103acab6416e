"""examples/ray_train.py on a Ray cluster of two nodes, a super learner on each: what fails is replaced."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import ROOT

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(3 * 600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="no Ray: make test-schedulers installs it"
    ),
]

SCRIPT = ROOT / "examples" / "ray_train.py"
LEARNERS = 2  # of a super learner, and CPUs of a node
LONGEST_S = 600.0  # of a wait; Ray starts workers in half a minute on two idle cores
EPOCHS = 2  # by which a job shows that it trains


class Job:
    """The script on a cluster, and what it has written so far; the context manager kills it in the end."""

    def __init__(self, address: str, folder: Path, log: Path, super_learners: int):
        self.folder, self._log = folder, log
        of = {"folder": folder, "super-learners": super_learners, "learners": LEARNERS}
        arguments = [f"--{name}={value}" for name, value in {**of, "epochs": 10**6}.items()]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        ours = {"RAY_ADDRESS": address, "RAY_DEDUP_LOGS": "0", "PYTHONPATH": path}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments], stdout=out, cwd=folder.parent,
                stderr=subprocess.STDOUT, env={**os.environ, **ours}, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def end(self) -> None:
        """Let the job end after an epoch, as the script's first lines say."""
        (self.folder / "stop").touch()
        assert self.process.wait(LONGEST_S) == 0, self.said()

    def said(self) -> str:
        return self._log.read_text()

    def processes(self) -> dict[int, int]:
        """Of the learners, by rank."""
        found = re.findall(r"learner (\d+): super learner \d+, process (\d+)", self.said())
        return {int(rank): int(process) for rank, process in found}

    def epochs(self) -> list[tuple[int, float, int]]:
        """(epoch, loss, learners) of each, as the coordinator says it; Ray prints lines twice."""
        found = re.findall(r"epoch (\d+): held-out loss ([\d.]+), (\d+) learners", self.said())
        return sorted({(int(e), float(loss), int(n)) for e, loss, n in found})

    def await_epochs(self, learners: int) -> list[tuple[int, float, int]]:
        """Wait until so many learners train: the epochs until then."""
        began, ends = len(self.epochs()), time.monotonic() + LONGEST_S
        while [n for *_, n in self.epochs()[began:]].count(learners) < EPOCHS:
            assert self.process.poll() is None and time.monotonic() < ends, self.said()[-20_000:]
            time.sleep(0.1)
        return self.epochs()


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head, which trains nothing, and two nodes; each is a raylet with processes of its own."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            made.add_node(num_cpus=LEARNERS)
        yield made
    finally:
        made.shutdown()


def test_failed_super_learners_are_replaced(cluster: Any, tmp_path: Path) -> None:
    """First one of the super learner that began the job, by a kill; then the other one, with its node."""
    folder = tmp_path / "job"
    with Job(cluster.address, folder, tmp_path / "log", super_learners=2) as job:
        job.await_epochs(4)
        first = job.processes()
        assert sorted(first) == [0, 1, 2, 3], job.said()
        os.kill(first[1], signal.SIGKILL)
        job.await_epochs(2)
        job.await_epochs(4)
        second = job.processes()
        assert sorted(second) == [0, 1, 2, 3, 4, 5], job.said()
        cluster.remove_node(node_of(cluster, second[2]), allow_graceful=False)
        job.await_epochs(2)
        cluster.add_node(num_cpus=LEARNERS)
        job.await_epochs(4)
        third = job.processes()
        assert sorted(third) == list(range(8)), job.said()
        assert all(third[rank] == second[rank] == first[rank] for rank in first), job.said()
        job.end()
    require_one_training(job.epochs())
    assert len(re.findall(r"super learner \d ended well", job.said())) == 2, job.said()
    with Job(cluster.address, folder, tmp_path / "next", super_learners=1) as resumed:
        epochs = resumed.await_epochs(2)
        resumed.end()
    assert epochs[0][0] == job.epochs()[-1][0] + 1
    assert epochs[0][1] < job.epochs()[-1][1] + 0.1


def node_of(cluster: Any, process: int) -> Any:
    """The node whose raylet has started a worker."""
    import psutil

    ancestors = {parent.pid for parent in psutil.Process(process).parents()}
    (found,) = (
        node
        for node in cluster.worker_nodes
        if ancestors & {one.process.pid for one in node.all_processes["raylet"]}
    )
    return found


def require_one_training(epochs: list[tuple[int, float, int]]) -> None:
    """No epoch is missing or trained twice, and the loss falls: nothing starts anew."""
    assert [epoch for epoch, *_ in epochs] == list(range(len(epochs)))
    counts = [n for *_, n in epochs]
    whole = [n for n in counts if n != 3]  # until Ray ends the other one of a failed super learner
    changes = [a for a, b in zip(whole, [*whole[1:], None], strict=True) if a != b]
    assert changes == [4, 2, 4, 2, 4], counts
    for i in range(1, len(epochs)):
        if counts[i] != counts[i - 1]:
            assert epochs[i][1] < epochs[i - 1][1] + 0.1, epochs
    assert epochs[-1][1] < 0.7 * epochs[0][1], epochs
