"""The node's mailbox: two slots of corrections in memory that all its learners share.

The leader's engine fills one slot while the learners of the node read the other. No lock and no
barrier of its own: the leader publishes before it hands in its last gradient of a step, and the
learners read after the all-reduce of that step.

The memory is a file of /dev/shm whose name is removed as soon as every learner has mapped it, so a
killed job leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.errors import WorldError

__all__ = ["Mailbox", "private_memory"]

SHARED_FOLDER = "/dev/shm"


def private_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed, page-aligned memory of this process, in huge pages where the system has them."""
    area = mmap.mmap(-1, max(nbytes, 1))
    area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, dtype=np.uint8, count=nbytes)


class Mailbox:
    """Two slots of `nbytes` and two rows of `nflags` flags.

    Args:
        nbytes: size of one slot.
        nflags: chunks in one slot.
        inner: communicator of the super learner (mpi4py); all of its learners make the mailbox
            together. None for a learner alone.

    Raises:
        WorldError: on every learner, if the shared memory cannot be had.
    """

    def __init__(self, nbytes: int, nflags: int, inner: Any = None):
        row = -(-nflags // 64) * 64
        slot = -(-nbytes // 4096) * 4096
        total = 2 * slot + 2 * row
        alone = inner is None or inner.Get_size() == 1
        self.memory = private_memory(total) if alone else _shared_memory(total, inner)
        self.slots = [self.memory[i * slot : i * slot + nbytes] for i in (0, 1)]
        flags = self.memory[2 * slot :]
        self.flags = [flags[i * row : i * row + nflags] for i in (0, 1)]


def _shared_memory(nbytes: int, inner: Any) -> NDArray[np.uint8]:
    """Map the same zeroed memory in all processes of `inner`."""
    path, error = None, None
    if inner.Get_rank() == 0:
        try:
            path = _reserve(nbytes)
        except OSError as problem:
            error = f"{nbytes / 2**20:.0f} MiB of shared memory in {SHARED_FOLDER}: {problem}"
    path, error = inner.bcast((path, error))
    area = None
    if error is None:
        try:
            area = _map(path, nbytes)
        except OSError as problem:
            error = f"mapping {nbytes / 2**20:.0f} MiB of {SHARED_FOLDER}: {problem}"
    errors = [e for e in inner.allgather(error) if e]
    if inner.Get_rank() == 0 and path is not None:
        os.unlink(path)
    if errors:
        raise WorldError(
            f"{errors[0]}. The learners of a super learner share their corrections there: enlarge "
            "it, or run one learner per super learner (HVD_ADPSGD_SUPER_LEARNER_SIZE=1)."
        )
    return np.frombuffer(area, dtype=np.uint8, count=nbytes)


def _reserve(nbytes: int) -> str:
    """A new file whose pages really exist, so that no later write can fail."""
    handle, path = tempfile.mkstemp(prefix="hvd_adpsgd.", dir=SHARED_FOLDER)
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return path


def _map(path: str, nbytes: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)
