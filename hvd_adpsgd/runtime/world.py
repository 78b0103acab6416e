"""The worlds of the learners: set up together, torn down in bounded time.

All learners share one MPI communicator. Each super learner has a communicator of its own, which
Horovod runs in (one Horovod world per super learner, so that no Horovod operation waits for another
super learner), and the leaders of the super learners have one among themselves.

Nothing here happens at import; MPI, Horovod and torch are loaded by `init`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hvd_adpsgd import strategies
from hvd_adpsgd.config import Config, environment_name
from hvd_adpsgd.errors import (
    AlreadyInitializedError,
    ConfigError,
    InnerOnlyError,
    LaunchError,
    NotInitializedError,
    PeerFailedError,
    TopologyError,
    TransportError,
    WorldError,
)
from hvd_adpsgd.runtime import shutdown as leaving
from hvd_adpsgd.runtime import state_dump
from hvd_adpsgd.runtime.collectives import (
    allgather_object,
    failed_comm_ranks,
    mpi_failures,
    run_collective,
    wait,
)
from hvd_adpsgd.runtime.shutdown import ShutdownBarrier, exit_state

__all__ = [
    "Placement",
    "World",
    "current",
    "enter",
    "form_super_learners",
    "init",
    "is_initialized",
    "load_mpi",
    "merge_super_learners",
    "shutdown",
    "wait",
]

T = TypeVar("T")

log = logging.getLogger("hvd_adpsgd")

_PER_LEARNER = ("log_level", "state_dir")  # options in which learners may differ
# Set by a launcher for every process of a job; SLURM_NTASKS is not here, for a batch script has it
# too.
_LAUNCHED_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Placement:
    """Where one learner sits.

    Attributes:
        host: smallest rank among the learners of its host; names the host.
        hostname: for messages only; hosts may share it.
        local_rank, local_size: its place among the learners of its host.
    """

    host: int
    hostname: str
    local_rank: int
    local_size: int


@dataclass(eq=False)
class World:
    """One learner's place, and the communicators (mpi4py, errors returned) that it belongs to.

    Attributes:
        config: the options, the same on all learners.
        comm: all learners that live; without the lost ones after `together` has noticed.
        ranks: the learners of `comm`, by their rank there.
        on_failure: what operations over all learners do without the lost: "continue" or "raise".
        joining: a joining learner that has not met the others yet; `comm` is its super learner.
        mixed: some were started later. MPI_Finalize of those started together does not wait for the
            rest, whom an early end would keep from meeting; so all meet twice in shutdown.
        owned: communicators that are freed when all have met. MPI_Finalize would wait for everybody in
            two or more of a mixed world.
        goodbye: all learners; used by shutdown only.
        host: the learners of this host.
        inner: the learners of this super learner.
        outer: the leaders; None on learners that lead nothing.
        members: the super learners that they lead, by their rank there; () means all.
        rank, size: among all learners.
        local_rank, local_size: among the learners of the host.
        cross_rank, cross_size: among the learners with this local_rank, one per host at most.
        super_rank, super_size: which super learner, of how many; numbered by their smallest ranks.
        inner_rank, inner_size: among the learners of the super learner.
        groups: ranks of the learners of each super learner, by super_rank; the first leads.
        hostname: of this host.
        placements: of all learners, by rank.
        broken: this super learner cannot go on, for it lost a learner.
        before_collective: called before each operation over all learners.
    """

    config: Config
    comm: Any
    host: Any
    inner: Any
    outer: Any
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    super_rank: int
    super_size: int
    inner_rank: int
    inner_size: int
    groups: tuple[tuple[int, ...], ...]
    hostname: str
    placements: tuple[Placement, ...]
    ranks: tuple[int, ...]
    goodbye: ShutdownBarrier
    on_failure: str
    broken: bool = False
    joining: bool = False
    members: tuple[int, ...] = ()
    mixed: bool = False
    owned: list[Any] = field(default_factory=list)
    before_collective: list[Callable[[], object]] = field(default_factory=list)
    _stops: list[Callable[[], object]] = field(default_factory=list)

    @property
    def is_leader(self) -> bool:
        """Whether this learner speaks for its super learner."""
        return self.inner_rank == 0

    def together(self, doing: str, operation: Callable[[Any], T]) -> T:
        """Run a collective operation over all learners, again without those lost meanwhile.

        `comm` and `ranks` change when learners failed. See together.run_collective.

        Args:
            doing: what is done, for messages.
            operation: gets the communicator.

        Returns:
            What the operation returns.

        Raises:
            PeerFailedError: on all learners, if one has failed and `on_failure` says "raise".
            PeerFailedError, TransportError: if MPI fails and ULFM is off.
        """

        def told(comm: Any) -> T:
            if comm is not self.comm:
                self._adopt(comm, doing)
            if self.on_failure == "raise" and not self.joining:
                self._require_everybody(doing)
            return operation(comm)

        for call in list(self.before_collective):
            call()
        return run_collective(self.comm, doing, told)[0]

    def _adopt(self, comm: Any, doing: str) -> None:
        """Go on with the communicator of the living."""
        ranks = tuple(allgather_object(comm, self.rank))
        lost = sorted(set(self.ranks) - set(ranks))
        self.comm, self.ranks = comm, ranks
        if self.rank == ranks[0]:
            log.warning(
                "%s: failed learners %s; operations over all learners go on with the other %d.",
                doing,
                lost,
                len(ranks),
            )

    def _require_everybody(self, doing: str) -> None:
        """The same outcome on all learners of `comm`."""
        if len(self.ranks) < self.size:
            lost = sorted(set(range(self.size)) - set(self.ranks))
            raise PeerFailedError(
                f"{doing}: learners {lost} of {self.size} have failed, and HVD_ADPSGD_ON_LOSS or "
                'hvd.on_failure says "raise". Save the model and restart, or go on with the others '
                'inside `with hvd.on_failure("continue")`.'
            )

    def lost(self) -> tuple[int, ...]:
        """Ranks of the learners that this one knows to have failed, and of those beside them.

        A super learner leaves when one of its learners has failed. Others may know a moment later.
        """
        failed = set(range(self.size)) - set(self.ranks)
        failed |= {self.ranks[place] for place in failed_comm_ranks(self.comm)}
        return tuple(sorted(r for group in self.groups if failed & set(group) for r in group))

    def failed_in_node(self, seconds: float) -> set[int]:
        """Ranks of the learners of this super learner that have failed, once there are any.

        Args:
            seconds: longest wait for news; an end without a goodbye takes a moment to be known.
        """
        ends = time.monotonic() + seconds
        while not (lost := failed_comm_ranks(self.inner)) and time.monotonic() < ends:
            time.sleep(1e-3)
        return {self.groups[self.super_rank][inner_rank] for inner_rank in lost}

    def fails(self) -> bool:
        """Whether this learner is on its way out because something failed."""
        return self.broken or (_current is not self and leaving.script_fails())

    def failed_super_learners(self, super_ranks: Sequence[int]) -> None:
        """The end of the job shall tell that these failed."""
        exit_state.failing.update(rank for i in super_ranks for rank in self.groups[i])

    def at_shutdown(self, stop: Callable[[], object]) -> None:
        """Call `stop` first in shutdown(), the last registered first. It must be bounded."""
        self._stops.append(stop)

    def forget(self, stop: Callable[[], object]) -> None:
        """`stop` was done before shutdown(), and whatever it holds on to may go."""
        if stop in self._stops:
            self._stops.remove(stop)


_current: World | None = None


# ---- set up -------------------------------------------------------------------------------------


def init(config: Config | None = None, *, comm: Any = None, process_sets: Any = None) -> World:
    """Make the worlds; all learners call this together.

    Args:
        config: the options; default from the environment. Equal on all learners.
        comm: the learners, instead of all processes of the job: an mpi4py communicator, or ranks
            of MPI.COMM_WORLD (only the named processes may call then).
        process_sets: as in Horovod's init; only with one super learner.

    Returns:
        The world, which `current` returns from now on.

    Raises:
        AlreadyInitializedError: after an init without a shutdown.
        LaunchError: if the processes were started in a way in which the worlds cannot be made.
        ConfigError: on all learners, if an option is bad on one or differs between two.
        TopologyError: on all learners, if super_learner_size does not divide a host's learners.
        InnerOnlyError: on all learners, for process_sets with several super learners.
        PeerFailedError: if a learner ends meanwhile.
    """
    if _current is not None:
        raise AlreadyInitializedError(
            f"init() on learner {_current.rank}: hvd_adpsgd is initialized already. Call "
            "hvd.shutdown() first, or drop the second call."
        )
    _require_whole()
    _require_mpi_launcher(os.environ)
    everyone = _communicator(load_mpi(), comm)
    try:
        with mpi_failures("init()"):
            world = _make_world(everyone, config, bool(process_sets))
    except TransportError:
        exit_state.lacks_others(everyone)
        raise
    except Exception:
        everyone.Free()
        raise
    return enter(world, process_sets)


def enter(world: World, process_sets: Any = None) -> World:
    """Start Horovod in the super learner; `current` returns this world from now on."""
    global _current
    _start_horovod(world.inner, process_sets)
    _log_from(world.config.log_level)
    _current, exit_state.has_begun = world, True
    state_dump.add_source("world", _describe)
    state_dump.watch(world.rank, world.config.state_dir)
    return world


def _describe() -> dict[str, Any] | None:
    """The world as a state file shows it; None after shutdown()."""
    world = _current
    if world is None:
        return None
    shown = ("rank", "size", "super_rank", "super_size", "inner_rank", "inner_size", "hostname")
    return {
        **{name: getattr(world, name) for name in shown},
        "super_learners": world.groups,
        "left_in_communicator": world.ranks,
        "on_failure": world.on_failure,
        "config": dataclasses.asdict(world.config),
    }


def _log_from(level: str) -> None:
    """Show messages from `level` on; on stderr if the script has not set up logging."""
    log.setLevel(level.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvd_adpsgd: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        log.addHandler(handler)


def current() -> World:
    """The world made by init().

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    if _current is None:
        raise NotInitializedError("hvd_adpsgd has not been initialized; use hvd.init().")
    return _current


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() not since."""
    return _current is not None


def _require_whole() -> None:
    if exit_state.stuck:
        raise WorldError(
            "init() after a shutdown() that had to leave Horovod behind: a learner of this super "
            "learner had stopped or died, and Horovod still waits for it. Start the process again."
        )


def _require_mpi_launcher(environ: Mapping[str, str]) -> None:
    controller = environ.get("HOROVOD_CONTROLLER", "").lower()
    rendezvous = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ
    if controller == "gloo" or rendezvous:
        found = (
            "HOROVOD_CONTROLLER=gloo" if controller == "gloo" else "HOROVOD_GLOO_RENDEZVOUS_ADDR"
        )
        raise LaunchError(
            f"init(): the job was launched with the Gloo controller ({found} is set), under which "
            "MPI sees a world of one. Launch with `horovodrun --mpi -np N python ...`, or with "
            "mpirun."
        )


def load_mpi(start: Callable[[Any], object] | None = None) -> Any:
    """The module mpi4py.MPI, once it is known to serve us.

    Args:
        start: starts MPI instead of mpi4py, if it is not running; gets the module.

    Raises:
        LaunchError: if it does not.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:  # else mpi4py has read its rc already, and finalizes
        mpi4py.rc.finalize = False
        if start is not None:
            mpi4py.rc.initialize = False
        exit_state.finalizes = True
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise LaunchError(
            "init(): MPI is finalized in this process, and cannot be started twice. Call "
            "hvd.init() before MPI.Finalize()."
        )
    if not MPI.Is_initialized() and start is not None:
        start(MPI)
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    leaving.mark(True)
    leaving.at_exit(shutdown, _leave_deadline_s)
    _require_threads(MPI)
    return MPI


def _require_threads(mpi: Any) -> None:
    names = {
        mpi.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        mpi.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        mpi.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    }
    level = mpi.Query_thread()
    if level < mpi.THREAD_MULTIPLE:
        raise LaunchError(
            f"init(): MPI runs at {names.get(level, level)}, needed is MPI_THREAD_MULTIPLE, because "
            "Horovod, the averaging engine and the script call MPI from their own threads. Unset "
            "MPI4PY_RC_THREAD_LEVEL, MPI4PY_RC_THREADS and HOROVOD_MPI_THREADS_DISABLE, drop "
            "mpi4py.rc.thread_level from the script, or use an MPI built with thread support."
        )


def _communicator(mpi: Any, comm: Any) -> Any:
    """A private communicator of all learners, errors returned."""
    everyone = _named_communicator(mpi, comm)
    everyone.Set_errhandler(mpi.ERRORS_RETURN)
    return everyone


def _named_communicator(mpi: Any, comm: Any) -> Any:
    if isinstance(comm, mpi.Comm):
        return comm.Dup()
    ranks = [] if comm is None else _checked_ranks(comm, mpi.COMM_WORLD)
    if not ranks:
        _require_company(mpi.COMM_WORLD.Get_size(), os.environ)
        return mpi.COMM_WORLD.Dup()
    return mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.Get_group().Incl(ranks))


def _checked_ranks(comm: Any, parent: Any) -> list[int]:
    try:
        ranks = [int(rank) for rank in comm]
    except (TypeError, ValueError):
        raise ConfigError(
            f"init(): comm is a {type(comm).__name__}, allowed are an mpi4py communicator and a "
            "sequence of ranks of MPI.COMM_WORLD. Pass one of these, or leave it out."
        ) from None
    size, rank = parent.Get_size(), parent.Get_rank()
    if ranks and (len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size))):
        raise ConfigError(
            f"init(): comm={ranks}, allowed are different ranks in [0, {size}). Correct the list."
        )
    if ranks and rank not in ranks:
        raise ConfigError(
            f"init(): this process is rank {rank}, which is not in comm={ranks}. Call init() only "
            "in the processes named."
        )
    return ranks


def _require_company(size: int, environ: Mapping[str, str]) -> None:
    """A launcher that started several processes must have started them under this MPI."""
    for name in _LAUNCHED_SIZES:
        launched = environ.get(name, "")
        if size == 1 and launched.isdigit() and int(launched) > 1:
            raise LaunchError(
                f"init(): {name}={launched}, but MPI sees a world of one: the launcher belongs to "
                "another MPI than the one mpi4py was built with. Use the mpirun of this Python's "
                f"environment ({os.path.join(sys.prefix, 'bin', 'mpirun')}), or rebuild mpi4py and "
                "Horovod with the launcher's MPI."
            )


def _make_world(everyone: Any, config: Config | None, asks_sets: bool) -> World:
    """Agree with all learners, then cut the communicator; the same outcome on all of them."""
    hosts = _host_communicator(everyone)
    answers = allgather_object(everyone, _answer(everyone, hosts, config, asks_sets))
    checked = _agreed_config(answers)
    placements = tuple(answer["placement"] for answer in answers)
    joined = strategies.parse(checked.averaging).averages == "nothing"
    groups = form_super_learners(placements, None if joined else checked.super_learner_size, joined)
    asking = [rank for rank, answer in enumerate(answers) if answer["sets"]]
    if asking and len(groups) > 1:
        raise InnerOnlyError(
            f"init(process_sets=...) on learner {asking[0]}: process sets work with one super "
            f"learner, this job has {len(groups)}. Leave process_sets out, or start the job as one "
            "super learner (HVD_ADPSGD_AVERAGING=synchronous)."
        )
    return _cut(everyone, hosts, checked, placements, groups)


def _host_communicator(everyone: Any) -> Any:
    """The learners of this host, by MPI's shared-memory split."""
    from mpi4py import MPI

    return everyone.Split_type(MPI.COMM_TYPE_SHARED, key=everyone.Get_rank())


def _answer(everyone: Any, host: Any, config: Config | None, asks_sets: bool) -> dict[str, Any]:
    """What this learner tells the others: its placement, and its options or what is wrong with them."""
    head = host.bcast(everyone.Get_rank())
    placement = Placement(head, socket.gethostname(), host.Get_rank(), host.Get_size())
    options, problem = None, None
    try:
        options = config if config is not None else Config.from_environment()
        strategies.parse(options.averaging)
    except ConfigError as error:
        problem = str(error)
    return {"placement": placement, "config": options, "problem": problem, "sets": asks_sets}


def _agreed_config(answers: Sequence[dict[str, Any]]) -> Config:
    for rank, answer in enumerate(answers):
        if answer["problem"] is not None:
            raise ConfigError(f"{answer['problem']} (on learner {rank})")
    first = answers[0]["config"]
    for rank, answer in enumerate(answers):
        for name, value in dataclasses.asdict(answer["config"]).items():
            if name not in _PER_LEARNER and value != getattr(first, name):
                raise ConfigError(
                    f"{name} differs between learners: {environment_name(name)} or Config.{name} "
                    f"is {getattr(first, name)!r} on learner 0 and {value!r} on learner {rank}. "
                    "Set the same value on all learners (horovodrun passes the environment on; "
                    "mpirun needs -x)."
                )
    config: Config = answers[0]["config"]
    return config


def form_super_learners(
    placements: Sequence[Placement], size: int | None, joined: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Which learners form which super learner.

    Args:
        placements: of all learners, by rank.
        size: learners per super learner; None: all of a host.
        joined: all learners form one super learner.

    Returns:
        Ranks of each super learner, ascending; super learners by their smallest rank.

    Raises:
        TopologyError: if `size` does not divide the learners of some host.
    """
    if joined:
        return (tuple(range(len(placements))),)
    members: dict[tuple[int, int], list[int]] = {}
    for rank, placement in enumerate(placements):
        k = placement.local_size if size is None else size
        if placement.local_size % k:
            raise TopologyError(
                f"super learners of {k} on host {placement.hostname}: HVD_ADPSGD_SUPER_LEARNER_SIZE={k} "
                f"does not divide its {placement.local_size} learners. Set it to a divisor of "
                f"{placement.local_size}, or start a multiple of {k} learners on that host."
            )
        members.setdefault((placement.host, placement.local_rank // k), []).append(rank)
    return tuple(sorted(tuple(sorted(ranks)) for ranks in members.values()))


def _cut(
    everyone: Any,
    host: Any,
    config: Config,
    placements: tuple[Placement, ...],
    groups: Sequence[Sequence[int]],
) -> World:
    rank = everyone.Get_rank()
    placement = placements[rank]
    super_rank = next(i for i, group in enumerate(groups) if rank in group)
    inner, outer = _split(everyone, super_rank, rank == groups[super_rank][0])
    crossing = [r for r, other in enumerate(placements) if other.local_rank == placement.local_rank]
    return World(
        config=config,
        comm=everyone,
        host=host,
        inner=inner,
        outer=outer,
        rank=rank,
        size=everyone.Get_size(),
        local_rank=placement.local_rank,
        local_size=placement.local_size,
        cross_rank=crossing.index(rank),
        cross_size=len(crossing),
        super_rank=super_rank,
        super_size=len(groups),
        inner_rank=inner.Get_rank(),
        inner_size=inner.Get_size(),
        groups=tuple(tuple(group) for group in groups),
        on_failure=config.on_failure,
        hostname=placement.hostname,
        placements=placements,
        ranks=tuple(range(len(placements))),
        goodbye=ShutdownBarrier.of_all(everyone.Dup()),
    )


def _split(everyone: Any, super_rank: int, leads: bool) -> tuple[Any, Any]:
    """(inner, outer or None): both ordered by rank."""
    from mpi4py import MPI

    rank = everyone.Get_rank()
    inner = everyone.Split(super_rank, rank)
    outer = everyone.Split(0 if leads else MPI.UNDEFINED, rank)
    return inner, None if outer == MPI.COMM_NULL else outer


def _start_horovod(inner: Any, process_sets: Any) -> None:
    """Horovod's world over the super learner."""
    import horovod.torch as horovod
    from horovod.torch import mpi_ops

    horovod.init(comm=inner, process_sets=process_sets)
    # Horovod's exit handler waits without bound for the others of its world; ours does not.
    atexit.unregister(mpi_ops._basics.shutdown)


def merge_super_learners(world: World) -> World:
    """Make one super learner of all learners; all call this together.

    Returns:
        The world with super_size 1, which `current` returns from now on.

    Raises:
        WorldError: if a learner has failed, or Horovod cannot be stopped within leave_deadline_s.
    """
    global _current
    if world.super_size == 1:
        return world
    if len(world.ranks) < world.size:
        raise WorldError(
            f"merge_super_learners(): learners {sorted(set(range(world.size)) - set(world.ranks))} of "
            f"{world.size} have failed, and one super learner needs all of its learners. Restart the job, "
            "or average with a strategy that goes on without them (random_pairs)."
        )
    if not _stop_horovod(world.config.leave_deadline_s):
        raise WorldError(
            "merge_super_learners(): Horovod did not stop within "
            f"leave_deadline_s={world.config.leave_deadline_s:g} s, so a learner of super learner "
            f"{world.super_rank} has stopped or died. Start the job again."
        )
    old = (world.inner, world.outer, world.goodbye.comm)
    everyone = tuple(range(world.size))
    merged = _cut(world.comm, world.host, world.config, world.placements, [everyone])
    merged._stops = world._stops
    _start_horovod(merged.inner, None)
    _free(*old)
    _current = merged
    return merged


# ---- tear down ----------------------------------------------------------------------------------


def shutdown() -> None:
    """Leave: stop what was registered, then Horovod, then free the communicators.

    Waits for the other learners at most leave_deadline_s; idempotent. init() may follow.

    Raises:
        Exception: the first that a registered callback raised, once all else is done.
    """
    global _current
    world, _current = _current, None
    if world is None:
        return
    failures = list(_run_stops(world))
    ends = time.monotonic() + world.config.leave_deadline_s
    stopped = _stop_horovod(world.config.leave_deadline_s)
    if leaving.meet_all(world.goodbye, world.fails(), stopped, ends):
        _free_all(world)
        leaving.mark(False)
    if failures:
        raise failures[0]


def _run_stops(world: World) -> Iterator[Exception]:
    """Run all callbacks, the last registered first; what they raise is logged and yielded."""
    while world._stops:
        stop = world._stops.pop()
        try:
            stop()
        except Exception as error:  # the others must be stopped too
            log.error("learner %d, at shutdown: %s", world.rank, error, exc_info=error)
            yield error


def _leave_deadline_s() -> float:
    return (_current.config if _current else Config()).leave_deadline_s


def _stop_horovod(seconds: float) -> bool:
    """Stop Horovod's world; False if it still waits for some learner after `seconds`.

    A thread left behind in Horovod is a weakness that we accept: there is no way to interrupt it.
    """
    import horovod.torch as horovod

    exit_state.stuck = not leaving.returns(horovod.shutdown, seconds)
    if exit_state.stuck:
        log.warning(
            "Horovod did not stop within %g s: a learner of this super learner has stopped or died. "
            "It is left behind.",
            seconds,
        )
    return not exit_state.stuck


def _free_all(world: World) -> None:
    """Free the communicators, when all have met: others may still use theirs before."""
    _free(*world.owned, world.outer, world.inner, world.host, world.comm)
    if world.mixed:
        leaving.meet(world.goodbye, False, time.monotonic() + world.config.leave_deadline_s)
    _free(world.goodbye.comm)


def _free(*communicators: Any) -> None:
    from mpi4py import MPI

    for comm in communicators:
        if comm is not None:
            with contextlib.suppress(MPI.Exception):  # of a failed learner; nothing is left to do
                comm.Free()
