"""Two hosts with a shaped link between them: a cluster on this machine, of tests/cluster. Needs root.

The hosts share the machine's cores and memory; from one to the other there is only the network. (Each has
a /dev/shm of its own: engines that find each other there would not use the network.)
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from examples.acoustic_model.speech.problem import Problem
from tests.cluster.machines import Cluster, ClusterError, unavailable

from . import jobs

__all__ = ["Hosts", "missing"]


def missing() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    return unavailable()


class Hosts:
    """Two hosts, from `with` to its end.

    Args:
        start: whether they are needed at all.
    """

    def __init__(self, start: bool = True) -> None:
        self._cluster = Cluster(2)
        self._stack = contextlib.ExitStack()
        self._start = start

    def __enter__(self) -> Hosts:
        try:
            if self._start:
                self._stack.enter_context(self._cluster)
        except ClusterError as error:
            raise Problem(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, rate: float) -> None:
        """Let the link between the two carry `rate` bit/s, each way."""
        self._cluster.shape(self._cluster.hosts[1], f"{rate:.0f}bit")

    def run(self, command: list[str], deadline_s: float, log: Path) -> None:
        """Run one learner on each host; what they say goes to `log`.

        Raises:
            Problem: if it fails or takes too long.
        """
        launcher = ["horovodrun", "-np", "2", "-H", ",".join(f"{h}:1" for h in self._cluster.hosts)]
        with log.open("w") as out:
            try:
                done = self._cluster.run(
                    [*launcher, *command], env=jobs.environment({}), timeout=deadline_s,
                    stdout=out, stderr=out,
                )  # fmt: skip
            except ClusterError as error:
                raise Problem(f"{error}\n{jobs.tail(log)}") from error
        if done.returncode:
            raise Problem(f"status {done.returncode}\n{jobs.tail(log)}")
