"""A job of the launcher, from its start to its exit status."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from subprocess import PIPE, Popen
from typing import Any

from hvd_adpsgd.launch import processes
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS, is_failure, status_of_job
from hvd_adpsgd.tools.doctor.hosts import Ssh, in_folder, ssh_command
from hvd_adpsgd.tools.run.output import read_lines, say, write

STOP_S = 30.0  # from a signal that ends the job to SIGKILL
_OF_SCRIPTS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)  # may kill before hvd.init()
_START_S = 5.0  # if the job cannot start: for other learners to say why
# Variables of this host and login, which would be wrong on another one.
_OF_THIS_HOST = re.compile(r"(HOSTNAME|PWD|OLDPWD|SHLVL|_|TMPDIR)$|SSH_|XDG_|DBUS_|BASH_FUNC_")


@dataclass(eq=False)
class Learner:
    rank: int
    host: str
    is_here: bool  # on the host of this process
    super_rank: int | None = None  # None until its hvd.init() has returned
    listener: str = ""  # address at which super learners can join, while it runs
    is_joining: bool = False  # it replaces a failed learner, and has not joined
    process: Popen[bytes] | None = None  # here: ssh, for another host

    def send(self, line: str) -> None:
        """Send a line to its process, if that runs."""
        with contextlib.suppress(BrokenPipeError):
            if self.process and self.process.stdin:
                self.process.stdin.write(line.encode() + b"\n")


async def _ended(process: Popen[bytes]) -> int:
    loop, ended, fd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(process.pid)
    loop.add_reader(fd, ended.set)
    await ended.wait()
    loop.remove_reader(fd)
    os.close(fd)
    return process.wait()


class Job:
    """A job, whose learner 0 serves the store at `address`; `replaces`: failed super learners start anew."""

    def __init__(
        self, command: list[str], learners: list[Learner], address: str, ssh: Ssh, replaces: bool
    ):
        self._command, self._learners, self._address = command, learners, address
        self._ssh, self._secret = ssh, secrets.token_hex(32) if replaces else ""
        self._mark = f"@{secrets.token_hex(16)} "  # before learners' reports; they do not know it
        self._running: list[asyncio.Task[None]] = []
        # statuses by rank, in order; none where a replacement has joined
        self._ends: dict[int, int] = {}
        self._attempts: Counter[int] = Counter()  # starts, by super_rank
        self._status: int | None = None  # of a job that cannot start, or that a signal ends

    async def run(self) -> int:
        """Run the job once; return its exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._interrupt, number)
        for number in _OF_SCRIPTS:
            loop.add_signal_handler(number, self._signal, number)
        self._start(self._learners, self._address)
        while self._running:
            await self._running.pop()
        failed = sorted(rank for rank, status in self._ends.items() if is_failure(status))
        status = self._status or status_of_job(list(self._ends.values()))
        if status == FAILED_STATUS and failed:
            say(f"learners {failed} have failed, others have trained to the end: status {status}.")
        return status

    def _start(self, learners: list[Learner], address: str, **told: str) -> None:
        port, hosts = processes.free_port(), [each.host for each in learners]
        for i, each in enumerate(learners):
            local = hosts[:i].count(each.host), hosts.count(each.host)
            given = {**processes.place(i, len(learners), *local, address, port), **told}
            self._running.append(asyncio.create_task(self._run(each, given)))

    async def _run(self, learner: Learner, given: dict[str, str]) -> None:
        command = [sys.executable, "-m", "hvd_adpsgd.launch.learner_process"]
        given |= {processes.REPLACES_FAILED: "1"} if self._secret else {}
        env = {"PYTHONUNBUFFERED": "1", **processes.environment(os.environ, given)}
        if not learner.is_here:
            env = {k: v for k, v in env.items() if not _OF_THIS_HOST.match(k)}
            remote = in_folder(os.getcwd(), os.environ.get("PYTHONPATH"), shlex.join(command))
            command = ssh_command(learner.host, self._ssh, remote, ["ServerAliveInterval=15"])
        request: dict[str, Any] = {"command": self._command, "env": env, "folder": os.getcwd()}
        local_size = [each.host for each in self._learners].count(learner.host)
        request |= {"local_size": local_size, "secret": self._secret, "mark": self._mark}
        # not asyncio's: its wait() also waits for the processes that a learner leaves behind
        process = learner.process = Popen(
            command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        learner.send(json.dumps(request))
        if self._status is not None:
            learner.send(str(int(signal.SIGTERM)))
        files = (process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)
        written = [asyncio.create_task(self._pass_on(learner, *pair)) for pair in files]
        status = await _ended(process)
        await asyncio.wait(written, timeout=1.0)
        self._note_end(learner, status if status >= 0 else 128 - status)

    async def _pass_on(self, learner: Learner, file: Any, to: Any) -> None:
        async for line in read_lines(file):
            line, is_marked, report = line.partition(self._mark.encode())
            if is_marked:
                self._note(learner, json.loads(report))
            try:
                if line:
                    await write(to, b"[%d] " % learner.rank + line)
            except OSError as error:
                say(f"the output cannot be written: {error.strerror}. All learners are ended.")
                self._stop(128 + signal.SIGPIPE, signal.SIGTERM)

    def _note(self, learner: Learner, told: dict[str, Any]) -> None:
        """Note a report of a learner: hvd.init() has returned, or it has joined in hvd.admit."""
        learner.super_rank, learner.listener = told["super_rank"], told["listener"]
        if learner.is_joining and told["is_member"]:
            learner.is_joining = False
            del self._ends[learner.rank]
            self._later(processes.LIVES_S, self._forget_starts, learner, learner.process)

    def _forget_starts(self, learner: Learner, process: object) -> None:
        if learner.process is process and learner.super_rank is not None:
            self._attempts[learner.super_rank] = 0

    def _note_end(self, learner: Learner, status: int) -> None:
        learner.process, learner.listener = None, ""
        if not learner.is_joining:
            self._ends[learner.rank] = status
        if all(each.is_joining for each in self._learners if each.process):
            # the job has ended, and replacements have not joined
            self._end_all(signal.SIGTERM, _START_S)
        if self._status is not None or status == 0:
            return
        if status != FAILED_STATUS:
            name = signal.strsignal(status - 128) if 128 < status < 128 + signal.NSIG else None
            how = f" ({name})" if name else ""
            say(f"learner {learner.rank} on {learner.host} has ended: status {status}{how}.")
        if all(each.super_rank is None for each in self._learners):
            say("It ended before hvd.init() returned: the job cannot start, all are ended.")
            self._stop(status, signal.SIGTERM, _START_S)
        elif self._secret and learner.super_rank is not None:
            self._replace(learner.super_rank)

    def _replace(self, super_rank: int) -> None:
        """Start a super learner anew, if it has failed, all its learners have ended, and others train."""
        those = [each for each in self._learners if each.super_rank == super_rank]
        listeners = [each.listener for each in self._learners if each.listener]
        others = [each.rank for each in self._learners if each not in those]
        is_over = any(self._ends.get(rank) in (0, FAILED_STATUS) for rank in others)
        has_failed = any(is_failure(self._ends.get(each.rank, 0)) for each in those)
        if self._status or is_over or not has_failed or any(each.process for each in those):
            return
        if not listeners:  # their reports are under way
            self._later(1.0, self._replace, super_rank)
            return
        self._attempts[super_rank] += 1
        if self._attempts[super_rank] > (most := processes.ATTEMPTS):
            say(f"super learner {super_rank} is not replaced again: {most} starts have failed.")
            return
        say(f"super learner {super_rank} is started anew; it joins when the others call hvd.admit.")
        for each in those:
            each.is_joining = True
        told = {"HVD_ADPSGD_JOIN": ",".join(listeners), "HVD_ADPSGD_JOIN_AS": str(super_rank)}
        self._start(those, "127.0.0.1", **told)

    def _interrupt(self, number: signal.Signals) -> None:
        again = self._status is not None
        say(f"{number.name}: all learners are {'killed' if again else 'sent it'}.")
        passed = signal.SIGTERM if number == signal.SIGHUP else number
        self._stop(128 + number, signal.SIGKILL if again else passed)

    def _stop(self, status: int, number: int, after_s: float = 0.0) -> None:
        """End the job with a status: send a signal to all learners; replace none any more."""
        self._status = status if self._status is None else self._status
        self._end_all(number, after_s)

    def _end_all(self, number: int, after_s: float) -> None:
        """Send a signal to all learners, and SIGKILL if that does not end them."""
        self._later(after_s, self._signal, number)
        self._later(after_s + STOP_S, self._signal, signal.SIGKILL)

    def _later(self, seconds: float, *call: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, *call)

    def _signal(self, number: int) -> None:
        for each in self._learners:
            if each.super_rank is not None or number not in _OF_SCRIPTS:
                each.send(str(int(number)))
