"""Closes the sockets of a super learner's Horovod in forked children.

A forked child (a worker of a DataLoader) inherits them; as long as it holds them open, other learners would
not see this learner end.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

_recorded: list[tuple[int, int]] = []  # (descriptor, inode)


@contextlib.contextmanager
def closed_in_children() -> Iterator[None]:
    """Context manager: children forked later close the sockets that are opened inside it."""
    before = set(_sockets_open())
    try:
        yield
    finally:
        _recorded[:] = [*_open_still(), *(set(_sockets_open()) - before)]


def _sockets_open() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) of each open socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            found = os.stat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino


def _open_still() -> Iterator[tuple[int, int]]:
    """Yield the recorded sockets that are open, in this process or in the one that has forked it."""
    for handle, inode in _recorded:
        with contextlib.suppress(OSError):
            if os.stat(handle).st_ino == inode:
                yield handle, inode


def break_recorded() -> None:
    """Break the connections of the recorded sockets: what waits for them, in any thread, gets an error."""
    for handle, _ in _open_still():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as copy:
            # not those that listen: Gloo ends the process if its own fails; nor those that wake a thread
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens and copy.family != socket.AF_UNIX:
                copy.shutdown(socket.SHUT_RDWR)


def _close() -> None:
    for handle, _ in _open_still():
        os.close(handle)


os.register_at_fork(after_in_child=_close)
