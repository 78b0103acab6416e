"""Super learners that were not there at the start join a job without MPI, from outside of its launcher."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "growing.py"
TIMEOUT_S = 120.0
SECRET = "HVD_ADPSGD_JOIN_SECRET_FILE"


class Processes:
    """Those that a test has started, and what they have written."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, []
        self.secret = folder / "secret"

    def start(self, number: int, size: int, told: Mapping[str, str], *args: object) -> None:
        """Start `size` learners that a launcher such as torchrun would start; one without any."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(size):
            i = len(self.started)
            place = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
                **told,
            }
            env |= {name: str(value) for name, value in place.items()} if size > 1 else {}
            with (
                open(self.folder / f"out{i}", "w") as out,
                open(self.folder / f"err{i}", "w") as err,
            ):
                command = [sys.executable, PROGRAM, "--size", str(number), *map(str, args)]
                self.started.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))

    def start_job(self, number: int, size: int = 2, *args: object) -> str:
        """Start one that others can join; its HVD_ADPSGD_JOIN."""
        self.start(number, size, {SECRET: str(self.secret)}, *args)
        ends = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends and self.started[0].poll() is None:
            found = re.search(r"HVD_ADPSGD_JOIN=(\S+)", self.errors(0))
            if found:
                return found.group(1)
            time.sleep(0.02)
        raise AssertionError(self.report())

    def errors(self, i: int) -> str:
        return (self.folder / f"err{i}").read_text()

    def report(self) -> str:
        return "\n".join(
            f"-- {i}: {p.poll()}\n{self.errors(i)}" for i, p in enumerate(self.started)
        )

    def facts(self, *leave_out: int) -> list[dict[str, Any]]:
        """What the learners say at their end, by rank."""
        ends, found = time.monotonic() + TIMEOUT_S, []
        for i, process in enumerate(self.started):
            if i not in leave_out:
                assert process.wait(max(0.0, ends - time.monotonic())) == 0, self.report()
                said = (self.folder / f"out{i}").read_text().split("@learner ")[1]
                found.append(json.loads(said))
        return sorted(found, key=lambda facts: facts["rank"])

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.end()


def require_grown(facts: list[dict[str, Any]], sizes: list[int], learners: int) -> None:
    """All have seen the same super learners come, each with the exact mean, and average with them."""
    assert [f["rank"] for f in facts] == list(range(learners))
    for each in facts:
        assert each["size"] == learners and each["sum"] == learners
        assert each["super_size"] == sizes[-1]
        assert [len(after[1]) for _, _, after in each["told"]] == sizes
        for _, before, after in each["told"]:
            assert math.isclose(before[0], after[0], rel_tol=1e-12)
        if each["peers"]:
            assert sum(each["peers"]) > 0
    for each in (f for f in facts if f["new"]):
        means = [after[0] for _, _, after in each["told"]]
        assert all(any(math.isclose(v, m, rel_tol=1e-12) for m in means) for v in each["first"])


@pytest.mark.parametrize("of", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_super_learner_that_was_not_there_joins(processes: Processes, of: int) -> None:
    door = processes.start_job(3)
    assert stat.S_IMODE(processes.secret.stat().st_mode) == 0o600
    # the number of learners in a super learner may be another one than in the job
    processes.start(3, of, {"HVD_ADPSGD_JOIN": door, SECRET: str(processes.secret)})
    require_grown(processes.facts(), [3], 2 + of)
    assert "super learner 2 has joined" in processes.report()


@pytest.mark.extended
def test_two_come_one_after_the_other(processes: Processes) -> None:
    door = processes.start_job(4)
    for _ in range(2):
        processes.start(4, 1, {"HVD_ADPSGD_JOIN": door, SECRET: str(processes.secret)})
    require_grown(processes.facts(), [3, 4], 4)


def test_a_secret_that_others_can_read_is_refused(processes: Processes) -> None:
    processes.secret.write_text("00" * 32)
    processes.secret.chmod(0o644)
    processes.start(2, 2, {SECRET: str(processes.secret)})
    for process in processes.started:
        assert process.wait(TIMEOUT_S) != 0
    assert "chmod 600" in processes.errors(0) and "chmod 600" in processes.errors(1)
