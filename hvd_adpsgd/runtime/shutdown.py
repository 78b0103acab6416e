"""How the process of a learner ends: in bounded time, and so that the job's status tells of losses.

    all learners have met in shutdown()     MPI_Finalize, then the script's own status
    some did not come                       no MPI_Finalize, which would wait for them for ever; the
                                            first learner that lives ends last, for the launcher
                                            tells of the last status only

Worlds tell `exit_state` what they know. Nothing here knows a world: what is done at exit comes from
`at_exit`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.failures import ulfm_enabled
from hvd_adpsgd.runtime import process_exit
from hvd_adpsgd.runtime.collectives import failed_comm_ranks, wait
from hvd_adpsgd.runtime.membership import Membership

__all__ = [
    "FAILED_STATUS",
    "ExitState",
    "ShutdownBarrier",
    "Teardown",
    "at_exit",
    "exit_state",
    "free",
    "mark",
    "returns",
    "script_fails",
]

log = logging.getLogger("hvd_adpsgd")

FAILED_STATUS = 75  # of a job that lost a super learner; EX_TEMPFAIL of sysexits.h: try again

_LAST_S = 8.0  # longest wait for the processes of others to end
_LOOK_S = 5e-3  # between looks at who has ended
_LAUNCHERS = ("prterun", "mpirun")
_DEPTH = 3  # processes from a learner to its launcher: Horovod's build has a shell between them
# $1: the launcher's process, $2 its name. Looks every 0.5 s: 10 s, then 20 s more with signals.
_RELEASE = (
    'n=0; while [ $n -lt 60 ] && [ "$(cat /proc/$1/comm)" = "$2" ]; do '
    "[ $n -lt 20 ] || kill $1; n=$((n + 1)); sleep 0.5; done"
)


@dataclass(frozen=True)
class ShutdownBarrier:
    """All learners, where they meet at the end.

    Once one of several failed super learners has been replaced, these are not all of the job, and a rank
    in `comm` is not the number of a learner.

    Attributes:
        comm: used for nothing else, for its meeting must not meet another operation.
        ranks: its learners, by their rank there.
    """

    comm: Any
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Of this learner, in the job."""
        return self.ranks[int(self.comm.Get_rank())]

    def ended(self) -> set[int]:
        """Learners that are known to have ended without MPI_Finalize."""
        return {self.ranks[place] for place in failed_comm_ranks(self.comm)}


@dataclass
class ExitState:
    """What the end of this process depends on.

    Attributes:
        finalizes: MPI_Finalize is ours, not mpi4py's.
        watched: `at_exit` was called.
        has_begun: init() was successful once.
        stuck: a Horovod shutdown did not return.
        failed: learners that this one then knew to have failed, or to leave because something failed.
        has_failures: whether there are any, known here or elsewhere.
        goodbye: where all learners should have met, if the last shutdown, or init(), did not meet them.
        ends: until when that shutdown could wait for others, of time.monotonic.
        is_over: the script is; exit handlers run.
        exit_status: what sys.exit was called with.
        farewells: buffers that MPI may still write to.
    """

    finalizes: bool = False
    watched: bool = False
    has_begun: bool = False
    stuck: bool = False
    failed: tuple[int, ...] = ()
    has_failures: bool = False
    goodbye: ShutdownBarrier | None = None
    ends: float = 0.0
    is_over: bool = False
    exit_status: object = None
    farewells: list[Any] = field(default_factory=list)

    def lacks_others(self, everyone: Any) -> None:
        """init() failed: neither freeing nor finalizing can be done without who has failed."""
        self.goodbye = ShutdownBarrier(everyone, tuple(range(everyone.Get_size())))
        self.failed = tuple(self.goodbye.ended())
        self.has_failures = bool(self.failed)


exit_state = ExitState()  # of this process


# ---- what a world does ---------------------------------------------------------------------------


class Teardown:
    """The end of a world: what is stopped, where all meet for the last time, what is freed then.

    Attributes:
        owned: communicators to free. MPI_Finalize would wait for everybody in two or more of a mixed
            world.
        has_begun: the script is in shutdown().

    Args:
        barrier: where all learners meet.
        membership: who is alive.
        mates: the learners of this super learner.
        done: memory of theirs, a byte for each: whether it is about to end in good order.
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
        # Some were started later. MPI_Finalize of those started together does not wait for the rest, whom
        # an early end would keep from meeting; so all meet twice.
        self._is_mixed = False
        self._stops: list[Callable[[], object]] = []

    def at_shutdown(self, stop: Callable[[], object]) -> None:
        """Call `stop` first in shutdown(), the last registered first. It must be bounded."""
        self._stops.append(stop)

    def forget(self, stop: Callable[[], object]) -> None:
        """`stop` was done before shutdown(), and whatever it holds on to may go."""
        if stop in self._stops:
            self._stops.remove(stop)

    def inherit(self, other: Teardown) -> None:
        """Stop what was to be stopped with a world that this one replaces."""
        self._stops, other._stops = other._stops, []
        free(other._barrier.comm)

    def join(self, barrier: ShutdownBarrier, *old: Any) -> None:
        """Meet there in the end, with a super learner that has joined; the old communicators go then."""
        self.owned += [self._barrier.comm, *old]
        self._barrier, self._is_mixed = barrier, True

    def run_stops(self) -> Iterator[Exception]:
        """Run all callbacks; what they raise is logged and yielded."""
        self.has_begun = True
        while self._stops:
            try:
                self._stops.pop()()
            except Exception as error:  # the others must be stopped too
                log.error("learner %d, at shutdown: %s", self._barrier.rank, error, exc_info=error)
                yield error

    @property
    def fails(self) -> bool:
        """Whether this learner is on its way out because something failed."""
        return self._membership.own_failed or (self.has_begun and script_fails())

    def meet(self, stopped: bool, ends: float) -> bool:
        """Meet all others for the last time; `exit_state` keeps what came of it.

        Args:
            stopped: whether this one's Horovod has stopped.
            ends: longest wait for the others, of time.monotonic.

        Returns:
            Whether all have come, and live: then communicators can be freed, and MPI finalized.
        """
        barrier = self._barrier
        failing = _meet(barrier, self.fails, ends)
        self._membership.fail(failing or ())
        # all are here; but one whose patience was over may have gone before it knew
        clean = stopped and failing is not None and not barrier.ended()
        self._done[self._mates.index(barrier.rank)] = 1
        if not clean:
            self._note_dead_mates()
        exit_state.failed = self._membership.failed_ranks()
        exit_state.has_failures = bool(exit_state.failed)
        if not clean:
            exit_state.has_failures = _any_failure(barrier, bool(exit_state.failed), ends)
        exit_state.goodbye, exit_state.ends = None if clean else barrier, ends
        return clean

    def _note_dead_mates(self) -> None:
        """A mate that ended without a word, when no engine was there to tell of it any longer."""
        silent = {mate for mate, done in zip(self._mates, self._done, strict=True) if not done}
        dead = silent & self._barrier.ended()
        if dead and not self._membership.own_failed:
            self._membership.fail(dead)
            where = f"super learner {self._membership.own}"
            log.warning("learners %s of %s failed while it was leaving.", sorted(dead), where)

    def free_all(self, comms: Sequence[Any], seconds: float) -> None:
        """Free the communicators, when all have met: others may still use theirs before."""
        free(*self.owned, *comms)
        if self._is_mixed:
            _meet(self._barrier, False, time.monotonic() + seconds)
        free(self._barrier.comm)


def _meet(barrier: ShutdownBarrier, fails: bool, ends: float) -> set[int] | None:
    """Which of all learners leave because something failed.

    Args:
        barrier: all learners.
        fails: whether this one does.
        ends: longest wait for the others, of time.monotonic.

    Returns:
        Their ranks; None if not all learners come here in time.
    """
    from mpi4py import MPI

    mine, total = np.zeros((2, len(barrier.ranks)), dtype=np.int32)
    mine[barrier.comm.Get_rank()] = fails
    exit_state.farewells.append((mine, total))
    try:
        request = barrier.comm.Iallreduce(mine, total)
        if not wait(request, max(ends, time.monotonic())):
            return None
        return {barrier.ranks[i] for i in np.flatnonzero(total)}
    except MPI.Exception as error:
        log.info("leaving without the others: %s", error)
        return None


def _any_failure(barrier: ShutdownBarrier, mine: bool, ends: float) -> bool:
    """Whether a learner that is here knows of a failure; as this one does, if not all that live come."""
    from mpi4py import MPI

    none = np.array([not mine], dtype=np.intc)
    exit_state.farewells.append(none)
    with contextlib.suppress(MPI.Exception):  # some have ended: the answer is there all the same
        if not wait(barrier.comm.Iagree(none), max(ends, time.monotonic())):
            return mine
    return mine or not none[0]


def free(*communicators: Any) -> None:
    from mpi4py import MPI

    for comm in communicators:
        if comm is not None:
            with contextlib.suppress(MPI.Exception):  # of a failed learner; nothing is left to do
                comm.Free()


def returns(call: Callable[[], object], seconds: float) -> bool:
    """Whether a call, made on a thread of its own, returns in time."""
    thread = threading.Thread(target=call, daemon=True, name=f"hvd_adpsgd.{call.__name__}")
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


# ---- how the script ends ------------------------------------------------------------------------


def script_fails() -> bool:
    """Whether the script is being left by an exception, or with another status than 0."""
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        return True
    if not exit_state.is_over:
        return False
    return exit_state.exit_status not in (None, 0) or getattr(sys, "last_value", None) is not None


def _noting(leave: Callable[..., Any]) -> Callable[..., Any]:
    """sys.exit, which also remembers its argument: exit handlers are not told of it.

    A weakness that we accept: `raise SystemExit(1)` is not noticed. The others then read a goodbye.
    """

    @functools.wraps(leave)
    def noted(status: object = None, /) -> Any:
        exit_state.exit_status = status
        leave(status)

    return noted


# ---- the end of the process ---------------------------------------------------------------------


def at_exit(shut_down: Callable[[], object], patience_s: Callable[[], float]) -> None:
    """From now on the process ends as this module says; a second call changes nothing.

    Args:
        shut_down: called first. Bounded; logs what it raises.
        patience_s: longest MPI_Finalize; asked before `shut_down` is called.
    """
    if exit_state.watched:
        return
    atexit.register(_leave, os.getpid(), shut_down, patience_s)
    sys.exit = _noting(sys.exit)
    exit_state.watched = True


def _leave(pid: int, shut_down: Callable[[], object], patience_s: Callable[[], float]) -> None:
    """At exit: shut down, then end MPI, in bounded time."""
    if os.getpid() != pid:  # a forked child that is no learner
        return
    from mpi4py import MPI

    seconds = patience_s()
    exit_state.is_over = True
    with contextlib.suppress(Exception):  # logged there; an exit handler cannot raise
        shut_down()
    if not MPI.Is_finalized() and exit_state.finalizes and not _ended_mpi(MPI, seconds):
        sys.stdout.flush()
        sys.stderr.flush()
        last = _ends_last()
        if last and ulfm_enabled():
            _release_launcher()
        process_exit.end_without_finalize(last, FAILED_STATUS if exit_state.has_failures else 0)
    mark(False)


def _ended_mpi(mpi: Any, seconds: float) -> bool:
    """Finalize MPI; False if that would wait for learners that may be gone.

    With ULFM a process may go without MPI_Finalize. Without, that would end the job for all.
    """
    if exit_state.goodbye is None:
        return returns(_finalize, seconds)
    if ulfm_enabled() or exit_state.stuck:
        return False
    mpi.Finalize()
    return True


def _finalize() -> None:
    """MPI_Finalize, which may wait without bound; mpi4py's holds the GIL meanwhile."""
    from mpi4py import MPI

    ctypes.CDLL(MPI.__file__).MPI_Finalize()


def _ends_last() -> bool:
    """Whether all other processes of the job have ended; the first of the living waits for them.

    The launcher tells of the last status only, so that is where a failure can be seen. A learner that
    fails itself waits for the rest of its shutdown's time: all others may fail with it. It may not wait
    longer, for they may train on, and a mean of all waits for its end.
    """
    goodbye = exit_state.goodbye
    if goodbye is None:
        return False
    # where init() failed, it did so on all learners, and somebody's status must be the job's
    fails = exit_state.has_begun and script_fails()
    passed_over = () if fails else exit_state.failed
    ends = exit_state.ends
    if exit_state.has_failures and not fails:
        ends = time.monotonic() + _LAST_S
    while (last := _is_last(goodbye.rank, goodbye.ranks, goodbye.ended(), passed_over)) is None:
        if time.monotonic() > ends:
            break
        time.sleep(_LOOK_S)
    if last is None and exit_state.has_failures and not fails:
        log.warning(
            "learners %s have not ended %g s after this one: the status of the job may not tell that "
            "%s failed.",
            sorted(set(goodbye.ranks) - goodbye.ended() - {goodbye.rank}),
            _LAST_S,
            f"learners {list(exit_state.failed)}" if exit_state.failed else "a learner",
        )
    return bool(last)


def _is_last(
    rank: int, ranks: Sequence[int], ended: set[int], passed_over: Sequence[int]
) -> bool | None:
    """Whether a learner ends after all others; None as long as that is open.

    Who has a learner before it that lives, and is not passed over, leaves that to it.

    Args:
        rank: of the learner.
        ranks: all learners.
        ended: those whose process has.
        passed_over: those that fail, in the eyes of one that does not: they do not wait for long.
    """
    others = set(ranks) - {rank}
    if others <= ended:
        return True
    before = {other for other in others if other < rank}
    return None if before <= ended.union(passed_over) else False


def _release_launcher() -> None:
    """See that the command returns when all learners have ended, if the launcher runs on this host.

    Open MPI's waits without bound for a host that has gone without a word. If it is there 10 s after the
    last learner, it is told to end until it does (it must hear so three times).
    """
    launcher = _launcher()
    if launcher is None:
        return
    pid, name = launcher
    silent = subprocess.DEVNULL
    subprocess.Popen(
        ["sh", "-c", _RELEASE, "hvd_adpsgd", str(pid), name],
        stdin=silent,
        stdout=silent,
        stderr=silent,
        start_new_session=True,
    )


def _launcher() -> tuple[int, str] | None:
    """Process and name of the launcher above this process; None on hosts where only its daemon is."""
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


def mark(working: bool) -> None:
    """Tell the shell above this process whether its end would be news to the others.

    Our Horovod build starts learners below a shell (horovod_build.KEEPER); without, this does nothing.
    """
    name = os.environ.get("ADPSGD_LEARNER")
    if name is None:
        return
    with contextlib.suppress(OSError):  # no room for an empty file; then it is as without the shell
        if working:
            Path(name).touch()
        else:
            Path(name).unlink(missing_ok=True)
