"""How the process of a learner ends: in bounded time, and so that the job's status tells of losses.

    all learners have met in shutdown()     MPI_Finalize, then the script's own status
    some did not come                       no MPI_Finalize, which would wait for them for ever; the
                                            first learner that lives ends last, for the launcher
                                            tells of the last status only

The worlds tell `exit_state` what they know. Nothing here knows a world: what is done at exit comes from
there, by `at_exit`.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adpsgd.runtime import process_exit
from hvd_adpsgd.runtime.collectives import failed_comm_ranks, ulfm_enabled, wait

__all__ = [
    "FAILED_STATUS",
    "ExitState",
    "ShutdownBarrier",
    "at_exit",
    "exit_state",
    "mark",
    "meet",
    "meet_all",
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

    @classmethod
    def of_all(cls, comm: Any) -> ShutdownBarrier:
        """The learners of `comm` are those of the job."""
        return cls(comm, tuple(range(comm.Get_size())))

    @property
    def rank(self) -> int:
        """Of this learner, in the job."""
        return self.ranks[self.comm.Get_rank()]

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
        clean: the last shutdown met all others.
        last: all others failed by then.
        failing: learners that have failed or leave because something failed.
        goodbye: where all learners should have met, after a shutdown that did not meet them all.
        is_over: the script is; exit handlers run.
        exit_status: what sys.exit was called with.
        farewells: buffers that MPI may still write to.
    """

    finalizes: bool = False
    watched: bool = False
    has_begun: bool = False
    stuck: bool = False
    clean: bool = True
    last: bool = False
    failing: set[int] = field(default_factory=set)
    goodbye: ShutdownBarrier | None = None
    is_over: bool = False
    exit_status: object = None
    farewells: list[Any] = field(default_factory=list)

    def lacks_others(self, everyone: Any) -> None:
        """init() failed: neither freeing nor finalizing can be done without who has failed."""
        self.clean, self.goodbye = False, ShutdownBarrier.of_all(everyone)
        self.failing.update(self.goodbye.ended())


exit_state = ExitState()  # of this process


# ---- the last meeting ---------------------------------------------------------------------------


def meet_all(goodbye: ShutdownBarrier, fails: bool, stopped: bool, ends: float) -> bool:
    """Meet all others for the last time; `exit_state` keeps what came of it.

    Args:
        goodbye: all learners.
        fails: whether this one leaves because something failed.
        stopped: whether its Horovod has stopped.
        ends: longest wait for the others, a time of time.monotonic.

    Returns:
        Whether all have come, and live: then communicators can be freed, and MPI finalized.
    """
    failing = meet(goodbye, fails, ends)
    met = failing is not None
    exit_state.failing.update(failing or ())
    # all are here; but one whose patience was over may have gone before it knew
    exit_state.clean = stopped and met and not goodbye.ended()
    exit_state.last = not met and len(goodbye.ended()) == len(goodbye.ranks) - 1
    exit_state.goodbye = None if exit_state.clean else goodbye
    return exit_state.clean


def meet(goodbye: ShutdownBarrier, fails: bool, ends: float) -> set[int] | None:
    """Which of all learners leave because something failed.

    Args:
        goodbye: all learners.
        fails: whether this one does.
        ends: longest wait for the others, a time of time.monotonic.

    Returns:
        Their ranks; None if not all learners come here in time.
    """
    from mpi4py import MPI

    mine, total = np.zeros((2, len(goodbye.ranks)), dtype=np.int32)
    mine[goodbye.comm.Get_rank()] = fails
    exit_state.farewells.append((mine, total))
    try:
        request = goodbye.comm.Iallreduce(mine, total)
        if not wait(request, max(ends, time.monotonic())):
            return None
        return {goodbye.ranks[place] for place in np.flatnonzero(total)}
    except MPI.Exception as error:
        log.info("leaving without the others: %s", error)
        return None


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
        # where init() failed, it did so on all learners: somebody's status must be the job's
        judges = bool(exit_state.failing) and not (exit_state.has_begun and script_fails())
        last = exit_state.last or (judges and _ends_last())
        if last and ulfm_enabled():
            _release_launcher()
        process_exit.end_without_finalize(last, FAILED_STATUS if exit_state.failing else 0)
    mark(False)


def _ended_mpi(mpi: Any, seconds: float) -> bool:
    """Finalize MPI; False if that would wait for learners that may be gone.

    With ULFM a process may go without MPI_Finalize. Without, that would end the job for all.
    """
    if exit_state.clean:
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

    The launcher tells of the last status only, so that is where a loss can be seen.
    """
    goodbye = exit_state.goodbye
    if goodbye is None:
        return False
    ends = time.monotonic() + _LAST_S
    while time.monotonic() < ends:
        ended = goodbye.ended()
        last = _is_last(goodbye.rank, goodbye.ranks, ended, exit_state.failing)
        if last is not None:
            return last
        time.sleep(_LOOK_S)
    log.warning(
        "learners %s have not ended %g s after this one: the status of the job may not tell that "
        "learners %s failed.",
        sorted(set(goodbye.ranks) - ended - {goodbye.rank}),
        _LAST_S,
        sorted(exit_state.failing),
    )
    return False


def _is_last(rank: int, ranks: Sequence[int], ended: set[int], failing: set[int]) -> bool | None:
    """Whether a learner ends after all others; None as long as that is open.

    Who has a learner before it that lives, and ends well, leaves that to it.

    Args:
        rank: of the learner.
        ranks: all learners.
        ended: those whose process has.
        failing: those that have failed or leave because something failed.
    """
    others = set(ranks) - {rank}
    if others <= ended:
        return True
    before = {other for other in others if other < rank}
    return None if before <= ended | failing else False


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
