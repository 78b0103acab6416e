"""SIGTERM to a learner, a scheduler's notice of preemption: its super learner leaves in order.

    SIGTERM, at one learner or several  -->  a byte in a pipe  -->  the thread of this module
    that learner                        ASKED in memory that the super learner shares
    the same thread of its mates        sees ASKED within LOOK_S
    leader                              engines finish their exchanges and announce their departure;
                                        operations over all learners continue without this super learner;
                                        then SAID
    all learners                        end by SIGTERM, once SAID, or some seconds after ASKED

If all learners of the job leave, the last one ends with status 75 instead, which its launcher reports.

The trainer's thread may be anywhere meanwhile: in a long computation, or in Horovod's all-reduce, waiting
for a learner that has ended. It takes part in nothing: when it next calls this library, `hold` keeps it.

A further SIGTERM changes nothing. A handler of the script's own, set before or after init(), replaces this.

SIGTERM to a learner that is in shutdown() is dropped: that returns in bounded time. Once it has met its peers
there, it may be in MPI_Finalize, after which a call of MPI by this thread would abort the job.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.lifecycle import shutdown, signal_pipe, signals

__all__ = ["Departure", "block_if_leaving", "unwatch", "watch"]

log = logging.getLogger("hvd_adpsgd")

DEPARTURE_S = 2.5  # longest wait for exchanges, and for the answers to departures
SAID_S = 3.5  # longest wait for SAID, whatever the leader does
LAST_S = 1.0  # longest wait of the first learner for the end of all others
LOOK_S = 0.1  # between two looks whether a mate has asked
SPREAD_S = (
    0.5  # the departure reaches all peers: seen before it, the end of the process is a failure
)
_FLUSH_S = 0.2
_HELD_S = 10.0  # the thread of this module has ended the process long before
_ASKED, _SAID = 0, 1
_BYTES = 65536  # as many as a pipe holds


class Departure:
    """How the super learner of this process leaves on SIGTERM.

    Args:
        name: of the super learner, for the line in the log.
        is_leader: this learner is its leader.
        flags: bytes that its learners share, 0 at first.
        is_alone: whether no other super learner trains.
        tell_learners: tells all other learners, so that their operations continue without this super learner.
        ends_last: whether all other learners of the job end within so many seconds; False at once on others
            than the first.
    """

    FLAGS = 2  # bytes

    def __init__(
        self,
        name: str,
        is_leader: bool,
        flags: NDArray[np.uint8],
        is_alone: Callable[[], bool],
        tell_learners: Callable[[], object],
        ends_last: Callable[[float], bool],
    ):
        self._name, self._is_leader, self._flags = name, is_leader, flags
        self._is_alone, self._ends_last = is_alone, ends_last
        self._tell_learners = tell_learners
        self._last_acts: list[Callable[[], object]] = []
        self._turn = threading.Lock()  # SIGTERM and shutdown(): the first one decides
        self._in_shutdown = False

    def at_leave(self, act: Callable[[], object]) -> None:
        """Call `act` before this process ends, in reverse order, on a thread beside the trainer's."""
        self._last_acts.append(act)

    def forget(self, act: Callable[[], object]) -> None:
        """Unregister `act`."""
        if act in self._last_acts:
            self._last_acts.remove(act)

    @property
    def is_asked(self) -> bool:
        """Whether a learner of this super learner was sent SIGTERM."""
        return bool(self._flags[_ASKED])

    def ask(self) -> None:
        """SIGTERM to this learner: its super learner leaves, unless this learner is in shutdown()."""
        with self._turn:
            if not self._in_shutdown:
                self._flags[_ASKED] = 1

    def enter_shutdown(self) -> None:
        """From now on SIGTERM to this learner changes nothing; no return if its super learner leaves."""
        with self._turn:
            self._in_shutdown = not self.is_asked
        block_if_leaving()

    def has_said(self) -> None:
        """The leader's departures are said: its mates do not wait for them."""
        if self._is_leader:
            self._flags[_SAID] = 1

    def leave(self) -> None:
        """Ask the mates to leave too, announce their departure to the peers, end; bounded by 5 s."""
        ends = time.monotonic() + SAID_S
        self._flags[_ASKED] = 1
        if self._is_leader:
            rest = "no other trains" if self._is_alone() else "the others train on without it"
            log.warning("SIGTERM: super learner %s leaves; %s.", self._name, rest)
        shutdown.finishes_within(self._act, SAID_S - SPREAD_S)
        if self._is_leader:
            time.sleep(SPREAD_S)
            self.has_said()
        while not self._flags[_SAID] and time.monotonic() < ends:
            time.sleep(5e-3)
        _end(shutdown.FAILED_STATUS if self._ends_last(LAST_S) else 0)

    def _act(self) -> None:
        if self._is_leader:
            self._last_acts.insert(0, self._tell_learners)  # last: a mean without it is final then
        while self._last_acts:
            act = self._last_acts.pop()
            try:
                act()
            except Exception as error:  # the others must be called too
                log.error("super learner %s, leaving: %s", self._name, error, exc_info=error)


_departure: Departure | None = None  # of the world of this process
_watched_by = 0  # the process whose thread runs; a forked child is another one
_reading = -1  # the pipe in which SIGTERM is a byte
_taking = threading.Lock()  # a byte is of the departure that it was taken for


def watch(departure: Departure | None) -> None:
    """From now on SIGTERM makes this super learner leave; None: it ends this process, as by default."""
    global _departure, _watched_by, _reading
    if departure is not None and _watched_by != os.getpid():
        reading = signals.hear(signal.SIGTERM, ends=True)
        if reading is None:
            log.debug("SIGTERM has a handler already, or is ignored: it will not make this leave.")
            return
        _watched_by, _reading = os.getpid(), reading
        threading.Thread(target=_attend, daemon=True, name="hvd_adpsgd.preemption").start()
    _departure = departure if _watched_by == os.getpid() else None


def unwatch() -> None:
    """shutdown() is over: what came during it is dropped, and the next SIGTERM ends this process."""
    with _taking:
        if _watched_by == os.getpid():
            _take()
        watch(None)


def block_if_leaving() -> None:
    """Keep the calling thread here if its super learner leaves; the process ends meanwhile."""
    departure = _departure
    if departure is not None and departure.is_asked:
        time.sleep(_HELD_S)
        _end()


def _attend() -> None:
    """The thread: waits for the signal, or for a mate that was sent it; then ends the process."""
    while not _is_due():
        pass
    departure = _departure
    if departure is None:
        _end()
    else:
        departure.leave()


def _is_due() -> bool:
    """Whether to leave, or to end where no world is left; waits for the signal for LOOK_S."""
    select.select([_reading], [], [], LOOK_S)
    with _taking:
        is_signalled, departure = _take(), _departure
        if departure is None:
            return is_signalled
        if is_signalled:
            departure.ask()
        return departure.is_asked


def _take() -> bool:
    """Whether SIGTERM came since the last call; with _taking, or the byte may be gone before it is read."""
    heard, _, _ = select.select([_reading], [], [], 0)
    return bool(heard and os.read(_reading, _BYTES))


def _end(status: int = 0) -> None:
    """End with what the script has printed: by SIGTERM, or with this status if it is not 0."""
    shutdown.finishes_within(shutdown.flush_output, _FLUSH_S)
    shutdown.set_running(False)
    if status:
        os._exit(status)
    signal_pipe.end_by(signal.SIGTERM)
