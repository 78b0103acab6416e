"""A training over three hosts, whose links and power the tests cut."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.machines import Cluster
from tests.launcher import QUICK, environment

PROGRAM = Path(__file__).parent / "programs" / "train.py"
HOSTS = ("node1", "node2", "node3")
START_S = 60.0  # for all to train
RETURN_S = 60.0  # for the command, behind the end of training


@dataclass
class Run:
    """A training over three hosts, one super learner each.

    Attributes:
        cluster: the hosts.
        folder: of the learners' files.
        status: of the command; None while it runs.
        took: seconds from the end of the wait for training to the end of the command.
        ended: when the command has ended, of time.time.
        said: by the command.
    """

    cluster: Cluster
    folder: Path
    status: int | None = None
    took: float = field(default=float("nan"))
    ended: float = field(default=float("nan"))
    said: str = ""

    def facts(self, rank: int) -> list[dict[str, Any]]:
        file = self.folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def at(self, rank: int, when: float) -> dict[str, Any]:
        """What a learner said last before `when`."""
        return [facts for facts in self.facts(rank) if facts["time"] <= when][-1]


@contextmanager
def training(
    folder: Path, seconds: float, options: Sequence[str] = (), **env: str
) -> Iterator[Run]:
    """Yields when all train and have exchanged; behind the block the command has ended.

    Args:
        folder: for the learners' files.
        seconds: of training.
        options: of horovodrun.
        env: variables of the learners.
    """
    command = ["horovodrun", *options, "-np", "3", "-H", ",".join(f"{host}:1" for host in HOSTS)]
    command += [sys.executable, str(PROGRAM), str(folder), str(seconds)]
    with Cluster(3) as cluster, open(folder / "log", "w+") as log:
        run = Run(cluster, folder)
        out = {"stdout": log, "stderr": subprocess.STDOUT, "text": True}
        with cluster.started(command, env=environment(env, [QUICK]), **out) as process:
            wait_for(lambda: all(len(run.facts(rank)) > 4 for rank in range(3)), run, START_S)
            yield run
            began = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                run.status = process.wait(seconds + RETURN_S)
            run.took, run.ended = time.monotonic() - began, time.time()
        run.said = (folder / "log").read_text()
    print(run.said)


def wait_for(condition: Callable[[], bool], run: Run, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, (run.folder / "log").read_text()
        time.sleep(0.1)
