"""Collectives of one communicator, of MPI or over sockets; a learner that waits in them sleeps between polls.

mpi4py does not keep the buffers of a non-blocking collective alive. The caller holds them in variables
until the request completes; with a temporary array MPI reads or writes freed memory, without an error.
"""

import pickle
from typing import Any

import numpy as np

from hvd_adpsgd.messaging.sockets import Communicator
from hvd_adpsgd.polling import polls


def wait(request: Any, ends: float | None = None) -> bool:
    """Whether an mpi4py request is complete by `ends`; sleeps between polls, which frees the core."""
    return any(request.Test() for _ in polls(ends))


def barrier(comm: Any) -> None:
    """Wait until all learners of `comm` have called this; sleeps between polls."""
    if isinstance(comm, Communicator):
        comm.allgather(None)
    else:
        wait(comm.Ibarrier())


def allgather_object(comm: Any, value: Any) -> list[Any]:
    """Return the values of all learners of `comm`, by rank; values travel pickled."""
    if isinstance(comm, Communicator):
        return comm.allgather(value)
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    count = np.array([data.size], dtype=np.int64)
    counts = np.empty(comm.Get_size(), dtype=np.int64)
    wait(comm.Iallgather(count, counts))
    everything = np.empty(int(counts.sum()), dtype=np.uint8)
    wait(comm.Iallgatherv(data, [everything, counts]))
    ends = np.cumsum(counts)
    return [
        pickle.loads(everything[end - n : end].tobytes())
        for end, n in zip(ends, counts, strict=True)
    ]
