"""What all learners do together through MPI: wait without burning a core, go on without who failed.

mpi4py does not keep the buffers of a non-blocking collective alive: whoever posts one holds them in
variables until it is complete. A temporary array as an argument gives wrong results in silence.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from hvd_adpsgd.engine.failures import mpi_failures, ulfm_enabled
from hvd_adpsgd.errors import PeerFailedError
from hvd_adpsgd.runtime.global_operations import counted
from hvd_adpsgd.runtime.membership import Membership

__all__ = ["Collectives", "allgather_object", "failed_comm_ranks", "wait"]

T = TypeVar("T")

log = logging.getLogger("hvd_adpsgd")

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


class Collectives:
    """Operations over all learners, run again without those that failed meanwhile.

    A failure may be noticed by some learners and not by others, and a learner that has its result
    cannot know whether the others have theirs. So all agree on it:

        1. whoever notices revokes the communicator: nobody waits any longer;
        2. all agree whether everybody was successful;
        3. if not, the living make a communicator of their own, and start again.

    Attributes:
        comm: the learners that lived at the end of the last operation.
        ranks: theirs, by their rank in `comm`.
        on_failure: what is done without those that are gone: "continue" or "raise".
        joining: this is a joining learner that has not met the others yet.
        before: called before each operation.

    Source: Bland et al., Post-failure recovery of MPI communication capability, IJHPCA 2013.
    """

    def __init__(
        self,
        comm: Any,
        rank: int,
        ranks: tuple[int, ...],
        size: int,
        membership: Membership,
        on_failure: str,
        joining: bool,
    ):
        self.comm, self.ranks = comm, ranks
        self.on_failure, self.joining = on_failure, joining
        self.before: list[Callable[[], object]] = []
        self._rank, self._size, self._membership = rank, size, membership

    def run(self, doing: str, operation: Callable[[Any], T]) -> T:
        """Run one; all learners call this. `comm` and `ranks` change when learners have failed.

        Args:
            doing: what is done, for messages.
            operation: gets the communicator. Must leave its input as it is. What it raises itself it
                must raise on all learners.

        Returns:
            What the operation returns.

        Raises:
            PeerFailedError: on all learners, if one has failed and `on_failure` says "raise".
            PeerFailedError, TransportError: if MPI fails and ULFM is off.
        """
        with counted(doing):
            for call in list(self.before):
                call()
            return self._run(doing, operation)

    def _run(self, doing: str, operation: Callable[[Any], T]) -> T:
        if not ulfm_enabled():
            with mpi_failures(doing):
                return operation(self.comm)
        comm = self.comm
        while True:
            outcome = _attempt(comm, functools.partial(self._checked, doing, operation))
            if _all_agree(comm, outcome is not None):
                assert outcome is not None
                return outcome()
            comm = _without_failed(comm)

    def _checked(self, doing: str, operation: Callable[[Any], T], comm: Any) -> T:
        if comm is not self.comm:
            self._go_on_with(comm, doing)
        if self.on_failure == "raise" and not self.joining:
            self._require_everybody(doing)
        return operation(comm)

    def _go_on_with(self, comm: Any, doing: str) -> None:
        """`comm` is of the living."""
        ranks = tuple(allgather_object(comm, self._rank))
        gone = sorted(set(self.ranks) - set(ranks))
        self.comm, self.ranks = comm, ranks
        self._membership.mates_ended(gone)
        if self._rank == ranks[0]:
            log.warning(
                "%s: learners %s are gone; operations over all learners go on with the other %d.",
                doing,
                gone,
                len(ranks),
            )

    def _require_everybody(self, doing: str) -> None:
        """The same outcome on all learners of `comm`."""
        gone = self.gone()
        if gone:
            raise PeerFailedError(
                f"{doing}: learners {sorted(gone)} of {self._size} are gone, and HVD_ADPSGD_ON_FAILURE or "
                'hvd.on_failure says "raise". Save the model and restart, or go on with the others '
                'inside `with hvd.on_failure("continue")`.'
            )

    @contextlib.contextmanager
    def instead(self, on_failure: str) -> Iterator[None]:
        """Inside, "continue" or "raise"."""
        before, self.on_failure = self.on_failure, on_failure
        try:
            yield
        finally:
            self.on_failure = before

    def gone(self) -> set[int]:
        """Learners without whom operations go on."""
        return set(range(self._size)) - set(self.ranks)

    def ended(self) -> set[int]:
        """Learners whose process is known to have ended. Waits for nobody."""
        return self.gone() | {self.ranks[i] for i in failed_comm_ranks(self.comm)}

    def meet(self, comm: Any, ranks: tuple[int, ...]) -> None:
        """Go on with those who live and a super learner that has joined them, of which this may be one."""
        self.comm, self.ranks, self.joining = comm, ranks, False


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


def _without_failed(comm: Any) -> Any:
    """A communicator of the living; all of them have come to the same place already.

    Shrink blocks, but Ishrink of Open MPI 5.0 fails on a revoked communicator.
    """
    from mpi4py import MPI

    with mpi_failures("going on without failed learners"):
        smaller = comm.Shrink()
        smaller.Set_errhandler(MPI.ERRORS_RETURN)
        comm.Free()
    return smaller
