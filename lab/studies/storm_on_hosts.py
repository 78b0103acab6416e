"""Plays a storm on super learners that have a host each, so that links can be cut, too; needs root.

    python -m lab.studies.storm_on_hosts                  an hour, 8 hosts, a fault every 10 s
    python -m lab.studies.storm_on_hosts --minutes 5
    python -m lab.studies.storm_on_hosts --slots 16 --schedule public_32 --minutes 30

Hosts are network namespaces of this machine, on a virtual switch. The options are those of
`python -m hvd_adpsgd bench storm`, with other defaults. Kills, stops, slow learners and cuts of 10 to 40 s
are drawn from --seed. What is counted: docs/storm.md; beside it, what the learners have left behind.
Written to --out: lines of all learners, their log, result.json, storm.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
from hvd_adpsgd_lab import bench
from hvd_adpsgd_lab.bench import storm
from hvd_adpsgd_lab.bench.storm.jobs import Joining
from hvd_adpsgd_lab.bench.storm.learner import notes_file
from hvd_adpsgd_lab.bench.storm.notes import Notes
from hvd_adpsgd_lab.machines import MOST, Cluster, ClusterError, unavailable

from examples.acoustic_model.speech.problem import Problem, new_parser, run
from hvd_adpsgd.errors import ConfigError

DEFAULTS = [
    "storm", "--slots=8", "--minutes=60", "--calm=3", "--schedule=drawn", "--kills=90", "--stops=90",
    "--slows=90", "--cuts=90", "--out=out/storm_on_hosts",
]  # fmt: skip
PORT = 29500  # in a namespace every port is free


class OnHosts(Joining):
    """Super learners of one learner, each on a host of its own.

    Args:
        cluster: a host for each slot.
        settings, notes, log: see Job.
    """

    cuts = True

    def __init__(self, cluster: Cluster, settings: dict[str, Any], notes: Notes, log: IO[bytes]):
        super().__init__(settings, notes, log)
        self._cluster, self._port = cluster, PORT
        self._stack = contextlib.ExitStack()

    def pid(self, slot: int) -> int | None:
        """Return the learner's process id on this machine: the started process only enters the host."""
        entered = super().pid(slot)
        try:
            inside = psutil.Process(entered).children() if entered is not None else []
        except psutil.NoSuchProcess:
            inside = []
        return inside[0].pid if inside else None

    def signal(self, slot: int, pid: int, number: int) -> None:
        os.kill(pid, number)
        process = self._processes.get(slot)
        if process is not None and number != signal.SIGSTOP:
            # it has stopped with its child, and would not see that one's end
            os.kill(process.pid, signal.SIGCONT)

    def cut(self, slot: int) -> None:
        self._cluster.cut(self._cluster.hosts[slot])

    def heal(self, slot: int) -> None:
        self._cluster.heal(self._cluster.hosts[slot])

    def close(self) -> int:
        killed = super().close()
        self._stack.close()
        return killed

    def _notes_file(self, slot: int, pid: int) -> Path:
        return notes_file(self.folder, slot, _pid_on_host(pid))

    def _variables(self, slot: int) -> dict[str, str | None]:
        return super()._variables(slot) | {
            "MASTER_ADDR": self._cluster.hosts[0],
            "SLURM_NODEID": None,  # hosts have names
        }

    def _popen(
        self, command: list[str], variables: dict[str, str | None], slot: int | None = None
    ) -> subprocess.Popen[bytes]:
        assert slot is not None
        started = self._cluster.started(
            command, host=self._cluster.hosts[slot], env=self._environment(variables),
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return self._stack.enter_context(started)


def _pid_on_host(pid: int) -> int:
    """Return the process id that a process has in the namespace of its host; `pid` if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of `bench storm`.

    Raises:
        Problem: if there are more slots than a cluster has hosts, or a scheme cannot run on hosts.
    """
    own = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(own):
        new_parser(__doc__).print_help()
        raise SystemExit(0)
    options = bench.parser().parse_args([*DEFAULTS, *own])
    if not 2 <= options.slots <= MOST:
        raise Problem(f"--slots is {options.slots}, allowed are 2 to {MOST}")
    if options.schemes != ["hadpsgd"]:
        raise Problem("--schemes is for bench storm: on hosts only hadpsgd is played. Leave it out")
    return options


def left_behind(cluster: Cluster) -> dict[str, int]:
    """Return the number of processes that learners have left on their hosts, and the bytes in /dev/shm."""
    shell = (
        "ps -e -o comm= | grep -cv -e sshd -e '^ps$' -e '^sh$' -e '^grep$'; "
        "find /dev/shm -type f -printf '%s\\n' | awk '{ s += $1 } END { print s + 0 }'"
    )
    processes = nbytes = 0
    for host in cluster.hosts:
        done = cluster.run(["sh", "-c", shell], host=host, stdout=subprocess.PIPE, text=True)
        found = [int(word) for word in done.stdout.split()]
        processes, nbytes = processes + found[0], nbytes + found[1]
    return {"processes_left": processes, "shared_memory_left_bytes": nbytes}


def played(options: argparse.Namespace) -> dict[str, Any]:
    """Play the storm; return what `bench storm` returns, and what was left behind.

    Raises:
        Problem: if the hosts cannot be made, or an option is out of range.
    """
    if why := unavailable():
        raise Problem(why)

    def made(cluster: Cluster) -> Callable[..., OnHosts]:
        return lambda settings, notes, log: OnHosts(cluster, settings, notes, log)

    try:
        with Cluster(options.slots) as cluster:
            return storm.measure(options, made(cluster)) | left_behind(cluster)
    except (ClusterError, ConfigError) as error:
        raise Problem(str(error)) from error


def main() -> None:
    """Play the storm, print and write its numbers."""
    options = arguments()
    options.out = str(Path(options.out).resolve())
    options.picture = options.picture or str(Path(options.out) / "storm.png")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    result = played(options)
    (Path(options.out) / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(bench.table(result))


if __name__ == "__main__":
    run(main)
