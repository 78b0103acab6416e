"""Jobs of `bench storm`: processes in slots, and a supervisor that starts another where one has ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import psutil

from hvd_adpsgd.config import PREFIX
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch.processes import free_port
from hvd_adpsgd.tools.doctor.probes import environment
from hvd_adpsgd_lab.bench import programs_path
from hvd_adpsgd_lab.bench.storm.learner import notes_file
from hvd_adpsgd_lab.bench.storm.notes import Notes, listener_file

_MODULE = "hvd_adpsgd_lab.bench.storm.learner"
_HOST = "127.0.0.1"
_ENDS_S = 30.0  # in which learners end by themselves when all is over
_PAUSE_S = 1.0  # before a slot whose process has ended by itself gets another one
_STEP = b'"event": "step"'
# Of the public run's Lighthouse.
_TICK_MS, _JOIN_MS, _LEAST = 100, 10_000, 2


class Job:
    """Interface of a job with `slots` slots.

    Args:
        settings: of its learners, see driver.settings.
        notes: gets a line for each start and end of a process.
        log: what learners print.
    """

    def __init__(self, settings: dict[str, Any], notes: Notes, log: IO[bytes]):
        self.settings, self.notes, self.log = settings, notes, log
        self.slots, self.folder = int(settings["slots"]), Path(settings["folder"])
        self._stepped: set[int] = set()  # process ids of learners that have made a step

    def start(self) -> None:
        """Start the processes of all slots."""
        raise NotImplementedError

    def watch(self) -> None:
        """Start another process in each slot whose process has ended; called often."""
        raise NotImplementedError

    def pid(self, slot: int) -> int | None:
        """Return the process id of the learner of a slot that is alive; None if there is none."""
        raise NotImplementedError

    def signal(self, slot: int, pid: int, number: int) -> None:
        """Send a signal to the learner of a slot; ProcessLookupError if it has ended."""
        os.kill(pid, number)

    def close(self) -> int:
        """Wait until all processes have ended; return the number of those that had to be killed."""
        raise NotImplementedError

    def has_stepped(self, slot: int) -> bool:
        """Return whether the learner that a slot has now has made a step."""
        pid = self.pid(slot)
        if pid is None or pid in self._stepped:
            return pid is not None
        file = self._notes_file(slot, pid)
        if file.exists() and _STEP in file.read_bytes():
            self._stepped.add(pid)
        return pid in self._stepped

    def _notes_file(self, slot: int, pid: int) -> Path:
        """Return the lines of the learner with a process id."""
        return notes_file(self.folder, slot, pid)

    def _popen(
        self, command: list[str], variables: dict[str, str | None]
    ) -> subprocess.Popen[bytes]:
        """Start the learner of a slot, or a launcher of all."""
        return subprocess.Popen(
            command, env=self._environment(variables), stdin=subprocess.DEVNULL, stdout=self.log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def _environment(self, variables: dict[str, str | None]) -> dict[str, str]:
        """Return the variables of a learner: those of this process, without the user's options."""
        theirs = dict.fromkeys(name for name in os.environ if name.startswith(PREFIX))
        own = {"OMP_NUM_THREADS": "1", "PATH": programs_path()}
        return environment({**theirs, **own, **variables})

    def _learner(self, slot: int | None) -> list[str]:
        told = json.dumps({**self.settings, "slot": slot})
        return [sys.executable, "-m", _MODULE, told]


class OneByOne(Job):
    """A process for each slot, started by itself, as in a loop of ssh; a dead one is replaced at once."""

    def __init__(self, settings: dict[str, Any], notes: Notes, log: IO[bytes]):
        super().__init__(settings, notes, log)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._due: dict[int, float] = {}  # by slot without a process, when it gets one
        self._port = free_port(_HOST)

    def start(self) -> None:
        for slot in range(self.slots):
            self._start(slot, {})

    def watch(self) -> None:
        for slot, process in list(self._processes.items()):
            if process.poll() is not None:
                self._ended(slot, process)
        for slot, due_s in list(self._due.items()):
            if time.monotonic() >= due_s and (told := self._replacing(slot)) is not None:
                del self._due[slot]
                self._start(slot, told)

    def pid(self, slot: int) -> int | None:
        process = self._processes.get(slot)
        return process.pid if process is not None and process.poll() is None else None

    def close(self) -> int:
        ends, killed = time.monotonic() + _ENDS_S, 0
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends - time.monotonic()))
            if process.poll() is None:
                killed += 1
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return killed

    def _ended(self, slot: int, process: subprocess.Popen[bytes]) -> None:
        del self._processes[slot]
        listener_file(self.folder, slot).unlink(missing_ok=True)
        self.notes.add("ended", slot=slot, pid=process.pid, status=process.returncode)
        killed = process.returncode == -signal.SIGKILL
        self._due[slot] = time.monotonic() + (0.0 if killed else _PAUSE_S)

    def _start(self, slot: int, variables: dict[str, str | None]) -> None:
        at_s = time.monotonic()
        process = self._popen(self._learner(slot), self._variables(slot) | variables)
        self._processes[slot] = process
        self.notes.add("spawned", at_s, slot=slot, pid=process.pid)

    def _variables(self, slot: int) -> dict[str, str | None]:
        return {
            "RANK": str(slot),
            "WORLD_SIZE": str(self.slots),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self._port),
        }

    def _replacing(self, slot: int) -> dict[str, str | None] | None:
        """Return the variables of a slot's next process; None if it cannot start yet."""
        return {}


class Joining(OneByOne):
    """Super learners of one learner. A replacement joins by the addresses that the others have written."""

    def _variables(self, slot: int) -> dict[str, str | None]:
        return super()._variables(slot) | {
            "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
            "HVD_ADPSGD_INNER": "torch",
            "HVD_ADPSGD_JOIN_SECRET_FILE": str(self.folder / "secret"),
            # Slots stand for hosts: models travel by TCP, and no survivor starts a replacement on a host
            # that is lost. That is the supervisor's work.
            "SLURM_NODEID": str(slot),
        }

    def _replacing(self, slot: int) -> dict[str, str | None] | None:
        files = [listener_file(self.folder, other) for other in range(self.slots) if other != slot]
        listeners = ",".join(file.read_text() for file in files if file.exists())
        if not listeners:
            return None
        alone = dict.fromkeys(super()._variables(slot))  # one learner needs no launcher's variables
        return {**alone, "HVD_ADPSGD_JOIN": listeners}


class _TorchFT(OneByOne):
    """Replicas of torchft, with the Lighthouse in this process."""

    def start(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # its Lighthouse prints a line per second
        from torchft._torchft import LighthouseServer

        self._lighthouse = LighthouseServer(
            "[::]:0", _LEAST, join_timeout_ms=_JOIN_MS, quorum_tick_ms=_TICK_MS
        )
        port = self._lighthouse.address().rpartition(":")[2]
        self.settings["lighthouse"] = f"http://{_HOST}:{port}"
        super().start()

    def close(self) -> int:
        killed = super().close()
        self._lighthouse.shutdown()
        return killed


class Together(Job):
    """Plain Horovod by `horovodrun --gloo`: when a learner has ended, all are killed and start again."""

    def __init__(self, settings: dict[str, Any], notes: Notes, log: IO[bytes]):
        super().__init__(settings, notes, log)
        self._launcher: subprocess.Popen[bytes] | None = None
        # with their times of start: a system gives the ids of ended processes to others
        self._learners: dict[int, psutil.Process] = {}

    def start(self) -> None:
        program = shutil.which("horovodrun", path=programs_path())
        if program is None:
            raise ConfigError("no horovodrun in PATH. Run python -m hvd_adpsgd build-horovod.")
        at_s = time.monotonic()
        self._old = set(self._files())
        command = [program, "--gloo", "-np", str(self.slots), *self._learner(None)]
        self._launcher = self._popen(command, {})
        self._learners = {}
        for slot in range(self.slots):
            self.notes.add("spawned", at_s, slot=slot, pid=None)

    def watch(self) -> None:
        self._look()
        assert self._launcher is not None
        dead = [slot for slot, learner in self._learners.items() if not _alive(learner)]
        if not dead and self._launcher.poll() is None:
            return
        for slot in dead:
            self.notes.add("ended", slot=slot, pid=self._learners[slot].pid, status=None)
        self._kill()
        self.start()

    def pid(self, slot: int) -> int | None:
        self._look()
        learner = self._learners.get(slot)
        return learner.pid if learner is not None and _alive(learner) else None

    def close(self) -> int:
        assert self._launcher is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_ENDS_S)
        return self._kill()

    def _files(self) -> list[Path]:
        return list(self.folder.glob("learner-*.jsonl"))

    def _look(self) -> None:
        """Learn the process ids of learners, from the names of their files."""
        if len(self._learners) < self.slots:
            for file in self._files():
                slot, pid = map(int, file.stem.split("-")[1:])
                if file not in self._old and slot not in self._learners:
                    with contextlib.suppress(psutil.NoSuchProcess):  # `watch` sees horovodrun end
                        self._learners[slot] = psutil.Process(pid)

    def _kill(self) -> int:
        """Kill the launcher and all that it has started; return the number of learners that were alive."""
        assert self._launcher is not None
        living = sum(map(_alive, self._learners.values()))
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._launcher.kill()
        self._launcher.wait()
        return living


def job_of(settings: dict[str, Any], notes: Notes, log: IO[bytes]) -> Job:
    """Return the job of the scheme that `settings` names."""
    scheme = settings["scheme"]
    if scheme == "horovod":
        return Together(settings, notes, log)
    return (Joining if scheme == "hadpsgd" else _TorchFT)(settings, notes, log)


def _alive(learner: psutil.Process) -> bool:
    try:
        return learner.is_running() and learner.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
