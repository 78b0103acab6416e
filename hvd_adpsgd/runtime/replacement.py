"""A new super learner replaces a failed one, over MPI.

    starter (a surviving learner)             joining learner (a new process)
    MPI_Comm_spawn, on a thread               runs the same command from the top
    bridge: both sides merged                 hvd.init(): bridge; receives its ranks
    ... surviving learners train ...          builds its model, wraps its optimizer
    receives "ready"                          sends "ready" over the bridge, waits
    sends the port                            receives the port
    all surviving: MPI_Comm_accept, merge     MPI_Comm_connect, merge
    all surviving agree on the merge          receives "come", and has joined

Only the last three lines interrupt training, for about 10 ms; Python, torch and the script start while
the surviving learners train. Every call that may wait for a joining learner runs on a thread of its own
with a timeout: in Open MPI 5.0 MPI_Comm_spawn, MPI_Comm_accept and MPI_Intercomm_merge never return when
the other side has failed. A thread that times out there stays asleep.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import pickle
import queue
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import LaunchError, PeerFailedError, TransportError
from hvd_adpsgd.runtime import bootstrap, communicators
from hvd_adpsgd.runtime import world as worlds
from hvd_adpsgd.runtime.collectives import allgather_object, wait
from hvd_adpsgd.runtime.shutdown import ShutdownBarrier
from hvd_adpsgd.runtime.world import Communicators, Placement, World

__all__ = [
    "JoinInfo",
    "JoiningLearner",
    "MergedComms",
    "Side",
    "SpawnedReplacement",
    "connect",
    "enter",
    "failed_groups",
    "is_newcomer",
    "this_newcomer",
    "within",
]

T = TypeVar("T")

log = logging.getLogger("hvd_adpsgd")

JOINS = "HVD_ADPSGD_JOINS"  # set for processes that replace failed ones
MEETING_S = 10.0  # longest wait for the merge, once a joining learner is ready
START_S = 120  # longest MPI_Init of a joining learner; its starter may exit meanwhile
_PASSED_ON = ("HVD_ADPSGD_", "HOROVOD_", "OMP_", "CUDA_", "PYTHON", "PATH", "LD_LIBRARY_PATH")
_TAG_SIZE, _TAG_DATA = 1, 2
_LOOK_S = 2e-3
_PORT_FREED = "the job has ended"


@dataclass(frozen=True)
class JoinInfo:
    """What a joining learner receives first, from its starter.

    Attributes:
        super_rank: the super learner that it replaces.
        placements, groups, config: of the job, as in World.
    """

    super_rank: int
    placements: tuple[Placement, ...]
    groups: tuple[tuple[int, ...], ...]
    config: Config


@dataclass(frozen=True)
class MergedComms:
    """Communicators of the surviving learners and a joining one, errors returned.

    Attributes:
        comm: all learners, ordered by rank.
        plain: a duplicate of `comm`, for operations over all learners.
        ranks: the job's ranks of these learners.
        goodbye: a duplicate of `comm`, for shutdown.
        outer: the leaders; None on learners that are not leaders.
        members: the leaders' super learners, by rank in `outer`.
    """

    comm: Any
    plain: Any
    ranks: tuple[int, ...]
    goodbye: ShutdownBarrier
    outer: Any
    members: tuple[int, ...]

    def adopt(self, world: World) -> None:
        """Replace `world` by one with these communicators; worlds.current returns it from now on."""
        old = world.collectives
        world.teardown.join(self.goodbye, old.comm, old.messages.comm, world.outer)
        world.collectives.meet(self.comm, self.plain, self.ranks)
        world.membership.meet(self.members)
        worlds.put(dataclasses.replace(world, outer=self.outer, members=self.members))


def is_newcomer() -> bool:
    """Whether this process was started to replace a failed learner."""
    return JOINS in os.environ


def failed_groups(world: World) -> tuple[int, ...]:
    """The super learners without a learner in collectives."""
    living = set(world.collectives.ranks)
    return tuple(i for i, group in enumerate(world.groups) if not living & set(group))


def within(
    seconds: float, call: Callable[[], T], drop: Callable[[T], object] = lambda result: None
) -> T | None:
    """The result of `call`, run on a thread of its own; None if it times out or MPI fails.

    Args:
        seconds: timeout.
        call: may block without bound.
        drop: receives a result that arrives after the timeout.
    """
    results: queue.SimpleQueue[T | None] = queue.SimpleQueue()
    late = threading.Event()

    def run() -> None:
        from mpi4py import MPI

        result = None
        try:
            result = call()
        except (MPI.Exception, TransportError) as error:
            log.info("a step of joining failed: %s", error)
        results.put(result)
        if late.is_set():
            _drop_all(results, drop)

    threading.Thread(target=run, daemon=True, name="hvd_adpsgd.join").start()
    with contextlib.suppress(queue.Empty):
        return results.get(timeout=seconds)
    late.set()
    _drop_all(results, drop)  # run() may have put its result before it could see `late`
    return None


def _drop_all(results: queue.SimpleQueue[T | None], drop: Callable[[T], object]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            result = results.get_nowait()
            if result is not None:
                drop(result)


# ---- messages over a bridge ---------------------------------------------------------------------


class _Inbox:
    """Objects from one rank of a communicator, in order, without blocking."""

    def __init__(self, comm: Any, source: int):
        self._comm, self._source = comm, source
        self._next_size()

    def _next_size(self) -> None:
        self._size = np.zeros(1, dtype=np.int64)
        self._request = self._comm.Irecv(self._size, self._source, _TAG_SIZE)
        self._data: Any = None

    def close(self) -> None:
        """Cancel the pending receive, so that the communicator can be freed."""
        self._request.Cancel()
        wait(self._request)

    def take(self) -> list[Any]:
        """[the next object], or [] if it has not arrived.

        Raises:
            MPI.Exception: if the sender has failed.
        """
        if not self._request.Test():
            return []
        if self._data is None:
            self._data = np.empty(int(self._size[0]), dtype=np.uint8)
            self._request = self._comm.Irecv(self._data, self._source, _TAG_DATA)
            return self.take()
        value = pickle.loads(self._data.tobytes())
        self._next_size()
        return [value]

    def wait(self, ends: float | None, runs: Callable[[], bool]) -> Any:
        """The next object.

        Args:
            ends: of time.monotonic; None: wait as long as the sender runs.
            runs: whether the sender runs; MPI does not report a process that has exited with status 0.

        Raises:
            TimeoutError: if it has not arrived by then, or the sender has exited.
            MPI.Exception: if the sender has failed.
        """
        while not (got := self.take()):
            over = ends is not None and time.monotonic() > ends
            if (over or not runs()) and not (got := self.take()):
                raise TimeoutError
            if got:
                break
            time.sleep(_LOOK_S)
        return got[0]


def _send(comm: Any, target: int, value: Any) -> None:
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    size = np.array([data.size], dtype=np.int64)
    first = comm.Isend(size, target, _TAG_SIZE)
    second = comm.Isend(data, target, _TAG_DATA)
    wait(first)
    wait(second)


# ---- the starter --------------------------------------------------------------------------------


class SpawnedReplacement:
    """A super learner that this learner, its starter, starts in place of a failed one.

    Args:
        world: of the starter.
        super_rank: the failed super learner.
        terms: what the joining learner must send when it is ready.
        patience_s: longest time from here to "ready".
    """

    def __init__(self, world: World, super_rank: int, terms: Any, patience_s: float):
        self.super_rank = super_rank
        self.problem = ""  # why it failed
        self._ready = False
        self._terms = terms
        self._welcome = JoinInfo(super_rank, world.placements, world.groups, world.config)
        self._ends = time.monotonic() + patience_s
        self._patience_s = patience_s
        self._leave_deadline_s = world.config.leave_deadline_s
        self._bridge: Any = None
        self._inbox: _Inbox | None = None
        self._hostname = _host_for(world, super_rank)
        self._thread = threading.Thread(target=self._start, daemon=True, name="hvd_adpsgd.recruit")
        self._thread.start()

    def _start(self) -> None:
        from mpi4py import MPI

        try:
            self._bridge = self._spawn()
        except (MPI.Exception, OSError) as error:
            self.problem = (
                f"the launcher cannot start {sys.orig_argv} on {self._hostname} ({error}): see what it "
                "says on stderr; free slots there, and run under Open MPI's mpirun or horovodrun"
            )

    def _spawn(self) -> Any:
        """Start the processes. Returns a communicator of this learner (rank 0) and them."""
        from mpi4py import MPI

        alone = MPI.COMM_SELF.Dup()
        alone.Set_errhandler(MPI.ERRORS_RETURN)
        how = {"host": self._hostname, "map_by": "slot:OVERSUBSCRIBE", "bind_to": "none"}
        info = MPI.Info.Create({"wdir": os.getcwd(), **how})
        command, *args = _command(self.super_rank)
        members = len(self._welcome.groups[self.super_rank])
        between = alone.Spawn(command, args, members, info=info)
        between.Set_errhandler(MPI.ERRORS_RETURN)
        bridge = _merged(between, high=False)
        for i in range(members):
            _send(bridge, 1 + i, self._welcome)
        self._inbox = _Inbox(bridge, 1)
        return bridge

    def state(self) -> str:
        """One of "starting", "ready" and "failed" (see `problem`); does not block."""
        from mpi4py import MPI

        if not self._ready and not self.problem:
            try:
                self._look()
            except MPI.Exception:
                self.problem = "it ended before it was ready; its own messages tell why"
        if self.problem:
            return "failed"
        return "ready" if self._ready else "starting"

    def _look(self) -> None:
        inbox = self._inbox if self._bridge is not None else None
        for terms in inbox.take() if inbox is not None else ():
            self._ready = terms == self._terms
            if not self._ready:
                self.problem = f"it averages {terms}, the others {self._terms}"
        if not self._ready and time.monotonic() > self._ends:
            self.problem = f"it was not ready after patience_s={self._patience_s:g} s"

    def open(self, rank: int) -> str:
        """Open a port for the merge, rooted at learner `rank`, and send both. Returns the port."""
        from mpi4py import MPI

        port = str(MPI.Open_port())
        self._tell((port, rank))
        return port

    def come(self) -> None:
        """Tell the joining learner that all surviving learners have agreed on the merge."""
        self._tell("come")
        self.release()

    def dismiss(self) -> None:
        """Tell it to exit; wait up to leave_deadline_s for a spawn that is still running."""
        self._thread.join(self._leave_deadline_s if not self.problem else 0)
        if self._bridge is not None:
            self._tell(_PORT_FREED)
            self.release()

    def release(self) -> None:
        """Free the bridge."""
        from mpi4py import MPI

        with contextlib.suppress(MPI.Exception):
            if self._inbox is not None:
                self._inbox.close()
            self._bridge.Free()

    def _tell(self, value: Any) -> None:
        from mpi4py import MPI

        with contextlib.suppress(MPI.Exception):  # it has failed; state() or the merge shows that
            for i in range(len(self._welcome.groups[self.super_rank])):
                _send(self._bridge, 1 + i, value)


def _command(super_rank: int) -> list[str]:
    """The command line of this program, with the environment that the launcher may not forward."""
    passed = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and name != JOINS
    ]
    env = shutil.which("env") or "/usr/bin/env"
    mark = f"{JOINS}={super_rank} {os.getpid()} {socket.gethostname()}"
    return [env, *passed, mark, sys.executable, *sys.orig_argv[1:]]


def _host_for(world: World, super_rank: int) -> str:
    """The failed super learner's host if a learner survives there, else this host."""
    hostname = world.placements[world.groups[super_rank][0]].hostname
    return (
        hostname
        if any(world.placements[r].hostname == hostname for r in world.collectives.ranks)
        else (world.hostname)
    )


# ---- the joining learner -------------------------------------------------------------------------------


class JoiningLearner:
    """A process that replaces a failed learner. Until it joins, its world is its super learner alone.

    Its rank, size, super_rank and super_size are those of the whole job from the start.
    """

    def __init__(self) -> None:
        self._name, pid, hostname = os.environ[JOINS].split(" ", 2)
        self._starter_pid = int(pid) if hostname == socket.gethostname() else None
        met = threading.Event()
        threading.Thread(target=self._watch, args=(met,), daemon=True).start()
        mpi = communicators.load_mpi(_start_mpi)
        bootstrap.watch_exit()
        parent = mpi.Comm.Get_parent()
        if parent == mpi.COMM_NULL:
            raise LaunchError(
                f"init(): {JOINS} is set, but nobody started this process by MPI_Comm_spawn. Unset it."
            )
        parent.Set_errhandler(mpi.ERRORS_RETURN)
        self._bridge = _merged(parent, high=True)
        met.set()
        self._inbox = _Inbox(self._bridge, 0)
        self.welcome: JoinInfo = self._hear()

    def _watch(self, met: threading.Event) -> None:
        """Exit when the starter has exited, or after START_S, unless the bridge is there.

        MPI_Init and MPI_Intercomm_merge wait for the starter without a timeout.
        """
        ends = time.monotonic() + START_S
        while not met.wait(0.2):
            if time.monotonic() > ends or not self._starter_runs():
                os._exit(0)  # the main thread is blocked in MPI

    def _starter_runs(self) -> bool:
        """Whether the starter runs; True if it is on another host."""
        return self._starter_pid is None or _process_exists(self._starter_pid)

    def _hear(self, ends: float | None = None) -> Any:
        from mpi4py import MPI

        try:
            said = self._inbox.wait(ends, self._starter_runs)
        except (MPI.Exception, TimeoutError):
            raise PeerFailedError(
                f"joining as super learner {self._name}: the learner that started this one is "
                "lost or does not answer. The others go on, and start another one."
            ) from None
        if said == _PORT_FREED:
            log.warning("super learner %s: the job ended before it joined.", self._name)
            raise SystemExit(0)
        return said

    def make_world(self) -> World:
        """The world of this joining learner: the job's ranks, communicators of its super learner."""
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        told = self.welcome
        plain, goodbye, host, inner = (comm.Dup() for _ in range(4))
        comms = Communicators(comm, plain, goodbye, host, inner, None)
        rank = told.groups[told.super_rank][comm.Get_rank()]
        return World.make(told.config, told.placements, told.groups, rank, comms, joining=True)

    def ready(self, terms: Any) -> tuple[str, int]:
        """Send `terms`, and wait for the surviving learners. Returns the port and the starter's rank.

        Raises:
            PeerFailedError: if the starter failed.
            SystemExit: with status 0, if the job has ended.
        """
        if self._bridge.Get_rank() == 1:
            _send(self._bridge, 0, terms)
        port, starter = self._hear()
        return port, starter

    def await_come(self) -> None:
        """Wait until all surviving learners have agreed on the merge.

        Raises:
            PeerFailedError: on timeout, or if the starter failed.
        """
        self._hear(time.monotonic() + 3 * MEETING_S)
        self._inbox.close()
        self._bridge.Free()


def _start_mpi(mpi: Any) -> None:
    """MPI_Init without the GIL; mpi4py's own call holds it, and `_watch` could not run."""
    provided = ctypes.c_int()
    library = ctypes.CDLL(mpi.__file__)
    library.MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(provided))


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_joining_learner: JoiningLearner | None = None


def enter() -> World:
    """init() of a joining learner. Returns its world, which worlds.current returns from now on.

    Raises:
        LaunchError: if MPI_Comm_spawn did not start this process.
        PeerFailedError: if its starter has failed.
    """
    global _joining_learner
    _joining_learner = JoiningLearner()
    return bootstrap.enter(_joining_learner.make_world())


def this_newcomer() -> JoiningLearner:
    """The JoiningLearner that `enter` has made."""
    assert _joining_learner is not None
    return _joining_learner


# ---- the merge ----------------------------------------------------------------------------------


def _merged(between: Any, high: bool) -> Any:
    """Merge both sides of an intercommunicator, and free it."""
    from mpi4py import MPI

    comm = between.Merge(high=high)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    between.Free()
    return comm


class Side:
    """A communicator of the surviving learners, over which they meet a joining one.

    MPI_Comm_accept needs one without failed processes. MPI_Comm_create_group fails beside failed processes,
    and MPIX_Comm_shrink is built on MPI's agreement, which may crash. So it is made from a group, with the
    launcher's help. Whether the learners have met they agree over plain messages.

    Args:
        world: of this learner.

    Attributes:
        comm: the communicator; None before `make`.
    """

    def __init__(self, world: World):
        self.comm: Any = None
        self._group = world.collectives.living_group()
        # unique among the communicators that the same learners make
        self._tag = f"hvd_adpsgd.side.{world.collectives.messages.agreement.number}"

    def make(self) -> Any:
        """Make it, with all surviving learners; may block without bound."""
        from mpi4py import MPI

        self.comm = MPI.Intracomm.Create_from_group(
            self._group, self._tag, errhandler=MPI.ERRORS_RETURN
        )
        self._group.Free()
        return self.comm

    def revoke(self) -> None:
        """End what waits on it."""
        from mpi4py import MPI

        with contextlib.suppress(MPI.Exception):
            if self.comm is not None:
                self.comm.Revoke()


def connect(side: Any, world: World, port: str | None, root: int, accepts: bool) -> MergedComms:
    """Make the communicators of the surviving learners and one joining learner; waits for all of them.

    Args:
        side: a communicator of the surviving learners, or of the joining one; used for nothing else.
        world: of this learner.
        port: needed on `root` only.
        root: rank in `side`.
        accepts: surviving learners accept, the joining learner connects.
    """
    from mpi4py import MPI

    meet = side.Accept if accepts else side.Connect
    between = meet(port or "", root=root)
    between.Set_errhandler(MPI.ERRORS_RETURN)
    merged = _merged(between, high=not accepts)
    comm = merged.Split(0, world.rank)
    outer = comm.Split(0 if world.is_leader else MPI.UNDEFINED, world.rank)
    plain, goodbye = comm.Dup(), comm.Dup()
    for made in (comm, plain, goodbye):
        made.Set_errhandler(MPI.ERRORS_RETURN)
    merged.Free()
    ranks = tuple(allgather_object(comm, world.rank))
    members = tuple(i for i, group in enumerate(world.groups) if group[0] in ranks)
    outer = None if outer == MPI.COMM_NULL else outer
    return MergedComms(comm, plain, ranks, ShutdownBarrier(goodbye, ranks), outer, members)
