"""Starts the learners of one run, on this host or in network namespaces, and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_adpsgd_lab.machines import Cluster, ClusterError, unavailable

from examples.acoustic_model.speech import launch
from examples.acoustic_model.speech.problem import Problem
from hvd_adpsgd.launch.processes import free_port

from . import recorder
from .situations import LEARNERS

START_S = 180.0  # longest start
MARGIN_S = 60.0  # for the last copy, after its time
POLL_S = 0.05
PORT = 29500  # in a namespace every port is free
_OURS = ("HVD_ADPSGD_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_")  # learners do not inherit these
_TAIL = 1500  # characters of a failed job's output that are shown


def no_hosts() -> str | None:
    """Return why links cannot be limited on this machine; None if they can."""
    return unavailable()


class Hosts:
    """Hosts with links of limited rate, which start when they are first needed. A context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._cluster: Cluster | None = None

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shaped(self, rate: str) -> Cluster:
        """Return a host for each learner, with links of `rate` in both directions.

        Raises:
            Problem: if the hosts cannot be started.
        """
        try:
            if self._cluster is None:
                self._cluster = self._stack.enter_context(Cluster(LEARNERS))
            for host in self._cluster.hosts:
                self._cluster.shape(host, rate)
        except ClusterError as error:
            raise Problem(str(error)) from error
        return self._cluster


class Job:
    """The processes of a run. A context manager, which ends them all.

    Args:
        scheme: a key of SCHEMES.
        command: the command of a learner.
        folder: of the run; log.txt gets all that learners print.
        cluster: hosts; None: all learners run on this one.
    """

    def __init__(
        self, scheme: str, command: Sequence[str], folder: Path, cluster: Cluster | None
    ) -> None:
        self._command, self._folder, self._cluster = list(command), folder, cluster
        self._by_horovodrun = scheme == "horovod"
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Job:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((self._folder / "log.txt").open("w"))
            port = PORT if self._cluster else free_port("127.0.0.1")
            for host, command, variables in self._commands(port):
                self._processes.append(
                    stack.enter_context(self._started(host, command, variables, log))
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:  # no library's shutdown is waited for
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None and not self._by_horovodrun:
                    os.killpg(process.pid, signal.SIGKILL)
        self._stack.close()

    def _commands(self, port: int) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """Yield the host, command and variables of each process to start."""
        hosts = self._cluster.hosts if self._cluster else ["localhost"] * LEARNERS
        if self._by_horovodrun:
            where = ["-H", ",".join(f"{host}:1" for host in hosts)] if self._cluster else []
            yield hosts[0], ["horovodrun", "-np", str(LEARNERS), *where, *self._command], {}
            return
        for rank, host in enumerate(hosts):
            yield host, self._command, {
                "RANK": str(rank),
                "WORLD_SIZE": str(LEARNERS),
                "LOCAL_RANK": "0" if self._cluster else str(rank),
                "MASTER_ADDR": hosts[0],
                "MASTER_PORT": str(port),
                "LEARNER_HOST": host,
                "GLOO_SOCKET_IFNAME": "eth0" if self._cluster else "lo",
                "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
            }  # fmt: skip

    @contextlib.contextmanager
    def _started(
        self, host: str, command: list[str], variables: dict[str, str], log: Any
    ) -> Iterator[subprocess.Popen[Any]]:
        polite = {"OMPI_MCA_mpi_yield_when_idle": "1"}  # hosts share the cores, unknown to MPI
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        environment = kept | launch.paths() | {"OMP_NUM_THREADS": "1"} | polite | variables
        streams = {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        if self._cluster:
            with self._cluster.started(command, host=host, env=environment, **streams) as process:
                yield process
            return
        with subprocess.Popen(
            command, env=environment, start_new_session=True, **streams
        ) as process:
            try:
                yield process
            finally:
                _end(process)

    def run(self, last: int, seconds: float) -> float | None:
        """Start all learners at one time, and wait until each that lives has written its last copy.

        Args:
            last: number of the last copy.
            seconds: its time.

        Returns:
            after how many seconds the job ended by itself; None if it did not.

        Raises:
            Problem: if the job ends before it starts to train, or does not get there.
        """
        ready = [recorder.ready_file(self._folder, rank) for rank in range(LEARNERS)]
        self._wait(lambda: all(file.exists() for file in ready), START_S, "ready to train")
        began = time.monotonic() + 0.5
        start = recorder.start_file(self._folder)
        new = start.with_suffix(".new")
        new.write_text(repr(began))
        new.replace(start)
        ends = began + seconds + MARGIN_S
        while time.monotonic() < ends:
            alive = self._alive()
            if not any(alive):
                return self._ended_s(time.monotonic() - began)
            copies = sum(
                recorder.copied(self._folder, last, rank) is not None for rank in range(LEARNERS)
            )
            if copies >= (LEARNERS if self._by_horovodrun else sum(alive)):
                break
            time.sleep(POLL_S)
        return None

    def _alive(self) -> list[bool]:
        """Return whether each process lives, and its training has not failed."""
        return [
            process.poll() is None
            and (self._by_horovodrun or not recorder.ended_file(self._folder, rank).exists())
            for rank, process in enumerate(self._processes)
        ]

    def _ended_s(self, now: float) -> float:
        """Return when the first training of a learner failed: processes need seconds to end after that."""
        files = [recorder.ended_file(self._folder, rank) for rank in range(LEARNERS)]
        told = [file.read_text() for file in files if file.exists()]
        return min(map(float, filter(None, told)), default=now)

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            late = time.monotonic() > ends
            if late or any(process.poll() is not None for process in self._processes):
                how = f"not {what} after {seconds:.0f} s" if late else f"ended before it was {what}"
                raise Problem(f"{how}\n{tail(self._folder / 'log.txt')}")
            time.sleep(POLL_S)


def tail(log: Path) -> str:
    """Return the last _TAIL characters of a job's output."""
    return log.read_text(errors="replace")[-_TAIL:]


def _end(child: subprocess.Popen[Any]) -> None:
    """End a command's process group: SIGTERM, which a launcher forwards to learners; 10 s later SIGKILL."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, kind)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            continue


def command(folder: Path, speech: Path, times: Sequence[float], words: Sequence[str]) -> list[str]:
    """Return the command of a learner: train.py with further words."""
    places = ["--folder", str(folder.resolve()), "--speech", str(speech.resolve())]
    module = "lab.studies.claim.train"
    copies = [f"{at:.4f}" for at in times]
    return [sys.executable, "-m", module, *places, *words, "--times", *copies]
