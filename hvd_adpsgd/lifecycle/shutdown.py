"""How a learner's process exits: in bounded time, with any failure visible in the job's exit status.

    all learners reach the shutdown barrier     MPI_Finalize, then the script's own status
    some learners do not reach it               no MPI_Finalize, which would wait for them without
                                                bound; the first surviving learner exits last, because
                                                the launcher reports only the last status: after a
                                                failure FAILED_STATUS in place of 0

Worlds record in `exit_state` what the exit depends on; `at_exit` receives the functions to call.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import dis
import functools
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.failures import is_under_mpi, mpi_exceptions, mpi_failures, ulfm_enabled
from hvd_adpsgd.errors import TransportError
from hvd_adpsgd.lifecycle import process_exit
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.messaging.attempt import gather_once
from hvd_adpsgd.messaging.messages import Messages
from hvd_adpsgd.messaging.mpi_transport import exited
from hvd_adpsgd.messaging.sockets import Communicator, Hub
from hvd_adpsgd.polling import polls

log = logging.getLogger("hvd_adpsgd")

_LAST_S = 8.0  # longest wait for the processes of other learners to exit
_LONGEST_S = 5e-3  # between polls for learners that have exited, which move messages
_RECEIVE_S = 0.02  # time between two polls for messages that are received only to be dropped
_FLUSH_S = 0.5  # longest wait until an ending process's last messages are sent
_LAUNCHERS = ("prterun", "mpirun")
_LAST_FINALIZER = -100  # priority in multiprocessing: runs after the finalizers of its queues (-5)
_DEPTH = 3  # processes from a learner to its launcher: Horovod's build has a shell between them
# $1: pid of the launcher, $2: its name. Polls every 0.5 s: for 10 s, then for 20 s more, sending SIGTERM.
_RELEASE = (
    'n=0; while [ $n -lt 60 ] && [ "$(cat /proc/$1/comm)" = "$2" ]; do '
    "[ $n -lt 20 ] || kill $1; n=$((n + 1)); sleep 0.5; done"
)


@dataclass(frozen=True)
class ShutdownBarrier:
    """The communicator on which shutdown() waits for all learners.

    While some failed super learners are replaced and others are not, `comm` lacks learners of the job, and
    a rank in `comm` differs from the learner's rank.

    Attributes:
        comm: a communicator used for nothing else, so that the barrier never matches another operation.
        ranks: rank in the job of each learner, by its rank in `comm`.
    """

    comm: Any
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Rank of this learner in the job."""
        return self.ranks[int(self.comm.Get_rank())]

    def ended(self) -> set[int]:
        """Return the ranks in the job of learners known to have exited; under MPI, without MPI_Finalize."""
        if isinstance(self.comm, Communicator):
            return {self.ranks[place] for place in self.comm.look_at_all()}
        return exited(self.comm, self.ranks)

    def failed(self) -> set[int]:
        """Return the ranks in the job of learners that exited before the barrier, as all learners agree.

        A learner may be told of an exit before its own transport reports it. Empty after a timeout.
        """
        core = self.messages.agreement
        decision = core.decision(core.number - 1)
        return {self.ranks[place] for place in decision.failed} if decision else set()

    @functools.cached_property
    def messages(self) -> Messages:
        """The Messages over `comm`, made at the first use."""
        return Messages(self.comm)


@dataclass
class ExitState:
    """What the exit of this process depends on.

    Attributes:
        finalizes: whether this library calls MPI_Finalize, and not mpi4py.
        hub: the connections of this process, if MPI does not join the processes.
        watched: pid of the process in which `at_exit` was called; a forked child has another pid.
        has_begun: whether init() has succeeded once.
        stuck: the call in which a thread of this process hangs, and what that call waits for; "" if none.
        failed: ranks of learners that have failed, or leave because of a failure, as known to this process.
        barrier: the barrier that the last shutdown(), or init(), did not complete; None if it completed.
        ends: deadline of the last shutdown(), of time.monotonic.
        is_over: whether the script has ended and exit handlers run.
        exit_status: the last argument of sys.exit, exit or quit.
        script: the outermost frame of the script.
        at_end: functions to call, in this order, before MPI or the connections are closed.
    """

    finalizes: bool = False
    hub: Hub | None = None
    watched: int = 0
    has_begun: bool = False
    stuck: str = ""
    failed: tuple[int, ...] = ()
    barrier: ShutdownBarrier | None = None
    ends: float = 0.0
    is_over: bool = False
    exit_status: object = None
    script: FrameType | None = None
    at_end: list[Callable[[], object]] = field(default_factory=list)

    @property
    def has_failures(self) -> bool:
        """Whether a learner has failed, or this one hangs."""
        return bool(self.failed or self.stuck)

    def lacks_others(self, everyone: Any) -> None:
        """Record that init() failed because of other learners, for which MPI_Finalize would wait."""
        self.barrier = ShutdownBarrier(everyone, tuple(range(everyone.Get_size())))
        self.failed = tuple(self.barrier.ended())


exit_state = ExitState()  # the state of this process


class Teardown:
    """The end of a World in shutdown(): callbacks to run, the barrier, communicators to free after it.

    Attributes:
        owned: communicators in use before a super learner joined, to be freed at shutdown.
        has_begun: whether shutdown() has begun.

    Args:
        barrier: the barrier of all learners.
        membership: states of the super learners.
        mates: ranks of the learners of this super learner.
        done: shared memory with a byte per learner of `mates`: whether that learner has left the barrier.
    """

    def __init__(
        self,
        barrier: ShutdownBarrier,
        membership: Membership,
        mates: tuple[int, ...],
        done: NDArray[np.uint8],
    ):
        self.owned: list[Any] = []
        self.has_begun = False
        self._barrier, self._membership = barrier, membership
        self._mates, self._done = mates, done
        self._stops: list[Callable[[], object]] = []

    def at_shutdown(self, stop: Callable[[], object]) -> None:
        """Register a callback that shutdown() runs, in reverse order; it must take bounded time."""
        self._stops.append(stop)

    def forget(self, stop: Callable[[], object]) -> None:
        """Unregister the callback `stop`, which has run before shutdown(), and drop the reference to it."""
        if stop in self._stops:
            self._stops.remove(stop)

    def inherit(self, other: Teardown) -> None:
        """Take over the callbacks of `other`, the Teardown of the World that a new World replaces."""
        self._stops, other._stops = other._stops, []
        free(other._barrier.comm)

    def join(self, barrier: ShutdownBarrier, *old: Any) -> None:
        """Use a barrier that includes a super learner that has joined; free old communicators at shutdown.

        Old communicators over sockets are not kept: a reference to one would keep its connections open.
        """
        used = (self._barrier.comm, *old)
        self.owned = [c for c in (*self.owned, *used) if not isinstance(c, Communicator)]
        self._barrier = barrier

    def run_stops(self) -> Iterator[Exception]:
        """Run all callbacks in reverse order of registration; log and yield the exceptions they raise."""
        self.has_begun = True
        while self._stops:
            try:
                self._stops.pop()()
            except Exception as error:  # the remaining callbacks must run too
                log.error("learner %d, at shutdown: %s", self._barrier.rank, error, exc_info=error)
                yield error

    @property
    def fails(self) -> bool:
        """Whether this learner exits because of a failure."""
        return self._membership.own_failed or (self.has_begun and script_fails())

    def meet(self, stopped: bool, ends: float, left: Callable[[], Collection[int]]) -> bool:
        """Run the shutdown barrier; record the outcome in `exit_state`.

        Args:
            stopped: whether Horovod has stopped in this process.
            ends: deadline, of time.monotonic.
            left: returns the ranks of the learners that have said that they leave in order.

        Returns:
            Whether all learners reached the barrier, and none has ended: then communicators can be freed and
            MPI finalized.
        """
        barrier = self._barrier
        told = _meet(barrier, self.fails, ends)
        self._membership.fail([rank for rank, fails in (told or {}).items() if fails])
        # the barrier may be complete on this learner, but not on a learner that has timed out and exited
        clean = stopped and told is not None and not barrier.ended()
        exit_state.barrier, exit_state.ends = None if clean else barrier, ends
        self._done[self._mates.index(barrier.rank)] = 1
        if not clean:
            self._note_dead(left)
        exit_state.failed = self._membership.failed_ranks()
        return clean

    def ends_last(self, seconds: float) -> bool:
        """Return whether all other learners have ended; the first running learner waits up to `seconds`."""
        ends, barrier, last = time.monotonic() + seconds, self._barrier, None
        # raised if shutdown() has freed the barrier's communicator; other learners then still run
        with contextlib.suppress(*mpi_exceptions()):
            last = _await_others(barrier, ends)
        return bool(last)

    def _note_dead(self, left: Callable[[], Collection[int]]) -> None:
        """Record as failed the learners that have exited without having reached the barrier or left.

        Running engines report such failures themselves; here engines have stopped. This learner is one of
        them if the others have declared it failed.
        """
        own, agreed = self._barrier.rank, self._barrier.failed()
        ended, gone = self._ended_and_left(agreed - {own}, left)
        silent = {mate for mate, done in zip(self._mates, self._done, strict=True) if not done}
        dead = (agreed | (silent & ended)) - gone - set(self._membership.failed_ranks())
        if not dead:
            return
        self._membership.fail(dead)
        if own in dead:
            log.warning(
                "learner %d was declared failed by the others while all were leaving, because it was stopped "
                "or cut off for too long.",
                own,
            )
            return
        others = set(self._barrier.ranks) - ended - gone - dead
        level = logging.WARNING if own == min(others | {own}) else logging.INFO
        log.log(
            level, "learners %s have failed: they did not leave the job in order.", sorted(dead)
        )

    def _ended_and_left(
        self, agreed: set[int], left: Callable[[], Collection[int]]
    ) -> tuple[set[int], set[int]]:
        """Return the learners known to have exited, and those that have said that they leave.

        Waits up to _FLUSH_S until each learner in `agreed` is one of these: others have seen it exit, and its
        message that it leaves may still be on its way to this learner.
        """
        for _ in polls(time.monotonic() + _FLUSH_S, _LONGEST_S):
            ended = self._barrier.ended()
            gone = set(left())  # after `ended`: a learner says that it leaves, then exits
            if agreed <= ended | gone:
                break
        return ended, gone

    def free_all(self, comms: Sequence[Any], seconds: float) -> None:
        """Free the communicators; called after the barrier, until which learners may use them."""
        free(*self.owned, *comms)
        self._barrier.messages.close(time.monotonic() + seconds)
        free(self._barrier.comm)


def _meet(barrier: ShutdownBarrier, fails: bool, ends: float) -> dict[int, bool] | None:
    """Wait for all learners at the shutdown barrier; return, by rank in the job, which of them fail.

    Args:
        barrier: the barrier of all learners.
        fails: whether this learner exits because of a failure.
        ends: deadline, of time.monotonic.

    Returns:
        None if a learner has failed or does not reach the barrier in time. Equal on all learners that do not
        time out.
    """
    try:
        with mpi_failures("shutdown"):
            told = gather_once(barrier.messages, fails, ends)
    except TransportError as error:
        log.info("shutdown() no longer waits for the other learners: %s", error)
        return None
    return None if told is None else dict(zip(barrier.ranks, told, strict=True))


def leave_operations(messages: Messages, fails: bool = False) -> None:
    """Notify all other learners that this learner takes part in no more operations over all learners.

    Args:
        messages: the Messages (point-to-point) of operations over all learners.
        fails: whether this learner ends because of a failure.

    Until this process ends, a thread receives and drops messages that learners sent before they were
    notified: otherwise those sends would never complete.
    """
    over = threading.Event()

    def receive() -> None:
        # if the network fails, the other learners detect the end of this process
        with contextlib.suppress(TransportError), mpi_failures("shutdown"):
            while not over.wait(_RECEIVE_S):
                for _ in messages.transport.poll():
                    pass

    if not messages.agreement.excluded:  # else the other learners have declared this one failed
        with contextlib.suppress(TransportError), mpi_failures("shutdown"):
            messages.leave(time.monotonic() + _FLUSH_S, fails)
    thread = threading.Thread(target=receive, daemon=True, name="hvd_adpsgd.left")
    thread.start()
    # called before MPI or the connections are closed
    exit_state.at_end += [over.set, functools.partial(thread.join, _FLUSH_S)]


def free(*communicators: Any) -> None:
    for comm in communicators:
        if comm is not None:
            # a learner of the communicator has failed: it cannot be freed
            with contextlib.suppress(*mpi_exceptions()):
                comm.Free()


def finishes_within(call: Callable[[], object], seconds: float) -> bool:
    """Call `call` on a daemon thread; return whether it returns within `seconds`."""
    thread = threading.Thread(target=call, daemon=True, name=f"hvd_adpsgd.{call.__name__}")
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def script_fails() -> bool:
    """Return whether the script ends by an exception or with a status other than 0."""
    error = sys.exc_info()[1]
    if error is not None:
        return not isinstance(error, SystemExit) or error.code not in (None, 0)
    if not exit_state.is_over:
        return False
    if getattr(sys, "last_value", None) is not None:
        return True
    # if the script has caught SystemExit, its outermost frame has returned, and the status is 0
    return exit_state.exit_status not in (None, 0) and not _has_returned(exit_state.script)


def _has_returned(frame: FrameType | None) -> bool:
    """Whether a frame that is no longer running ended by `return`, and not by an exception."""
    if frame is None:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _outermost_frame() -> FrameType | None:
    """Return the outermost frame of the main thread, which is that of the script."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _note_exits() -> None:
    """Record the argument of sys.exit, exit and quit on the main thread; exit handlers do not receive it.

    A weakness that we accept: `raise SystemExit(1)` is not recorded, nor is a call of an `exit` that was
    imported from sys before init(). To its peers, such a learner has left in order.
    """
    exit_state.script = _outermost_frame()
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        if hasattr(module, name):  # python -S has no builtins.exit
            setattr(module, name, _recording_status(getattr(module, name)))


def _recording_status(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def leave_with(status: object = None, /) -> Any:
        if threading.current_thread() is threading.main_thread():  # others: it ends the thread
            exit_state.exit_status = status
        leave(status)

    return leave_with


def at_exit(shut_down: Callable[[], object], patience_s: Callable[[], float]) -> None:
    """From now on end this process in bounded time at exit, as this module describes; idempotent.

    Args:
        shut_down: called first at exit. Takes bounded time; logs the exceptions that it raises.
        patience_s: returns the longest time for MPI_Finalize, in seconds; called before `shut_down`.
    """
    if exit_state.watched == os.getpid():
        return
    leave = functools.partial(_leave, os.getpid(), shut_down, patience_s)
    if multiprocessing.parent_process() is None:
        atexit.register(leave)
        _note_exits()
    else:
        util.Finalize(None, _leave_as_child, (leave,), exitpriority=_LAST_FINALIZER)
    exit_state.watched = os.getpid()


def _leave(pid: int, shut_down: Callable[[], object], patience_s: Callable[[], float]) -> int:
    """At exit: shut down, then end MPI, in bounded time; return the status in place of 0."""
    # a forked child, not a learner: it must not run the destructors of Horovod and Gloo, which join threads
    # that do not exist in the child
    if os.getpid() != pid:
        process_exit.end_without_finalize(True)
        return 0
    seconds = patience_s()
    exit_state.is_over = True
    with contextlib.suppress(Exception):  # shut_down has logged it; an exit handler cannot raise
        shut_down()
    flush_output()  # now, because MPI_Finalize and the wait for other learners may take a while
    for act in exit_state.at_end:
        act()
    if exit_state.hub is not None and not exit_state.finalizes:
        return _leave_hub(exit_state.hub)
    status = 0
    if exit_state.finalizes and is_under_mpi() and not _ended_mpi(seconds):
        last = _ends_last()
        if last and ulfm_enabled():
            _release_launcher()
        status = _end_without_finalize(last, last)
    set_running(False)
    return status


def _leave_as_child(leave: Callable[[], int]) -> None:
    """Call `leave` in a child of multiprocessing; exit with the status that it returns, if that is not 0.

    A forked child runs no exit handlers, Python's or C's, so process_exit would not set the child's status.
    """
    if (status := leave()) and sys.exc_info()[1] is None:
        flush_output()
        os._exit(status)


def flush_output() -> None:
    """Flush stdout and stderr; the script may have closed or replaced them, or set them to None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an error here must not change the exit status
            stream.flush()


def _leave_hub(hub: Hub) -> int:
    """Close the connections; after a failure the first surviving learner exits last, with FAILED_STATUS."""
    is_clean = exit_state.barrier is None and not exit_state.stuck
    last = not is_clean and _ends_last()
    hub.close()
    # exit handlers that run later may wait for a thread that is left behind
    return 0 if is_clean else _end_without_finalize(True, last)


def _end_without_finalize(keeps_status: bool, last: bool) -> int:
    """Exit without MPI_Finalize (see process_exit); the last process exits with FAILED_STATUS in place of 0.

    Each learner of a failed super learner exits with FAILED_STATUS too: if a peer does not know of the
    failure, the peer and that learner each expect the other to exit last.
    """
    barrier = exit_state.barrier
    tells = last or (barrier is not None and barrier.rank in exit_state.failed)
    status = FAILED_STATUS if tells and exit_state.has_failures else 0
    process_exit.end_without_finalize(keeps_status, status)
    return status


def _ended_mpi(seconds: float) -> bool:
    """Finalize MPI; return False if MPI_Finalize was not called, or did not return within `seconds`.

    MPI_Finalize would wait for learners that may have failed. With ULFM a process may exit without
    MPI_Finalize; without ULFM such an exit ends the job.
    """
    from mpi4py import MPI

    if MPI.Is_finalized():
        return True
    # MPI_Finalize under a thread that uses MPI ends the job
    if exit_state.stuck and ulfm_enabled():
        return False
    if exit_state.barrier is None:
        return finishes_within(_finalize, seconds)
    if ulfm_enabled() or exit_state.stuck:
        return False
    MPI.Finalize()
    return True


def _finalize() -> None:
    """Call MPI_Finalize without the GIL, which mpi4py would hold: the call may block without bound."""
    from mpi4py import MPI

    ctypes.CDLL(MPI.__file__).MPI_Finalize()


def _ends_last() -> bool:
    """Return whether all other processes of the job have exited; the first surviving learner waits for them.

    The launcher reports only the status of the last process to exit, so that status must show a failure. A
    learner that fails itself waits until the deadline of its shutdown, because all peers may fail with it. It
    must not wait longer: its peers may still train, and an average over all learners waits for its exit.
    """
    barrier = exit_state.barrier
    if barrier is None:
        return False
    # If init() fails, it fails on all learners, and one of them must exit last, with the job's status. A
    # surviving learner of a failed super learner fails too. It must not wait for the first surviving learner
    # of the job, which waits for its exit.
    fails = barrier.rank in exit_state.failed or (exit_state.has_begun and script_fails())
    passed_over = () if fails else exit_state.failed
    ends = exit_state.ends
    if exit_state.has_failures and not fails:
        ends = time.monotonic() + _LAST_S
    last = _await_others(barrier, ends, passed_over)
    if last is None and exit_state.has_failures and not fails:
        log.warning(
            "learners %s have not ended %g s after this one: the status of the job may not tell that "
            "%s failed.",
            sorted(set(barrier.ranks) - barrier.ended() - {barrier.rank}),
            _LAST_S,
            f"learners {list(exit_state.failed)}" if exit_state.failed else "a learner",
        )
    return bool(last)


def _await_others(
    barrier: ShutdownBarrier, ends: float, passed_over: Sequence[int] = ()
) -> bool | None:
    """Return what `_is_last` does once that is decided; None if it is not before `ends`."""
    decided = (
        _is_last(barrier.rank, barrier.ranks, barrier.ended(), passed_over)
        for _ in polls(ends, _LONGEST_S)
    )
    return next((last for last in decided if last is not None), None)


def _is_last(
    rank: int, ranks: Sequence[int], ended: set[int], passed_over: Sequence[int]
) -> bool | None:
    """Return whether learner `rank` is the last one to exit; None while that is undecided.

    The learner that exits last has the lowest rank among those that run and are not in `passed_over`: failing
    learners, which do not wait long; empty for a learner that fails itself.
    """
    others = set(ranks) - {rank}
    if others <= ended:
        return True
    before = {other for other in others if other < rank}
    return None if before <= ended.union(passed_over) else False


def _release_launcher() -> None:
    """Make the launcher exit after the last learner, if the launcher runs on this host.

    Open MPI's launcher waits without bound for a host that has failed. If the launcher still runs 10 s after
    the last learner, a shell sends it SIGTERM every 0.5 s until it exits (it needs three).
    """
    launcher = _launcher()
    if launcher is None:
        return
    pid, name = launcher
    silent = subprocess.DEVNULL
    subprocess.Popen(
        ["/bin/sh", "-c", _RELEASE, "hvd_adpsgd", str(pid), name],
        stdin=silent,
        stdout=silent,
        stderr=silent,
        start_new_session=True,
    )


def _launcher() -> tuple[int, str] | None:
    """Return pid and name of the launcher above this process; None on hosts where only its daemon runs."""
    pid = os.getppid()
    for _ in range(_DEPTH):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        name, rest = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :]
        if name in _LAUNCHERS:
            return pid, name
        pid = int(rest.split()[1])
    return None


def set_running(running: bool) -> None:
    """Record, for the shell above this process, whether an exit of this process now counts as a failure.

    Our Horovod starts learners below a shell (tools/patches/launchers.patch); without it, this does nothing.
    """
    name = os.environ.get("ADPSGD_LEARNER")
    if not name:
        return
    with contextlib.suppress(OSError):  # the shell has ended, or the disk is full: as without it
        os.truncate(name, int(running))
