"""Collectives of all learners: they wait asleep, and continue over the surviving learners.

mpi4py does not keep the buffers of a non-blocking collective alive. The caller holds them in variables
until the request completes; with a temporary array MPI reads or writes freed memory, without an error.
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
from hvd_adpsgd.errors import CollectiveMismatchError, PeerFailedError
from hvd_adpsgd.runtime.global_operations import counted
from hvd_adpsgd.runtime.membership import Membership

__all__ = ["Collectives", "allgather_object", "failed_comm_ranks", "wait"]

T = TypeVar("T")

log = logging.getLogger("hvd_adpsgd")

AGREEMENTS = 5  # attempts before a result of 0 is accepted
_LOOKS = 16  # Open MPI polls the launcher in every 8th call
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-6, 1e-3


def wait(request: Any, ends: float | None = None) -> bool:
    """Complete an mpi4py request; sleeps between polls, so that a waiting learner frees its core.

    Args:
        request: its buffers must be held by the caller.
        ends: deadline, of time.monotonic; polls at least once. None: no deadline.

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
    """Ranks in `comm` known to have exited without MPI_Finalize; empty without ULFM."""
    from mpi4py import MPI

    if not ulfm_enabled():
        return set()
    with contextlib.suppress(MPI.Exception):
        for _ in range(_LOOKS):  # MPI detects failures only inside its calls
            MPI.COMM_SELF.Iprobe()
        failed = comm.Get_failed()
        ranks = range(failed.Get_size())
        return set(failed.Translate_ranks(ranks, comm.Get_group()))
    return set()


class Collectives:
    """Operations over all learners, repeated over the surviving learners after a failure.

    Some learners may detect a failure while others complete the operation, and none can tell whether its
    peers have a result. So each operation ends with an agreement:

        1. a learner that detects a failure revokes the communicator, so that no peer blocks on it;
        2. all learners agree whether the operation succeeded on all;
        3. if not, the surviving learners shrink the communicator and repeat the operation.

    Attributes:
        comm: the learners that survived the last operation.
        ranks: ranks of these learners in the job, by rank in `comm`.
        on_failure: "continue" or "raise", once learners have failed.
        joining: this is a joining learner that has not joined yet.
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
        """Run an operation; all learners call this. `comm` and `ranks` shrink when learners have failed.

        Args:
            doing: what is done, for messages.
            operation: receives the communicator. Must not change its input, because it may be repeated.
                An exception of its own it must raise on all learners.

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

    def gather(self, doing: str, value: Any) -> list[Any]:
        """The values of all learners, by rank; a collective, see `run` and `gather_in`."""
        return self.run(doing, lambda comm: self.gather_in(comm, doing, value))

    def gather_in(self, comm: Any, doing: str, value: Any) -> list[Any]:
        """Inside an operation: the values of all learners, by rank.

        Every operation begins with it, so that learners in different operations raise instead of blocking.

        Raises:
            CollectiveMismatchError: on all learners, if they are not in the same operation.
        """
        told = allgather_object(comm, (doing, value))
        for rank, (other, _) in zip(self.ranks, told, strict=True):
            if other != told[0][0]:
                raise CollectiveMismatchError(
                    f"operations over all learners differ: learner {self.ranks[0]} is in {told[0][0]}, "
                    f"learner {rank} in {other}. Call the same operations in the same order on all learners."
                )
        return [value for _, value in told]

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
            self._continue_with(comm, doing)
        if self.on_failure == "raise" and not self.joining:
            self._require_all_learners(doing)
        return operation(comm)

    def _continue_with(self, comm: Any, doing: str) -> None:
        """Continue with `comm`, which the surviving learners share."""
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

    def _require_all_learners(self, doing: str) -> None:
        """Raise PeerFailedError if learners have failed; all learners of `comm` raise alike."""
        gone = self.gone()
        if gone:
            raise PeerFailedError(
                f"{doing}: learners {sorted(gone)} of {self._size} are gone, and HVD_ADPSGD_ON_FAILURE or "
                'hvd.on_failure says "raise". Save the model and restart, or go on with the others '
                'inside `with hvd.on_failure("continue")`.'
            )

    @contextlib.contextmanager
    def instead(self, on_failure: str) -> Iterator[None]:
        """Inside, `on_failure` is "continue" or "raise"."""
        before, self.on_failure = self.on_failure, on_failure
        try:
            yield
        finally:
            self.on_failure = before

    def gone(self) -> set[int]:
        """Learners that operations no longer include."""
        return set(range(self._size)) - set(self.ranks)

    def ended(self) -> set[int]:
        """Learners whose process is known to have exited. Does not block."""
        return self.gone() | {self.ranks[i] for i in failed_comm_ranks(self.comm)}

    def meet(self, comm: Any, ranks: tuple[int, ...]) -> None:
        """Continue with `comm`, which includes a super learner that has joined."""
        self.comm, self.ranks, self.joining = comm, ranks, False


def _attempt(comm: Any, operation: Callable[[Any], T]) -> Callable[[], T] | None:
    """A call that returns or raises the operation's outcome; None if MPI failed."""
    from mpi4py import MPI

    try:
        result = operation(comm)
    except MPI.Exception:
        with contextlib.suppress(MPI.Exception):  # a peer has revoked it already
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
    """Whether all learners of `comm` survive and succeeded; the same answer on all surviving learners.

    A result of 0 is repeated: while another thread sends messages, Open MPI 5.0's agreement sometimes
    returns 0 on all ranks although all ranks contributed 1.
    """
    for _ in range(AGREEMENTS):
        answer = _agreement(comm, success)
        if answer is not False:
            return bool(answer)
    return False


def _agreement(comm: Any, success: bool) -> bool | None:
    """One agreement; None, on all learners alike, if a learner has failed."""
    from mpi4py import MPI

    flag = np.array([success], dtype=np.intc)
    try:
        wait(comm.Iagree(flag))
    except MPI.Exception:
        return None
    return bool(flag[0])


def _without_failed(comm: Any) -> Any:
    """A communicator of the surviving learners; all of them call this after the same agreement.

    Shrink blocks, but Ishrink of Open MPI 5.0 fails on a revoked communicator.
    """
    from mpi4py import MPI

    with mpi_failures("going on without failed learners"):
        smaller = comm.Shrink()
        smaller.Set_errhandler(MPI.ERRORS_RETURN)
        comm.Free()
    return smaller
