"""Departure: after SIGTERM to a learner, a scheduler's notice of preemption, its super learner leaves.

    SIGTERM, at one learner or several  -->  a byte in a pipe  -->  the thread of this module
    that learner                        sets the flag ASKED in memory that the super learner shares
    this module's thread in its mates   (the other learners of its super learner) sees ASKED within LOOK_S
    leader                              stops the engines, which finish their exchanges and announce the
                                        departure; notifies all other learners, whose operations continue
                                        without this super learner; then sets the flag ANNOUNCED
    all learners                        end by SIGTERM, once ANNOUNCED is set, or some seconds after ASKED

If all learners of the job leave, the last one ends with status 75 instead, which its launcher reports.

The trainer's thread may be anywhere meanwhile: in a long computation, or in Horovod's all-reduce, waiting
for a learner that has ended. It takes no part in the departure: when it next calls this library,
`block_if_leaving` blocks it until the process ends.

A further SIGTERM has no effect. If the script sets a handler of its own, before or after init(), SIGTERM
runs that handler, and the super learner does not leave.

SIGTERM to a learner that is in shutdown() has no effect, because shutdown() returns in bounded time. After
its barrier the learner may be in MPI_Finalize, and then a call of MPI by this thread would abort the job.
"""

import ctypes
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
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
from hvd_adpsgd.polling import polls

log = logging.getLogger("hvd_adpsgd")

DEPARTURE_S = 2.5  # longest wait for running exchanges, and for the peers' answers to the departure
ANNOUNCED_S = 3.5  # longest wait for the leader's flag ANNOUNCED
LAST_S = 1.0  # longest wait of the first surviving learner for all other processes to end
LOOK_S = 0.1  # time between two polls of the flag ASKED
SPREAD_S = 0.5  # time until all peers know of the departure; before, an end counts as a failure
_FLUSH_S = 0.2
_HELD_S = 10.0  # bound of block_if_leaving; this module's thread ends the process earlier
_ASKED, _ANNOUNCED = 0, 1
_BYTES = 65536  # capacity of a pipe, so that one read empties it


class Departure:
    """How the super learner of this process leaves on SIGTERM.

    Args:
        name: name of the super learner, for the log.
        is_leader: whether this learner is the leader of its super learner.
        flags: FLAGS bytes of memory shared by the super learner's learners, initially 0.
        is_alone: returns whether no other super learner trains.
        notify_learners: notifies all other learners, so that their operations continue without this super
            learner.
        ends_last: waits up to so many seconds, and returns whether all other learners of the job have ended;
            returns False at once unless this is the first learner that still runs.
    """

    FLAGS = 2  # number of bytes in `flags`

    def __init__(
        self,
        name: str,
        is_leader: bool,
        flags: NDArray[np.uint8],
        is_alone: Callable[[], bool],
        notify_learners: Callable[[], object],
        ends_last: Callable[[float], bool],
    ):
        self._name, self._is_leader, self._flags = name, is_leader, flags
        self._is_alone, self._ends_last = is_alone, ends_last
        self._notify_learners = notify_learners
        self._last_acts: list[Callable[[], object]] = []
        self._turn = threading.Lock()  # of SIGTERM and shutdown(), only the first takes effect
        self._in_shutdown = False

    def at_leave(self, act: Callable[[], object]) -> None:
        """Register `act` for the departure: called in reverse order, on a thread beside the trainer's."""
        self._last_acts.append(act)

    def forget(self, act: Callable[[], object]) -> None:
        """Unregister `act`, so that it is not called when the super learner leaves."""
        if act in self._last_acts:
            self._last_acts.remove(act)

    @property
    def is_asked(self) -> bool:
        """Whether a learner of this super learner was sent SIGTERM."""
        return bool(self._flags[_ASKED])

    def ask(self) -> None:
        """Make the super learner leave, after SIGTERM to this learner, unless it is in shutdown()."""
        with self._turn:
            if not self._in_shutdown:
                self._flags[_ASKED] = 1

    def enter_shutdown(self) -> None:
        """Ignore SIGTERM to this learner from now on; never return if its super learner leaves already."""
        with self._turn:
            self._in_shutdown = not self.is_asked
        block_if_leaving()

    def note_announced(self) -> None:
        """On the leader, set the flag ANNOUNCED: the departure is announced, so all its learners may end."""
        if self._is_leader:
            self._flags[_ANNOUNCED] = 1

    def leave(self) -> None:
        """Leave the job within 5 s: notify this super learner's learners and all peers, end the process."""
        ends = time.monotonic() + ANNOUNCED_S
        self._flags[_ASKED] = 1
        if self._is_leader:
            rest = "no other trains" if self._is_alone() else "the others train on without it"
            log.warning("SIGTERM: super learner %s leaves; %s.", self._name, rest)
        shutdown.finishes_within(self._act, ANNOUNCED_S - SPREAD_S)
        if self._is_leader:
            time.sleep(SPREAD_S)
            self.note_announced()
        any(self._flags[_ANNOUNCED] for _ in polls(ends))
        _end(FAILED_STATUS if self._ends_last(LAST_S) else 0)

    def _act(self) -> None:
        if self._is_leader:
            # called last, when no exchange runs: a mean of the others without this super learner is final
            self._last_acts.insert(0, self._notify_learners)
        while self._last_acts:
            act = self._last_acts.pop()
            try:
                act()
            except Exception as error:  # the remaining functions must be called too
                log.error("super learner %s, leaving: %s", self._name, error, exc_info=error)


_departure: Departure | None = None  # None before init(), after shutdown(), and in plain Horovod
_watched_by = 0  # pid of the process whose thread runs; a forked child has another pid
_reading = -1  # reading end of the pipe into which SIGTERM writes a byte
_taking = threading.Lock()  # held to read pipe and _departure, so that both belong to one job


def watch(departure: Departure | None) -> None:
    """From now on SIGTERM starts `departure`; with None, SIGTERM ends this process."""
    global _departure, _watched_by, _reading
    if departure is not None and _watched_by != os.getpid():
        reading = signals.hear(signal.SIGTERM, ends=True)
        if reading is None:
            log.debug("SIGTERM has a handler, or is ignored: it makes no super learner leave.")
            return
        _watched_by, _reading = os.getpid(), reading
        threading.Thread(target=_watch, daemon=True, name="hvd_adpsgd.preemption").start()
    _departure = departure if _watched_by == os.getpid() else None


def unwatch() -> None:
    """Drop a SIGTERM that came during shutdown(), which is over; the next SIGTERM ends this process."""
    with _taking:
        if _watched_by == os.getpid():
            _take()
        watch(None)


def block_if_leaving() -> None:
    """Block the calling thread, until the process ends, if its super learner leaves after SIGTERM."""
    departure = _departure
    if departure is not None and departure._flags[_ASKED]:
        time.sleep(_HELD_S)
        _end()


def _watch() -> None:
    """Run the thread: wait for SIGTERM to a learner of this super learner, leave, and end the process."""
    while not _is_due():
        pass
    departure = _departure
    if departure is None:
        _end()
    else:
        departure.leave()


def _is_due() -> bool:
    """Wait up to LOOK_S for SIGTERM; return whether to leave the job or, without a job, to end."""
    select.select([_reading], [], [], LOOK_S)
    with _taking:
        is_signalled, departure = _take(), _departure
        if departure is None:
            return is_signalled
        if is_signalled:
            departure.ask()
        return departure.is_asked


def _take() -> bool:
    """Return whether SIGTERM came since the last call.

    Call it under `_taking`: otherwise another thread may take the byte first, and `read` would block.
    """
    heard, _, _ = select.select([_reading], [], [], 0)
    return bool(heard and os.read(_reading, _BYTES))


def _flush() -> None:
    """Flush the output of Python and of C libraries: a signal and _exit() end a process without that."""
    shutdown.flush_output()
    ctypes.CDLL(None).fflush(None)


def _end(status: int = 0) -> None:
    """Flush the script's output, and end the process: by SIGTERM, or with `status` if that is not 0."""
    shutdown.finishes_within(_flush, _FLUSH_S)
    shutdown.set_running(False)
    if status:
        os._exit(status)
    signal_pipe.end_by(signal.SIGTERM)
