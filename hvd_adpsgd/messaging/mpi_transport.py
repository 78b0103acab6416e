"""Transports, which move point-to-point messages of learners: over MPI here, over sockets in `sockets`."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.failures import is_under_mpi, ulfm_enabled

Bytes = NDArray[np.uint8]

SEGMENT = 2**19  # largest number of bytes of a message (pickled ones may be larger)
_SPARES = 8  # most buffers of whole segments kept for later messages: new memory costs a page fault per 4 KiB
_LOOKS = 16  # MPI calls per check for failures: Open MPI polls the launcher in every 8th call


@runtime_checkable
class Transport(Protocol):
    """Moves messages between the places (ranks) 0, 1, ... of a communicator; one thread at a time.

    Attributes:
        failed: places whose process is known to have ended; messages to these are dropped.
        is_sending: whether buffers of messages that were sent must not change yet.
        is_busy: whether messages are in flight that move only while methods of this object are called.
    """

    failed: set[int]

    @property
    def is_sending(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    def send(self, place: int, tag: int, data: Any) -> None:
        """Send bytes without waiting."""

    def poll(self) -> Iterator[tuple[int, int, Bytes]]:
        """Yield (source, tag, bytes) of each message that has arrived, per source in the order of sending."""

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a message may have arrived."""

    def recycle(self, buffer: Bytes) -> None:
        """Take back a buffer that `poll` has yielded, and whose bytes are no longer needed."""

    def look_for_failures(self) -> None:
        """Update `failed` with the processes that have ended."""


def transport_of(comm: Any) -> Transport:
    """Return the transport over a communicator, which nothing else must use."""
    return comm if isinstance(comm, Transport) else MpiTransport(comm)


def is_of_mpi(error: Exception) -> bool:
    """Return whether `error` is an exception of mpi4py."""
    if not is_under_mpi():
        return False

    from mpi4py import MPI

    return isinstance(error, MPI.Exception)


def is_failure(error: Any) -> bool:
    """Return whether `error` is an mpi4py exception that reports the failure of a process."""
    if not is_of_mpi(error):
        return False

    from mpi4py import MPI

    kinds = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return error.Get_error_class() in kinds


def failed_comm_ranks(comm: Any) -> set[int]:
    """Return the ranks in `comm` of processes known to have exited; under MPI, ULFM must be enabled.

    MPI does not report processes that have called MPI_Finalize.
    """
    if isinstance(comm, Transport):
        comm.look_for_failures()
        return set(comm.failed)

    from mpi4py import MPI

    if not ulfm_enabled():
        return set()
    with contextlib.suppress(MPI.Exception):
        for _ in range(_LOOKS):  # MPI detects failures only inside its calls
            MPI.COMM_SELF.Iprobe()
        return _failed_of(comm)
    return set()


def exited(comm: Any, ranks: Sequence[int]) -> set[int]:
    """Return those of `ranks`, by rank in `comm`, whose process is known to have exited; does not wait."""
    return {ranks[comm_rank] for comm_rank in failed_comm_ranks(comm)}


def _failed_of(comm: Any) -> set[int]:
    from mpi4py import MPI

    failed = comm.Get_failed()
    if failed == MPI.GROUP_EMPTY or failed.Get_size() == 0:
        return set()
    everyone = comm.Get_group()
    try:
        return set(failed.Translate_ranks(range(failed.Get_size()), everyone))
    finally:
        everyone.Free()
        failed.Free()


class MpiTransport:
    """Messages over a communicator of mpi4py with errors returned.

    mpi4py does not keep the buffers of a non-blocking call alive: this object does, until MPI is done.
    """

    def __init__(self, comm: Any):
        from mpi4py import MPI

        self.failed: set[int] = set()
        self._acknowledged: set[int] = set()
        self._comm = comm
        # by source: (request, buffer, tag) of unfinished receives, in the order of sending
        self._receiving: dict[int, deque[tuple[Any, Bytes, int]]] = {}
        self._sending: list[tuple[Any, Any]] = []  # (request, buffer) of unfinished sends
        # announce_departure sends on another thread than the one that polls. Without the lock, a send between
        # the look at all requests and the new list would be lost, and its buffer freed while MPI reads it.
        self._lock = threading.Lock()
        self._spare: list[Bytes] = []  # buffers of whole segments, for reuse
        self._status = MPI.Status()
        self._any_source, self._any_tag, self._byte = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.BYTE
        self._mpi_exception: type[Exception] = MPI.Exception

    @property
    def is_sending(self) -> bool:
        return bool(self._sending)

    @property
    def is_busy(self) -> bool:
        """Whether messages are in flight: MPI moves large ones only inside its calls."""
        return bool(self._sending or self._receiving)

    def send(self, place: int, tag: int, data: Any) -> None:
        """See Transport."""
        if place in self.failed:
            return
        try:
            with self._lock:
                request = self._comm.Isend([data, self._byte], place, tag)
                if not request.Test():
                    self._sending.append((request, data))
        except self._mpi_exception as error:
            self._require_failure(error)
            self.failed.add(place)

    def _reap(self) -> None:
        if self._sending:
            with self._lock:
                self._sending = [sent for sent in self._sending if not self._is_sent(sent[0])]

    def _is_sent(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi_exception as error:
            self._require_failure(error)
            return True

    def poll(self) -> Iterator[tuple[int, int, Bytes]]:
        """See Transport."""
        while (message := self._probe()) is not None:
            self._receive(message)
        for source in list(self._receiving):
            yield from self._deliver(source)
        self._reap()

    def _probe(self) -> Any:
        try:
            return self._comm.Improbe(self._any_source, self._any_tag, self._status)
        except self._mpi_exception as error:
            self._require_failure(error)
            self.look_for_failures()
            return None

    def _receive(self, message: Any) -> None:
        """Start to receive a matched message; messages of a source are delivered in the order of sending."""
        status = self._status
        source, tag = status.source, status.tag
        count = status.Get_count(self._byte)
        is_whole = count == SEGMENT and self._spare
        buffer = self._spare.pop() if is_whole else np.empty(count, dtype=np.uint8)
        try:
            request = message.Irecv([buffer, self._byte])
        except self._mpi_exception as error:
            self._require_failure(error)
            self.failed.add(source)
            return
        self._receiving.setdefault(source, deque()).append((request, buffer, tag))

    def _deliver(self, source: int) -> Iterator[tuple[int, int, Bytes]]:
        arriving = self._receiving[source]
        while arriving:
            request, buffer, tag = arriving[0]
            try:
                if not request.Test():
                    return
            except self._mpi_exception as error:
                self._require_failure(error)
                self.failed.add(source)
                arriving.clear()
                break
            arriving.popleft()
            yield source, tag, buffer
        del self._receiving[source]

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`: MPI has no way to wait for a message with a time limit."""
        time.sleep(seconds)

    def recycle(self, buffer: Bytes) -> None:
        """See Transport."""
        if buffer.size == SEGMENT and len(self._spare) < _SPARES:
            self._spare.append(buffer)

    def look_for_failures(self) -> None:
        """Update `failed` from MPI, and acknowledge failures: else MPI refuses to receive from any source."""
        if not ulfm_enabled():
            return
        with contextlib.suppress(self._mpi_exception):
            found = _failed_of(self._comm)
            if found - self._acknowledged:
                self._comm.Ack_failed()
                self._acknowledged |= found
                self.failed |= found

    def _require_failure(self, error: Any) -> None:
        """Raise the mpi4py exception `error` again, unless it reports the failure of a process."""
        if not is_failure(error):
            raise error
