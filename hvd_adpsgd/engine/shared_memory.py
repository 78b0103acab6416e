"""Memory shared by processes of one host: above all a super learner's buffers of corrections (slots).

The leader's engine fills one slot while all learners of the super learner read another one, without a lock or
an extra barrier. The leader publishes before it submits its last gradient of a step, and learners read after
that step's all-reduce. If a learner read earlier, it could read the slot that is being filled.

The memory is an unnamed file in /dev/shm. Other learners map it through the descriptor of its creator, which
closes it once every learner has mapped the file. A killed process therefore leaves no file behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.errors import TransportError, WorldError

SHARED_FOLDER = "/dev/shm"
NOTES = 128  # bytes in which the leader records which calls of publish() were deferred
_WIPE_ON_FORK, _POPULATE_WRITE = 18, 23  # MADV_* of Linux that Python does not name


def private_memory(nbytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed, page-aligned memory of this process, in huge pages where the system has them.

    Its pages are allocated at once, not when they are first touched, which would slow the first steps. A
    forked child (a worker of a data loader) finds zeros in this memory: otherwise each page that this process
    writes while the child runs would be copied.
    """
    # Python's default is MAP_SHARED: memory of a file, for which most systems have no huge pages.
    area = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK, _POPULATE_WRITE):
        # the three are refused by kernels without huge pages, before Linux 4.14, and before 5.14
        with contextlib.suppress(OSError):
            area.madvise(advice)
    return np.frombuffer(area, dtype=np.uint8, count=nbytes)


def slots_of(inner: Any) -> int:
    """Return the number of correction buffers (slots) of a super learner; store.pyx explains why.

    Args:
        inner: communicator of the super learner (mpi4py); None for a learner alone.
    """
    return 2 if inner is None or inner.Get_size() == 1 else 3


class SharedSlots:
    """Buffers of corrections (slots) that a super learner's learners map: three, or two for a learner alone.

    Args:
        nbytes: size of one slot in bytes.
        nflags: flags of one slot, one per chunk.
        inner: communicator of the super learner (mpi4py); all of its learners make their SharedSlots
            together. None for a learner alone.
        front: bytes before the slots; if not 0, the leader keeps `file` open so that peers on the host can
            map it. The leader's value counts; it becomes 0 if all would take more than half of the free
            space in SHARED_FOLDER.
        leader: rank of the leader in `inner`.

    Attributes:
        slots: the memory of each slot.
        flags: the flags of each slot.
        notes: NOTES bytes, in which the leader records which calls of publish were not deferred.
        front: the memory before the slots, None without it.
        file: the file of all this memory, on the leader, if there is a front; until `close`.

    Raises:
        WorldError: on every learner, if the shared memory cannot be allocated or mapped.
    """

    def __init__(
        self, nbytes: int, nflags: int, inner: Any = None, front: int = 0, leader: int = 0
    ):
        row = -(-nflags // 64) * 64
        slot = _pages(nbytes)
        n = slots_of(inner)
        total = n * (slot + row) + NOTES
        self.file: File | None = None
        if inner is None or inner.Get_size() == 1:
            front = self._map_alone(_pages(front), total)
        else:
            front = _pages(front) if _has_room(_pages(front) + total) else 0
            front = inner.bcast(front, root=leader)
            self.memory, self.file = _shared_memory(front + total, inner, bool(front), leader)
        self.front = self.memory[:front] if front else None
        self.slots = [self.memory[front + i * slot :][:nbytes] for i in range(n)]
        flags = self.memory[front + n * slot :]
        self.flags = [flags[i * row : i * row + nflags] for i in range(n)]
        self.notes = flags[n * row :][:NOTES]

    def _map_alone(self, front: int, total: int) -> int:
        """Allocate the memory of a learner alone, as a file if peers may map it; return `front`."""
        self.file = try_file(front + total) if front else None
        area = try_map(self.file, front + total) if self.file else None
        if area is None:
            self.close()
            self.memory = private_memory(total)
            return 0
        self.memory = np.frombuffer(area, dtype=np.uint8, count=front + total)
        return front

    def close(self) -> None:
        """Close the file: peers that have not mapped it yet cannot map it any more."""
        if self.file is not None:
            os.close(self.file.handle)
            self.file = None


def shared_table(columns: Sequence[Any], inner: Any = None) -> NDArray[np.void]:
    """Allocate a table that a super learner's learners share: each writes its own row, and reads all rows.

    A load or store of one int64 or float64 is atomic, of a longer column is not.

    Args:
        columns: of a row, as numpy.dtype takes them: (name, kind) or (name, kind, count), such as "i8", "f8",
            "S1000"; sizes are multiples of 8 bytes.
        inner: communicator of the super learner (mpi4py); all of its learners call this together. None for
            a learner alone.

    Returns:
        The rows by inner rank, all zeros.

    Raises:
        WorldError: on every learner, if the shared memory cannot be allocated or mapped.
    """
    row = np.dtype(list(columns))
    if inner is None or inner.Get_size() == 1:
        return np.zeros(1, row)
    width = -(-row.itemsize // 64) * 64  # each learner's row has cache lines of its own
    padded = np.dtype([*columns, ("", f"V{width - row.itemsize}")] if width > row.itemsize else row)
    memory, _ = _shared_memory(inner.Get_size() * width, inner, False, 0)
    return memory.view(padded)


def host_name() -> str:
    """An identifier of the host, the same in all of its processes: boot id of the kernel, and host name.

    Virtual machines that were resumed from one snapshot have the same boot id.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}:{socket.gethostname()}"
    except OSError as error:
        raise TransportError(
            f"the identifier of this host cannot be read: {error}. Raise the limit of open files "
            "(ulimit -n), or mount /proc in the container."
        ) from error


class File(NamedTuple):
    """Where other processes find an unnamed file: its creator's descriptor and pid, its device and inode."""

    handle: int
    pid: int
    device: int
    inode: int


def try_file(nbytes: int) -> File | None:
    """Create a file in shared memory; None if that fails or would take more than half of the free space."""
    try:
        return _reserve(nbytes) if _has_room(nbytes) else None
    except OSError:
        return None


def try_map(
    file: File, nbytes: int, writes: bool = True, offset: int = 0, touch: bool = True
) -> mmap.mmap | None:
    """Map `nbytes` bytes of a process's file; None if this process cannot reach it, or it is too short.

    `offset` is a multiple of the page size. `touch`: all pages are mapped at once, not when first used.
    """
    try:
        return _map(file, nbytes, writes, offset, touch)
    except (OSError, ValueError):
        return None


def _pages(nbytes: int) -> int:
    """Round up to whole pages; bytes."""
    return -(-nbytes // 4096) * 4096


def _has_room(nbytes: int) -> bool:
    try:
        free = os.statvfs(SHARED_FOLDER)
    except OSError:
        return False
    return free.f_bavail * free.f_frsize >= 2 * nbytes


def _shared_memory(
    nbytes: int, inner: Any, keep: bool, leader: int
) -> tuple[NDArray[np.uint8], File | None]:
    """Map the same zeroed memory in all processes of `inner`; return it, and the leader's file if `keep`."""
    file, error = None, None
    if inner.Get_rank() == leader:
        try:
            file = _reserve(nbytes)
        except OSError as problem:
            error = f"{nbytes / 2**20:.0f} MiB of shared memory in {SHARED_FOLDER}: {problem}"
    kept, own = None, file
    try:
        file, error = inner.bcast((file, error), root=leader)
        area: mmap.mmap | None = None
        if error is None:
            try:
                area = _map(file, nbytes)
            except OSError as problem:
                error = f"mapping {nbytes / 2**20:.0f} MiB of {SHARED_FOLDER}: {problem}"
        errors = [e for e in inner.allgather(error) if e]
        if errors or area is None:
            raise WorldError(
                f"{errors[0]}. The learners of a super learner share their corrections in {SHARED_FOLDER}: "
                "enlarge it, or run one learner per super learner (HVD_ADPSGD_SUPER_LEARNER_SIZE=1)."
            )
        kept = own if keep else None
        return np.frombuffer(area, dtype=np.uint8, count=nbytes), kept
    finally:
        if own is not None and kept is None:
            os.close(own.handle)


def _reserve(nbytes: int) -> File:
    """Create an unnamed file in SHARED_FOLDER with allocated pages, so that no later write fails."""
    handle = os.open(SHARED_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(handle, 0, nbytes)
        made = os.fstat(handle)
    except OSError:
        os.close(handle)
        raise
    return File(handle, os.getpid(), made.st_dev, made.st_ino)


def _map(
    file: File, nbytes: int, writes: bool = True, offset: int = 0, touch: bool = True
) -> mmap.mmap:
    """Map the file of a process that has the same SHARED_FOLDER as this one.

    The checks are needed because a process id of another container may belong to a different process here,
    and because a process with its own SHARED_FOLDER does not share memory with this one.

    Raises:
        OSError: if the file cannot be reached from this process.
    """
    # O_NONBLOCK: what a different process has under this number may be a pipe
    mode = os.O_NONBLOCK | (os.O_RDWR if writes else os.O_RDONLY)
    handle = os.open(f"/proc/{file.pid}/fd/{file.handle}", mode)
    try:
        found = os.fstat(handle)
        if (found.st_dev, found.st_ino) != (file.device, file.inode):
            raise OSError(f"process id {file.pid} belongs to another process here")
        if found.st_dev != os.stat(SHARED_FOLDER).st_dev:
            raise OSError(f"process {file.pid} has another {SHARED_FOLDER}")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if touch else 0)
        return mmap.mmap(handle, nbytes, flags, prot, offset=offset)
    finally:
        os.close(handle)
