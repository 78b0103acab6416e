"""What all learners do together through MPI: wait without burning a core, go on without the lost.

mpi4py does not keep the buffers of a non-blocking collective alive: whoever posts one holds them in
variables until it is complete. A temporary array as an argument gives wrong results in silence.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from hvd_adpsgd.errors import PeerFailedError, TransportError

__all__ = [
    "allgather_object",
    "failed_comm_ranks",
    "mpi_failures",
    "run_collective",
    "ulfm_enabled",
    "wait",
]

T = TypeVar("T")

AGREEMENTS = 5  # asked before a no is believed
_LOOKS = 16  # Open MPI looks at the launcher's news in every 8th call
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-6, 1e-3


def wait(request: Any, ends: float | None = None) -> bool:
    """Complete an mpi4py request, asleep between looks: a waiting learner leaves its core to others.

    Args:
        request: its buffers must be held by the caller.
        ends: look at least once, and not after this time of time.monotonic; None: no bound.

    Returns:
        Whether the request is complete.
    """
    pause = _SHORTEST_PAUSE_S
    while not request.Test():
        if ends is not None and time.monotonic() > ends:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


def allgather_object(comm: Any, value: Any) -> list[Any]:
    """The values of all learners of `comm`, by rank, through pickle."""
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


def ulfm_enabled() -> bool:
    """Whether Open MPI runs with ULFM, so that processes outlive others' end."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")  # noqa: SIM112


def failed_comm_ranks(comm: Any) -> set[int]:
    """Who of a communicator is known to have ended without MPI_Finalize; nobody without ULFM."""
    from mpi4py import MPI

    if not ulfm_enabled():
        return set()
    with contextlib.suppress(MPI.Exception):
        for _ in range(_LOOKS):  # MPI learns of an end only while it is called
            MPI.COMM_SELF.Iprobe()
        failed = comm.Get_failed()
        ranks = range(failed.Get_size())
        return set(failed.Translate_ranks(ranks, comm.Get_group()))
    return set()


def run_collective(comm: Any, doing: str, operation: Callable[[Any], T]) -> tuple[T, Any]:
    """Run a collective operation, again without the learners that failed meanwhile.

    A loss may be noticed by some learners and not by others, and a learner that has its result
    cannot know whether the others have theirs. So all agree on it:

        1. whoever notices revokes the communicator: nobody waits any longer;
        2. all agree whether everybody was successful;
        3. if not, the living make a communicator of their own, and start again.

    Args:
        comm: all learners that take part; each calls this.
        doing: what is done, for messages.
        operation: gets the communicator. Must leave its input as it is. What it raises itself it
            must raise on all learners.

    Returns:
        The operation's result and the communicator it was reached on, `comm` if nobody failed.

    Raises:
        PeerFailedError, TransportError: if MPI fails and ULFM is off.

    Source: Bland et al., Post-failure recovery of MPI communication capability, IJHPCA 2013.
    """
    if not ulfm_enabled():
        with mpi_failures(doing):
            return operation(comm), comm
    while True:
        outcome = _attempt(comm, operation)
        if _all_agree(comm, outcome is not None):
            assert outcome is not None
            return outcome(), comm
        comm = _without_lost(comm)


def _attempt(comm: Any, operation: Callable[[Any], T]) -> Callable[[], T] | None:
    """What returns or raises the operation's outcome; None if MPI failed."""
    from mpi4py import MPI

    try:
        result = operation(comm)
    except MPI.Exception:
        with contextlib.suppress(MPI.Exception):  # revoked by another already
            comm.Revoke()
        return None
    except Exception as error:
        return _raiser(error)
    return lambda: result


def _raiser(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def _all_agree(comm: Any, success: bool) -> bool:
    """Whether all learners of `comm` live and were successful; the same answer on all living.

    A no is asked again: beside another thread's messages Open MPI 5.0's agreement now and then gives
    0 where everybody said 1, to all alike.
    """
    for _ in range(AGREEMENTS):
        answer = _agreement(comm, success)
        if answer is not False:
            return bool(answer)
    return False


def _agreement(comm: Any, success: bool) -> bool | None:
    """One agreement; None if somebody has failed, on all alike."""
    from mpi4py import MPI

    flag = np.array([success], dtype=np.intc)
    try:
        wait(comm.Iagree(flag))
    except MPI.Exception:
        return None
    return bool(flag[0])


def _without_lost(comm: Any) -> Any:
    """A communicator of the living; all of them have come to the same place already.

    Shrink blocks, but Ishrink of Open MPI 5.0 fails on a revoked communicator.
    """
    from mpi4py import MPI

    with mpi_failures("going on without failed learners"):
        smaller = comm.Shrink()
        smaller.Set_errhandler(MPI.ERRORS_RETURN)
        comm.Free()
    return smaller


@contextlib.contextmanager
def mpi_failures(doing: str) -> Iterator[None]:
    """Turn MPI's exceptions into ours.

    Args:
        doing: what is done, for the message.

    Raises:
        PeerFailedError: if a learner failed.
        TransportError: if MPI failed otherwise.
    """
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        kind = error.Get_error_class()
        text = error.Get_error_string()
        if kind in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED):
            raise PeerFailedError(
                f"{doing}: a learner failed meanwhile ({text}). Run under Open MPI with "
                "`--with-ft ulfm` to go on without it.",
                code=kind,
            ) from error
        raise TransportError(
            f"{doing}: MPI failed ({text}). Start the job again.", code=kind
        ) from error
