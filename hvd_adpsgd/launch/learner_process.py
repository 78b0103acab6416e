"""Runs one learner, on its host, for the launcher of `run`.

The first line of stdin says what to run, each later one is the number of a signal to pass on. When stdin
ends, the launcher has ended, so the learner is ended, too; if this process is killed, a guard kills the
learner, and what it has started. What the learner reports (see notify_launcher) goes to stderr, in lines that
begin with a mark.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys

from hvd_adpsgd.launch.processes import GIVEN, PIPE, without_launchers

STOP_S = 10  # after the end of the launcher, from SIGTERM to SIGKILL
_SECRET_FILE = "HVD_ADPSGD_JOIN_SECRET_FILE"
# $0: a process group, which is killed if the pipe to this shell is closed without a word.
_GUARD = 'exec >/dev/null 2>&1; read -r word || kill -9 "-$0"'


def main() -> int:
    """Run the learner; return its exit status, 128 + n if signal n has killed it."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # no byte more than a line
        told = json.loads(stdin.readline())
    reads, writes = os.pipe()
    files = f"/proc/{os.getpid()}/fd"  # for a learner that a script starts: it inherits no files
    env = {**without_launchers(os.environ), **told["env"], PIPE: f"{files}/{writes}"}
    env.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) // told["local_size"] or 1))
    if told["secret"] and _SECRET_FILE not in env:
        secret = os.memfd_create("secret")
        os.fchmod(secret, 0o600)
        os.write(secret, told["secret"].encode())
        env |= {_SECRET_FILE: f"{files}/{secret}", GIVEN: f"{env[GIVEN]},{_SECRET_FILE}"}
    try:
        os.chdir(told["folder"])
        learner = subprocess.Popen(
            told["command"], env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        print(f"hvd_adpsgd run: {error.strerror}: {error.filename}", file=sys.stderr)
        return 127
    # not PR_SET_PDEATHSIG, which would end a shell, but not the learner below it
    guard = ["/bin/sh", "-c", _GUARD, str(learner.pid)]
    guarding = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
    is_over = _serve(learner, reads, told["mark"].encode())
    guarding.communicate(b"" if is_over else b"ended\n")
    return learner.returncode if learner.wait() >= 0 else 128 - learner.returncode


def _serve(learner: subprocess.Popen[bytes], reads: int, mark: bytes) -> bool:
    """Pass on signals and reports until the learner ends; return whether the job has ended, or is to end."""
    ended = target = os.pidfd_open(learner.pid)  # target: the learner itself, below a shell
    files, is_over, numbers = [0, reads, ended], False, [0]
    while signal.SIGKILL not in numbers:
        ready, *_ = select.select(files, [], [])
        numbers = []
        if reads in ready:  # lines shorter than PIPE_BUF arrive whole
            for line in os.read(reads, 1 << 16).splitlines():
                os.write(2, mark + line + b"\n")
                with contextlib.suppress(ProcessLookupError):
                    target = os.pidfd_open(json.loads(line)["pid"])
        elif ended in ready:
            numbers = [signal.SIGKILL]  # for a learner whose shell was killed
        elif data := os.read(0, 1 << 16):
            numbers = [int(number) for number in data.split()]
            is_over |= not {signal.SIGINT, signal.SIGTERM, signal.SIGKILL}.isdisjoint(numbers)
        else:
            files.remove(0)
            numbers, is_over = [signal.SIGTERM], True
            signal.alarm(STOP_S)  # ends this process, so that the guard kills the learner
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(target, number)
    return is_over


if __name__ == "__main__":
    sys.exit(main())
