"""Communicators of learners: over MPI, which is started here, or over sockets where no MPI joins them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.shared_memory import SHARED_FOLDER, host_name
from hvd_adpsgd.errors import (
    ConfigError,
    LaunchError,
    MissingRequirementError,
    PeerFailedError,
    TopologyError,
)
from hvd_adpsgd.launch.deadline import Deadline
from hvd_adpsgd.launch.rendezvous import BEGUN, HttpStore, Opener, Place, StoreGather, opened
from hvd_adpsgd.lifecycle.shutdown import exit_state
from hvd_adpsgd.messaging.sockets import Communicator, Hub

__all__ = [
    "counterparts",
    "duplicate",
    "load_mpi",
    "misses_heartbeats",
    "of_host",
    "of_learners",
    "options_of_network",
    "over_sockets",
    "refuse_comm",
    "require_alone",
    "require_mpi_launcher",
    "split",
    "with_wire",
]

_DETECTOR = "OMPI_MCA_mpi_ft_detector"
_PROPAGATOR = "OMPI_MCA_mpi_ft_propagator_with_rbcast"
_LEVELS = ("THREADS", "THREAD_LEVEL")  # variables of mpi4py: MPI4PY_RC_...
_missed_heartbeats: bool | None = None

# Set by a launcher for every process of a job. SLURM_NTASKS is left out: a batch script has it too.
_LAUNCHED_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "SLURM_STEP_NUM_TASKS")


def require_mpi_launcher(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if what the environment says fits neither MPI nor another launcher."""
    if environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        raise LaunchError(
            "init(): HOROVOD_CONTROLLER=gloo, but HOROVOD_GLOO_RENDEZVOUS_ADDR is not set, so `horovodrun "
            "--gloo` did not start this process. Start it so, or unset HOROVOD_CONTROLLER and use "
            "`horovodrun --mpi -np N python ...`."
        )


def refuse_comm(place: Place) -> LaunchError:
    """The error for init(comm=...) where MPI does not join the processes."""
    return LaunchError(
        f"init(comm=...): communicators and ranks of MPI.COMM_WORLD name learners under MPI, "
        f"and {place.launcher} started this process. Leave comm out, or launch with "
        "`horovodrun --mpi -np N python ...`."
    )


def load_mpi(deadline: Deadline) -> Any:
    """The module mpi4py.MPI, initialized with MPI_THREAD_MULTIPLE.

    Raises:
        LaunchError: if MPI is finalized, its thread level is lower, or a process does not come in time.
        MissingRequirementError: if mpi4py loads no MPI library.
    """
    import mpi4py

    os.environ.setdefault("HOME", os.path.expanduser("~"))  # without it Open MPI does not start
    if "mpi4py.MPI" not in sys.modules:  # else mpi4py has read its rc already, and finalizes
        mpi4py.rc.finalize = False
        exit_state.finalizes = True
    with _heartbeats():
        MPI = _running(deadline)
    _require_threads(MPI)
    return MPI


def _running(deadline: Deadline) -> Any:
    """mpi4py.MPI, started if it is not."""
    if "mpi4py.MPI" not in sys.modules and _mpi4py_starts_as_we_do():
        _start_mpi(deadline)
    MPI = _library()
    if MPI.Is_finalized():
        raise LaunchError(
            "init(): MPI is finalized in this process, and cannot be started twice. Call "
            "hvd.init() before MPI.Finalize()."
        )
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _mpi4py_starts_as_we_do() -> bool:
    """Whether nothing asks mpi4py for another way to start MPI; what it asks for is refused later."""
    import mpi4py

    asked = any(f"MPI4PY_RC_{name}" in os.environ for name in ("INITIALIZE", *_LEVELS))
    rc = mpi4py.rc
    return not asked and rc.initialize and rc.threads and rc.thread_level == "multiple"


def _start_mpi(deadline: Deadline) -> None:
    """MPI_Init, which has no time limit of its own."""
    try:
        from hvd_adpsgd.launch.mpi_start import start
    except ImportError as error:
        raise _no_library(error) from error
    try:
        deadline.bounded(start)
    except TimeoutError:
        raise _not_all_came("MPI_Init", deadline) from None


def _not_all_came(call: str, deadline: Deadline) -> LaunchError:
    exit_state.stuck = f"{call}, which waits for processes of the job that have not come"
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE")
    place = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return LaunchError(
        f"init(): {call} has not returned in {deadline} on {socket.gethostname()} "
        f"({place or 'no launcher'}): it waits for all processes of the job, and MPI does not say which are "
        "missing. Look in the output of the job for one that has ended, or does not call hvd.init(); raise "
        "the time-out if some start later."
    )


@contextlib.contextmanager
def _heartbeats() -> Iterator[None]:
    """Inside, MPI is started with its failure detector, whose thread horovodrun has set up.

    One process observes each other one, and by default its verdict reaches others through the launcher's
    daemons only, not if the failed one's host is gone: so it is broadcast by MPI.

    The variables do not stay: between hosts MPI_Finalize does not return with the detector, which only this
    library does not wait for, and not other programs that are started here.
    """
    global _missed_heartbeats
    prepared = os.environ.get(f"{_DETECTOR}_thread") == "1" and _DETECTOR not in os.environ
    if _missed_heartbeats is None:
        _missed_heartbeats = (
            prepared and "mpi4py.MPI" in sys.modules and _library().Is_initialized()
        )
    added = {_DETECTOR, _PROPAGATOR} - set(os.environ) if prepared else set()
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def misses_heartbeats() -> bool:
    """Whether MPI was started here before it could be started with its failure detector."""
    return bool(_missed_heartbeats)


def _library() -> Any:
    """mpi4py.MPI; it loads the MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise _no_library(error) from error
    return MPI


def _no_library(error: Exception) -> MissingRequirementError:
    return MissingRequirementError(
        f"init(): mpi4py loads no MPI library: {error}. Install the MPI that Horovod was built "
        "with, or python -m pip install 'hvd_adpsgd[mpi]' and python -m hvd_adpsgd build-horovod."
    )


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


def of_learners(mpi: Any, comm: Any, deadline: Deadline) -> Any:
    """A private communicator of all learners, errors returned.

    Raises:
        LaunchError: if one of them does not call this in time, or MPI has not started it.
    """
    try:
        everyone = deadline.bounded(lambda: _named_communicator(mpi, comm))
    except TimeoutError:
        raise _not_all_came("the first operation of all", deadline) from None
    everyone.Set_errhandler(mpi.ERRORS_RETURN)
    return everyone


def _named_communicator(mpi: Any, comm: Any) -> Any:
    _require_company(mpi.COMM_WORLD.Get_size(), os.environ)
    if isinstance(comm, mpi.Comm):
        return comm.Dup()
    ranks = [] if comm is None else _checked_ranks(comm, mpi.COMM_WORLD)
    if not ranks:
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
    started = environ.get("WORLD_SIZE", "")
    if size == 1 and started.isdigit() and int(started) > 1:
        raise LaunchError(
            f"init(): WORLD_SIZE={started}, but MPI sees a world of one, and RANK, MASTER_ADDR "
            "and MASTER_PORT are not all set. Launch with torchrun, which sets them, with "
            "`horovodrun -np N python ...`, or with mpirun."
        )
    for name in _LAUNCHED_SIZES:
        launched = environ.get(name, "")
        if size == 1 and launched.isdigit() and int(launched) > 1:
            use = "Launch with `srun --mpi=none`, use" if "SLURM_PROCID" in environ else "Use"
            raise LaunchError(
                f"init(): {name}={launched}, but MPI sees a world of one: the launcher belongs to "
                f"another MPI than the one mpi4py was built with. {use} the mpirun of this Python's "
                f"environment ({os.path.join(sys.prefix, 'bin', 'mpirun')}), or rebuild mpi4py and "
                "Horovod with the launcher's MPI."
            )


def require_alone(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if MPI's launcher has started several processes: they would not find each other."""
    for name in _LAUNCHED_SIZES:
        size = environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise LaunchError(
                f"init(): HVD_ADPSGD_JOIN is set, and {name}={size}: a super learner joins without MPI. "
                "Start its learners with `horovodrun --gloo`, `srun --mpi=none` or torchrun, or one without "
                "a launcher."
            )


_attempts = itertools.count()  # to connect: a failed init() may be followed by another one


def over_sockets(
    place: Place, opener: Opener | None, config: Config, deadline: Deadline
) -> Communicator:
    """A private communicator of all learners that met at this place.

    Args:
        place: of this process.
        opener: of torch's TCPStore.
        config: as for Hub.
        deadline: of all waiting together.

    Raises:
        LaunchError: if one of them does not come, or cannot be reached.
        TopologyError: on all, if one of them finds no address to listen on.
    """
    if exit_state.hub is None:
        http = opener is None or place.speaks_http
        store = opened(place, HttpStore if http or opener is None else opener, deadline)
        gather = StoreGather(store, place, deadline, next(_attempts))
        try:
            hub = Hub(place.rank, place.size, config, gather)
        except TopologyError:
            with contextlib.suppress(LaunchError):
                gather(None)  # all have read the store, which may end with its process
            raise
        everyone = hub.communicator(range(place.size))
        assert everyone is not None
        _require_connected(everyone, place, deadline)
        exit_state.hub = hub
        if place.rank == 0:
            gather.clear()  # the job's secret must not stay in a store of another program (torchrun)
        if place.speaks_http:
            store.set(BEGUN, "1")  # from now on the launcher ends nobody because of another one
        return everyone
    everyone = exit_state.hub.communicator(range(exit_state.hub.size))
    assert everyone is not None
    return everyone


def _require_connected(everyone: Communicator, place: Place, deadline: Deadline) -> None:
    """Wait until all are connected; then all have read the store, too."""
    everyone.ends = deadline.ends
    try:
        everyone.allgather(None)
    except PeerFailedError:
        hub = everyone.hub
        silent = sorted(hub.ended) or [r for r in range(hub.size) if r not in hub.heard]
        where = ", ".join(f"{rank} at {hub.address_of(rank)}" for rank in silent)
        hub.close()
        raise LaunchError(
            f"init(): {place} met all others at {place.store}, but has no connection with learners "
            f"{where or 'that others have none with'}, for {deadline}: they have ended, or a firewall is in "
            "between. See what they say, and name the network that all hosts share in HVD_ADPSGD_NICS."
        ) from None
    everyone.ends = None


def options_of_network() -> Config:
    """The options, or their defaults if one is bad: that is told when all are connected."""
    try:
        return Config.from_environment()
    except ConfigError:
        return Config()


def with_wire(config: Config, everyone: Any) -> Config:
    """The options, with the wire that these learners can use.

    Raises:
        ConfigError: if it is not the one that was asked for.
    """
    if not isinstance(everyone, Communicator):
        return config
    if config.wire == "mpi":
        raise ConfigError(
            "HVD_ADPSGD_WIRE=mpi: MPI does not join the processes of this job, allowed are auto and tcp. "
            "Leave it out, or launch with `horovodrun --mpi`."
        )
    return config.replace(wire="tcp")


def duplicate(everyone: Any) -> Any:
    """Another communicator of all learners; all call this together."""
    if isinstance(everyone, Communicator):
        return everyone.hub.communicator(everyone.ranks)
    return everyone.Dup()


def of_host(everyone: Any) -> Any:
    """The learners of this host: those that share its memory."""
    if isinstance(everyone, Communicator):
        # Slurm may have several nodes on one host, each with tasks and devices of its own
        node = os.environ.get("SLURM_NODEID")
        mine = (host_name(), socket.gethostname(), os.stat(SHARED_FOLDER).st_dev, node)
        hosts = everyone.allgather(mine)
        return everyone.hub.communicator([rank for rank, host in enumerate(hosts) if host == mine])

    from mpi4py import MPI

    return everyone.Split_type(MPI.COMM_TYPE_SHARED, key=everyone.Get_rank())


def split(everyone: Any, groups: Sequence[Sequence[int]], shards: int = 1) -> tuple[Any, Any]:
    """(inner, outer or None): the learners of this super learner, and this learner's counterparts.

    Args:
        everyone: all learners.
        groups: ranks of each super learner.
        shards: so many learners of each super learner have counterparts; 1: the leaders.
    """
    rank = everyone.Get_rank()
    super_rank = next(i for i, group in enumerate(groups) if rank in group)
    if isinstance(everyone, Communicator):
        inner = everyone.hub.communicator(groups[super_rank])
        return inner, counterparts(everyone.hub, groups, rank, shards)

    from mpi4py import MPI

    place = groups[super_rank].index(rank)
    inner = everyone.Split(super_rank, rank)
    outer = everyone.Split(place if place < shards else MPI.UNDEFINED, rank)
    return inner, None if outer == MPI.COMM_NULL else outer


def counterparts(
    hub: Hub, groups: Sequence[Sequence[int]], rank: int, shards: int
) -> Communicator | None:
    """The learners with this one's place in their super learners; None behind the first `shards` places."""
    place = next(group.index(rank) for group in groups if rank in group)
    return hub.communicator([group[place] for group in groups] if place < shards else [])
