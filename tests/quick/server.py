"""Forks the learners of the tests from a process that has imported torch already: 0.3 CPU s each.

    mpirun ... python client.py NAME PROGRAM ...   asks, and is the process that the launcher sees
    python server.py NAME                          forks a holder for each client; ends with its stdin
    holder                                         forks the learner, and ends it if the client ends

A learner has the client's environment, folder, arguments and standard streams, and runs the program as
Python runs a script. Signals to the client go to the learner; the learner's status is the client's.
Unlike a learner that the launcher starts, it has another parent, and all learners of a test have the
same seed for hashes: tests that look at a learner's parent or memory start it fresh.
What the variable TEST_IMPORTS names, by comma, is imported like torch.
"""

import contextlib
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import struct
import sys
from types import ModuleType
from typing import NoReturn

import mpi4py  # noqa: F401  its MPI module would initialize MPI
import numpy as np
import torch  # noqa: F401

with contextlib.suppress(ImportError):
    import horovod.torch  # noqa: F401

for module in filter(None, os.environ.get("TEST_IMPORTS", "").split(",")):
    importlib.import_module(module)


def serve(name: str) -> list[str]:
    """Answer clients until standard input ends. Returns in each learner: its command line."""
    door = socket.socket(socket.AF_UNIX)
    door.bind("\0" + name)
    door.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for holders
    gc.freeze()
    os.write(1, b"ready\n")
    while True:
        ready, _, _ = select.select([door, 0], [], [])
        if 0 in ready:
            os._exit(0)
        client, _ = door.accept()
        if os.fork() == 0:
            door.close()
            return become_learner(client)
        client.close()


def become_learner(client: socket.socket) -> list[str]:
    """In the holder: receive the client's request and fork. Returns in the learner."""
    _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        os._exit(1)
    length, streams, _, _ = socket.recv_fds(client, 4, 3)
    request = client.recv(*struct.unpack("I", length), socket.MSG_WAITALL)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)  # before the fork, or the end of a short learner is not seen
    os.setsid()
    learner = os.fork()
    if learner:
        for stream in streams:
            os.close(stream)
        hold(client, learner, woken)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for number in (client.detach(), woken, waker, *streams):
        os.close(number)
    return take_over(*marshal.loads(request))


def hold(client: socket.socket, learner: int, woken: int) -> NoReturn:
    """Pass the client's signals to the learner, and the learner's status to the client."""
    while True:
        ready, _, _ = select.select([client, woken], [], [])
        if woken in ready:
            os.read(woken, 64)
        ended, status = os.waitpid(learner, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError):
                client.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
            os._exit(0)
        if client in ready:
            numbers = client.recv(64)
            if not numbers:
                os.killpg(0, signal.SIGKILL)  # the learner, its children, and this process
            for number in numbers:
                os.kill(learner, number)


def take_over(folder: bytes, arguments: list[str], environment: dict[bytes, bytes]) -> list[str]:
    """What Python and a launcher would have set before the script begins."""
    os.chdir(folder)
    os.environ.clear()
    os.environb.update(environment)
    sys.argv, sys.orig_argv = arguments, [sys.executable, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    np.random.seed()  # or all learners draw the same
    return arguments


if __name__ == "__main__":
    script = serve(sys.argv[1])[0]
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__file__ = script
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)
