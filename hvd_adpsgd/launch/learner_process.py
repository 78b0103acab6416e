"""Runs one learner, on its host, for the launcher of `run`.

The first line of stdin says what to run, each later one is the number of a signal to pass on. When stdin
ends, the launcher has ended, so the learner is ended, too; if this process is killed, the kernel kills the
learner. What the learner reports (see notify_launcher) goes to stderr, in lines that begin with a mark.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time

from hvd_adpsgd.launch.processes import PIPE

STOP_S = 10.0  # after the end of the launcher, from SIGTERM to SIGKILL
_SECRET_FILE = "HVD_ADPSGD_JOIN_SECRET_FILE"
_PR_SET_PDEATHSIG, _libc = 1, ctypes.CDLL(None)


def main() -> int:
    """Run the learner; return its exit status, 128 + n if signal n has killed it."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # no byte more than a line
        told = json.loads(stdin.readline())
    reads, writes = os.pipe()
    env = {**os.environ, **told["env"], PIPE: f"{writes}:{os.fstat(writes).st_ino}"}
    env.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) // told["local_size"] or 1))
    passed = [writes]
    if told["secret"] and _SECRET_FILE not in env:
        passed.append(os.memfd_create("secret", 0))
        os.fchmod(passed[-1], 0o600)
        os.write(passed[-1], told["secret"].encode())
        env[_SECRET_FILE] = f"/dev/fd/{passed[-1]}"
    try:
        os.chdir(told["folder"])
        learner = subprocess.Popen(
            told["command"],
            env=env,
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"hvd_adpsgd run: {error.strerror}: {error.filename}", file=sys.stderr)
        return 127
    os.close(writes)
    _serve(learner, reads, told["mark"].encode())
    return learner.returncode if learner.wait() >= 0 else 128 - learner.returncode


def _serve(learner: subprocess.Popen[bytes], reads: int, mark: bytes) -> None:
    """Pass on signals and reports until the learner ends; end it if the launcher ends."""
    selector, ends = selectors.DefaultSelector(), float("inf")
    ended = os.pidfd_open(learner.pid)
    for fd in (0, reads, ended):
        selector.register(fd, selectors.EVENT_READ)
    while True:
        left_s = None if ends == float("inf") else max(0.0, ends - time.monotonic())
        ready = {key.fd for key, _ in selector.select(left_s)}
        if reads in ready:
            data = os.read(reads, 1 << 16)  # writes of lines shorter than PIPE_BUF arrive whole
            for line in data.splitlines():
                os.write(2, mark + line + b"\n")
            if not data:
                selector.unregister(reads)
        elif ended in ready:
            break
        if 0 in ready:
            data = os.read(0, 1 << 16)
            for number in data.split():
                learner.send_signal(int(number))
            if not data:
                selector.unregister(0)
                learner.terminate()
                ends = time.monotonic() + STOP_S
        if time.monotonic() >= ends:
            break
    if ends < float("inf"):  # with what it has started
        os.killpg(learner.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
