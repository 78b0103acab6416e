"""Runs one learner, on its host, for the launcher of `run`.

The first line of stdin says what to run, each later one is the number of a signal to pass on. When stdin
ends, the launcher has ended, so the learner is ended, too; if this process is killed, the kernel kills the
learner. What the learner reports (see notify_launcher) goes to stderr, in lines that begin with a mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time

from hvd_adpsgd.launch.processes import PIPE, without_launchers

STOP_S = 10.0  # after the end of the launcher, from SIGTERM to SIGKILL
_SECRET_FILE = "HVD_ADPSGD_JOIN_SECRET_FILE"
_PR_SET_PDEATHSIG, _libc = 1, ctypes.CDLL(None)


def main() -> int:
    """Run the learner; return its exit status, 128 + n if signal n has killed it."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # no byte more than a line
        told = json.loads(stdin.readline())
    reads, writes = os.pipe()
    env = {**without_launchers(os.environ), **told["env"], PIPE: _path(writes)}
    env.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) // told["local_size"] or 1))
    if told["secret"] and _SECRET_FILE not in env:
        secret = os.memfd_create("secret")
        os.fchmod(secret, 0o600)
        os.write(secret, told["secret"].encode())
        env[_SECRET_FILE] = _path(secret)
    try:
        os.chdir(told["folder"])
        learner = subprocess.Popen(
            told["command"],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"hvd_adpsgd run: {error.strerror}: {error.filename}", file=sys.stderr)
        return 127
    if _serve(learner, reads, told["mark"].encode()):  # end what it has started, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(learner.pid, signal.SIGKILL)
    return learner.returncode if learner.wait() >= 0 else 128 - learner.returncode


def _path(fd: int) -> str:
    """Return the path of a file of this process, for a learner that a script starts: it inherits no files."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def _serve(learner: subprocess.Popen[bytes], reads: int, mark: bytes) -> bool:
    """Pass on signals and reports until the learner ends; return whether the job has ended, or is to end."""
    selector, ends, is_over = selectors.DefaultSelector(), float("inf"), False
    ended = target = os.pidfd_open(learner.pid)  # target: the learner itself, below a shell
    for fd in (0, reads, ended):
        selector.register(fd, selectors.EVENT_READ)
    while time.monotonic() < ends:
        left_s = None if ends == float("inf") else ends - time.monotonic()
        ready = {key.fd for key, _ in selector.select(left_s)}
        numbers = []
        if reads in ready:  # lines shorter than PIPE_BUF arrive whole
            for line in os.read(reads, 1 << 16).splitlines():
                os.write(2, mark + line + b"\n")
                with contextlib.suppress(ProcessLookupError):
                    target = os.pidfd_open(json.loads(line)["pid"])
        elif ended in ready:
            break
        if 0 in ready:
            data = os.read(0, 1 << 16)
            numbers = [int(number) for number in data.split()]
            if not data:
                selector.unregister(0)
                numbers, ends = [signal.SIGTERM], time.monotonic() + STOP_S
        for number in numbers:
            is_over |= number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(target, number)
                if number == signal.SIGKILL:
                    os.killpg(learner.pid, number)
    return is_over


if __name__ == "__main__":
    sys.exit(main())
