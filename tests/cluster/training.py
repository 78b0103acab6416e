"""A training over three hosts, whose links and power the tests cut."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_adpsgd_lab.machines import Cluster

from tests.launcher import QUICK, environment

PROGRAM = Path(__file__).parent / "programs" / "train.py"
HOSTS = ("node1", "node2", "node3")
LONGEST_S = 180.0  # of a wait for what must come: it bounds the wait, no verdict is about it
FURTHER = 10  # exchanges, or steps: who makes so many more trains on

Facts = dict[str, Any]


@dataclass
class Run:
    """A training over three hosts, one super learner each.

    Attributes:
        cluster: the hosts.
        folder: of the learners' files.
        process: the command.
        status: of the command, once it has ended; None if it did not within LONGEST_S.
        said: by the command, once it has ended.
    """

    cluster: Cluster
    folder: Path
    process: subprocess.Popen[Any]
    status: int | None = None
    said: str = ""

    def facts(self, rank: int) -> list[Facts]:
        file = self.folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def report(self, rank: int) -> Facts:
        """The next report of a learner: of what is the case now, not of what was when it last reported."""
        before = len(self.facts(rank))
        self.wait_for(lambda: len(self.facts(rank)) > before)
        return self.facts(rank)[before]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + LONGEST_S
        while not condition():
            last = [self.facts(rank)[-1:] for rank in range(len(HOSTS))]
            assert time.monotonic() < ends, (last, (self.folder / "log").read_text())
            time.sleep(0.1)

    def wait_failed(self, ranks: Sequence[int], failed: Sequence[int]) -> None:
        """Wait until these learners count those as failed."""
        for rank in ranks:
            self.wait_for(lambda rank=rank: self.facts(rank)[-1].get("failed") == list(failed))  # type: ignore[misc]

    def wait_exchanges(self, rank: int, other: int) -> None:
        """Wait until a learner has made FURTHER more exchanges with another one."""
        enough = self.report(rank)["met"][other] + FURTHER
        self.wait_for(lambda: self.facts(rank)[-1]["met"][other] >= enough)

    def wait_steps(self, rank: int) -> None:
        enough = self.report(rank)["step"] + FURTHER
        self.wait_for(lambda: self.facts(rank)[-1]["step"] >= enough)


@contextmanager
def training(
    folder: Path, options: Sequence[str] = (), launcher: Sequence[str] = ("horovodrun",), **env: str
) -> Iterator[Run]:
    """Yields when all train and have exchanged; at the block's end learners learn that it is enough.

    Args:
        folder: for the learners' files.
        options: of the launcher.
        launcher: the command of the launcher.
        env: variables of the learners.
    """
    command = [*launcher, *options, "-np", "3", "-H", ",".join(f"{host}:1" for host in HOSTS)]
    command += [sys.executable, str(PROGRAM), str(folder)]
    with Cluster(3) as cluster, open(folder / "log", "w+") as log:
        out = {"stdout": log, "stderr": subprocess.STDOUT, "text": True}
        with cluster.started(command, env=environment(env, [QUICK]), **out) as process:
            run = Run(cluster, folder, process)
            run.wait_for(lambda: all(has_met_all(run.facts(rank), rank) for rank in range(3)))
            yield run
            (folder / "enough").touch()
            with suppress(subprocess.TimeoutExpired):
                run.status = process.wait(LONGEST_S)
        run.said = (folder / "log").read_text()
    print(run.said)


def has_met_all(facts: Sequence[Facts], rank: int) -> bool:
    return bool(facts) and all(n for other, n in enumerate(facts[-1]["met"]) if other != rank)
