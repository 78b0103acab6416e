"""Plays a script on real processes, and judges from outside what came of it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.launcher import QUICK, environment, free_port, launch, server
from tests.storm.hosts import Hosts, hosts, name, unavailable
from tests.storm.judge import judge
from tests.storm.script import Script
from tests.storm.story import Story

LEARNER = Path(__file__).with_name("learner.py")
LONGEST_S = 480.0  # of a job, on a machine with much else to do
GONE_S = 60.0  # until its processes and files are gone
SHARED = Path("/dev/shm")
SECRET = "HVD_ADPSGD_JOIN_SECRET_FILE"


def play(script: Script) -> Story:
    """Play it, to the end of all processes, and judge."""
    reason = unavailable() if script.needs_hosts else None
    if reason:
        script = script.without_hosts(reason)
    with _folders() as (folder, shared), contextlib.ExitStack() as stack:
        made = stack.enter_context(hosts(script.n, folder)) if script.needs_hosts else None
        stage = Stage(script, folder, shared, made)
        began = time.monotonic()
        try:
            stage.start()
            stage.attend()
        finally:
            story = stage.end()
        story.seconds = time.monotonic() - began
        judge(story)
        return story


@contextlib.contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """For what the job leaves on purpose, and for what it may leave in shared memory."""
    with tempfile.TemporaryDirectory(prefix="storm.") as name:
        shared = Path(tempfile.mkdtemp(prefix="storm.", dir=SHARED))
        try:
            yield Path(name), shared
        finally:
            shutil.rmtree(shared, ignore_errors=True)


class Stage:
    """The processes of a job, its folder, and its joining super learner."""

    def __init__(self, script: Script, folder: Path, shared: Path, hosts: Hosts | None):
        self.script, self.folder, self.shared, self.hosts = script, folder, shared, hosts
        self.story = Story(script)
        self.job: list[subprocess.Popen[bytes]] = []
        self.candidate: subprocess.Popen[bytes] | None = None
        self.ends = time.monotonic() + LONGEST_S
        (folder / "tmp").mkdir()
        (folder / "notes").touch()
        (folder / "script.json").write_text(script.to_json())
        if hosts is not None:
            (folder / "links").write_text(" ".join(hosts.cut))

    # ---- acts

    def start(self) -> None:
        """Start all learners."""
        n = self.script.n * self.script.k
        if self.script.launcher == "mpirun":
            self.job.append(self._started([*launch(n, "mpirun"), *self._program()], {}))
            return
        port = str(free_port())
        for rank in range(n):
            place = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(n), "MASTER_PORT": port}
            place["SLURM_STEP_NODELIST"] = "localhost" if self.hosts is None else name(0)
            host = [] if self.hosts is None else [str(self.hosts.of(rank // self.script.k))]
            self.job.append(self._started([*self._program(), *host], place))

    def _program(self) -> list[str]:
        command = [sys.executable, "-I", "-S", str(QUICK / "client.py"), server()]
        if any(fault.kind == "os_exit" for fault in self.script.faults):
            from horovod.runner.mpi_run import _OMPI5_KEEPER

            # os._exit passes by every exit handler: only the shell above the learner can tell
            command = [*_OMPI5_KEEPER, sys.executable]
        return [*command, str(LEARNER), str(self.folder)]

    def _started(self, command: Sequence[str], place: dict[str, str]) -> subprocess.Popen[bytes]:
        variables = {
            **self.script.variables,
            **place,
            "TMPDIR": str(self.folder / "tmp"),
            "OMPI_MCA_btl_sm_backing_directory": str(self.shared),
        }
        if self.script.joins == "candidate":
            variables[SECRET] = str(self.folder / "secret")
        with open(self.folder / "errors", "ab") as err:
            return subprocess.Popen(
                command,
                env=environment(variables, [QUICK]),
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                start_new_session=True,
            )

    def attend(self) -> None:
        """Until all processes have ended; starts the joining super learner when the job has a checkpoint."""
        waits = self.script.joins == "candidate"
        while any(process.poll() is None for process in self.job):
            if time.monotonic() > self.ends:
                self.story.broken.append(f"every run ends: it has not in {LONGEST_S:g} s")
                return
            if waits and self.notes("checkpoint"):
                self._invite()
                waits = False
            if self.candidate is not None and self.candidate.poll() is not None:
                (self.folder / "nobody comes").touch()
            time.sleep(0.02)

    def _invite(self) -> None:
        listeners = re.findall(r"HVD_ADPSGD_JOIN=(\S+)", (self.folder / "errors").read_text())
        if not listeners:
            self.story.broken.append("who may join is told where: no line says it")
            (self.folder / "nobody comes").touch()
            return
        self.candidate = self._started(self._program(), {"HVD_ADPSGD_JOIN": listeners[0]})

    def end(self) -> Story:
        """What happened; nothing of it runs any more."""
        story = self.story
        left = self._gone()
        if left:
            story.broken.append(f"every process ends: {left} have not")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in [*self.job, *filter(None, [self.candidate])]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        story.statuses = [process.returncode for process in self.job]
        story.notes = self.notes()
        story.errors = (self.folder / "errors").read_text(errors="replace")
        for file in self.folder.glob("[0-9]*.[0-9]*.npy"):
            checkpoint, who = file.name.split(".")[:2]
            story.models.setdefault(int(checkpoint), {})[int(who)] = np.load(file)
        for file in self.folder.glob("left.*.npy"):
            story.left[int(file.name.split(".")[1])] = np.load(file)
        files = [str(f) for place in (self.folder / "tmp", self.shared) for f in place.rglob("*")]
        if files:
            story.broken.append(f"nothing is left behind: {files}")
        return story

    def notes(self, what: str | None = None) -> list[dict[str, Any]]:
        """All lines so far."""
        lines = (self.folder / "notes").read_text().split("\n")[:-1]  # the last may be half written
        found = [json.loads(line) for line in lines]
        return [note for note in found if what in (None, note["what"])]

    def _gone(self) -> list[int]:
        """Waits until no learner lives; who still does."""
        late = any(process.poll() is None for process in self.job)
        ends = time.monotonic() + (0.0 if late else GONE_S)
        while left := [
            note["pid"] for note in self.notes("start") if _lives(note["pid"], self.folder)
        ]:
            if time.monotonic() > ends:
                break
            time.sleep(0.02)
        return left


def _lives(pid: int, folder: Path) -> bool:
    """Whether this process is one of the job in this folder."""
    try:
        maps = Path(f"/proc/{pid}/fd")
        return any(os.readlink(fd) == str(folder / "notes") for fd in maps.iterdir())
    except OSError:
        return False
