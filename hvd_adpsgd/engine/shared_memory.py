"""Memory shared by processes of one host: the node's mailbox, and the engines' outboxes.

A mailbox holds slots of corrections in memory that all learners of a super learner share.

The leader's engine fills one slot while the learners of the node read another, without a lock or an
extra barrier. The leader publishes before it submits its last gradient of a step, and learners read
after that step's all-reduce. If a learner read earlier, it could read the slot that is being filled.

The memory is an unnamed file in /dev/shm. Other learners map it through the descriptor of its creator,
which closes it once every learner has mapped it. A killed process therefore leaves no file behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.errors import WorldError

__all__ = ["Mailbox", "Outboxes", "host_name", "private_memory", "slots_of"]

SHARED_FOLDER = "/dev/shm"


def private_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed, page-aligned memory of this process, in huge pages where the system has them."""
    area = mmap.mmap(-1, max(nbytes, 1))
    area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, dtype=np.uint8, count=nbytes)


def slots_of(inner: Any) -> int:
    """Slots of corrections of a super learner: see store.pyx.

    Args:
        inner: its communicator (mpi4py); None for a learner alone.
    """
    return 2 if inner is None or inner.Get_size() == 1 else 3


class Mailbox:
    """Slots of `nbytes`, each with a row of `nflags` flags: three, or two for a learner alone.

    Args:
        nbytes: size of one slot.
        nflags: chunks in one slot.
        inner: communicator of the super learner (mpi4py); all of its learners make the mailbox
            together. None for a learner alone.

    Attributes:
        slots: the memory of each slot.
        flags: its flags.

    Raises:
        WorldError: on every learner, if the shared memory cannot be allocated or mapped.
    """

    def __init__(self, nbytes: int, nflags: int, inner: Any = None):
        row = -(-nflags // 64) * 64
        slot = -(-nbytes // 4096) * 4096
        alone = inner is None or inner.Get_size() == 1
        n = slots_of(inner)
        total = max(n * (slot + row), 1)  # a model may have nothing to average
        self.memory = private_memory(total) if alone else _shared_memory(total, inner)
        self.slots = [self.memory[i * slot : i * slot + nbytes] for i in range(n)]
        flags = self.memory[n * slot :]
        self.flags = [flags[i * row : i * row + nflags] for i in range(n)]


class Outboxes:
    """Memory in which each engine exposes its snapshots to peers on the same host.

    All leaders make it together: each gathers GATHERS times. Two leaders that cannot map each other's
    memory (different hosts or containers, no room) send their chunks through MPI.

    Args:
        nbytes: of each leader's memory.
        me: rank of this leader.
        gather: the values of all leaders, by rank; None for one that has failed.

    Attributes:
        own: address of this leader's memory, 0 if no peer maps it.
        mapped: address of each leader's memory here, 0 if the two do not share.
    """

    GATHERS = 2

    def __init__(self, nbytes: int, me: int, gather: Callable[[Any], list[Any]]):
        file = _try_file(nbytes)
        files = [found or (None, None) for found in gather((host_name(), file))]
        areas = [
            _try_map(other, nbytes) if other and host == files[me][0] and file else None
            for host, other in files
        ]
        reach = gather([area is not None for area in areas])
        # closed after that allgather: before it, a peer may still have to open the file by its descriptor
        if file is not None:
            os.close(file.handle)
        both = [
            bool(reach[me][i] and reach[i] and reach[i][me] and i != me) for i in range(len(areas))
        ]
        self._areas = [np.frombuffer(a, dtype=np.uint8) if a is not None else None for a in areas]
        self.mapped = [
            area.ctypes.data if area is not None and ok else 0
            for area, ok in zip(self._areas, both, strict=True)
        ]
        mine = self._areas[me]
        self.own = mine.ctypes.data if mine is not None and any(both) else 0


def host_name() -> str:
    """An identifier of the running system, the same in all its processes."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


class _File(NamedTuple):
    """An unnamed file, as its creator sees it: descriptor, process, device and inode."""

    handle: int
    pid: int
    device: int
    inode: int


def _try_file(nbytes: int) -> _File | None:
    """A new file in shared memory, or None if it would take more than half of the free space."""
    try:
        free = os.statvfs(SHARED_FOLDER)
        if free.f_bavail * free.f_frsize < 2 * nbytes:
            return None
        return _reserve(nbytes)
    except OSError:
        return None


def _try_map(file: _File, nbytes: int) -> mmap.mmap | None:
    try:
        return _map(file, nbytes)
    except (OSError, ValueError):  # not reachable from here, or too short
        return None


def _shared_memory(nbytes: int, inner: Any) -> NDArray[np.uint8]:
    """Map the same zeroed memory in all processes of `inner`."""
    file, error = None, None
    if inner.Get_rank() == 0:
        try:
            file = _reserve(nbytes)
        except OSError as problem:
            error = f"{nbytes / 2**20:.0f} MiB of shared memory in {SHARED_FOLDER}: {problem}"
    file, error = inner.bcast((file, error))
    area: mmap.mmap | None = None
    if error is None:
        try:
            area = _map(file, nbytes)
        except OSError as problem:
            error = f"mapping {nbytes / 2**20:.0f} MiB of {SHARED_FOLDER}: {problem}"
    errors = [e for e in inner.allgather(error) if e]
    if inner.Get_rank() == 0 and file is not None:
        os.close(file.handle)
    if errors or area is None:
        raise WorldError(
            f"{errors[0]}. The learners of a super learner share their corrections there: enlarge "
            "it, or run one learner per super learner (HVD_ADPSGD_SUPER_LEARNER_SIZE=1)."
        )
    return np.frombuffer(area, dtype=np.uint8, count=nbytes)


def _reserve(nbytes: int) -> _File:
    """A new file with allocated pages, so that no later write fails."""
    handle = os.open(SHARED_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(handle, 0, nbytes)
        made = os.fstat(handle)
    except OSError:
        os.close(handle)
        raise
    return _File(handle, os.getpid(), made.st_dev, made.st_ino)


def _map(file: _File, nbytes: int) -> mmap.mmap:
    """Map the file of any process of this host that shares our SHARED_FOLDER.

    A process id of another container may belong to a different process here, and a process with its own
    SHARED_FOLDER does not share memory with this one.
    """
    path = f"/proc/{file.pid}/fd/{file.handle}"
    found = os.stat(path)
    if (found.st_dev, found.st_ino) != (file.device, file.inode):
        raise OSError(f"process {file.pid} is another one here")
    if found.st_dev != os.stat(SHARED_FOLDER).st_dev:
        raise OSError(f"process {file.pid} has another {SHARED_FOLDER}")
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)
