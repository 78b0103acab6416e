"""Simulates two hosts with a link of limited rate on this machine, by tests/cluster; needs root.

The hosts share the machine's cores and memory, but are connected by their network only. Each has its own
/dev/shm, because engines that share a /dev/shm would exchange through it instead of the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from hvd_adpsgd_lab.machines import Cluster, ClusterError, unavailable

from examples.acoustic_model.speech.problem import Problem

from . import jobs


def missing() -> str | None:
    """Return why two hosts cannot be simulated on this machine; None if they can."""
    return unavailable()


class Hosts:
    """A context in which two hosts exist.

    Args:
        start: whether to start the hosts; False if nothing will run on them.
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
        """Limit the link between both hosts to `rate` bit/s in each direction."""
        self._cluster.shape(self._cluster.hosts[1], f"{rate:.0f}bit")

    def run(
        self,
        command: list[str],
        deadline_s: float,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Run `command` as one learner on each host, with all output in the file `log`.

        Raises:
            Problem: if the job fails or does not end within `deadline_s`.
        """
        launcher = ["horovodrun", "-np", "2", "-H", ",".join(f"{h}:1" for h in self._cluster.hosts)]
        with log.open("w") as out:
            try:
                done = self._cluster.run(
                    [*launcher, *command], env=jobs.environment(variables or {}), timeout=deadline_s,
                    stdout=out, stderr=out,
                )  # fmt: skip
            except ClusterError as error:
                raise Problem(f"{error}\n{jobs.tail(log)}") from error
        if done.returncode:
            raise Problem(f"status {done.returncode}\n{jobs.tail(log)}")
