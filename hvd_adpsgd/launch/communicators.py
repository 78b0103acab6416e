"""Makes the communicators of learners: over MPI, which this module starts, or without MPI over sockets."""

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
from hvd_adpsgd.launch.processes import variables
from hvd_adpsgd.launch.rendezvous import BEGUN, HttpStore, Opener, Place, StoreGather, opened
from hvd_adpsgd.lifecycle.shutdown import exit_state
from hvd_adpsgd.messaging.sockets import Communicator, Hub

_DETECTOR = "OMPI_MCA_mpi_ft_detector"
_PROPAGATOR = "OMPI_MCA_mpi_ft_propagator_with_rbcast"
_LEVELS = ("THREADS", "THREAD_LEVEL")  # of mpi4py's variables MPI4PY_RC_...
_missed_heartbeats: bool | None = None

# Variables that a launcher sets, for every process of a job, to the number of processes. SLURM_NTASKS is left
# out, because it is also set in a batch script, which is no process of the job.
_LAUNCHED_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "SLURM_STEP_NUM_TASKS")


def require_mpi_launcher(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if HOROVOD_CONTROLLER is gloo, but `horovodrun --gloo` did not start this process."""
    if environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        raise LaunchError(
            "init(): HOROVOD_CONTROLLER=gloo, but HOROVOD_GLOO_RENDEZVOUS_ADDR is not set, so `horovodrun "
            "--gloo` did not start this process. Start it so, or unset HOROVOD_CONTROLLER and use "
            "`horovodrun --mpi -np N python ...`."
        )


def refuse_comm(place: Place) -> LaunchError:
    """Return the error for init(comm=...) in a job whose processes MPI does not join."""
    return LaunchError(
        f"init(comm=...): communicators and ranks of MPI.COMM_WORLD name learners under MPI, "
        f"and {place.launcher} started this process. Leave comm out, or launch with "
        "`horovodrun --mpi -np N python ...`."
    )


def load_mpi(deadline: Deadline) -> Any:
    """Return the module mpi4py.MPI, with MPI started at MPI_THREAD_MULTIPLE.

    Raises:
        LaunchError: if MPI is finalized, its thread level is lower, or a process does not start MPI in time.
        MissingRequirementError: if mpi4py loads no MPI library.
    """
    import mpi4py

    os.environ.setdefault("HOME", os.path.expanduser("~"))  # Open MPI does not start without HOME
    if "mpi4py.MPI" not in sys.modules:  # else mpi4py has read its rc already, and finalizes MPI
        mpi4py.rc.finalize = False
        exit_state.finalizes = True
    with _heartbeats():
        MPI = _running(deadline)
    _require_threads(MPI)
    return MPI


def _running(deadline: Deadline) -> Any:
    """Return the module mpi4py.MPI; start MPI if it is not running."""
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
    """Return whether mpi4py would start MPI as this module does: no variable, no mpi4py.rc says otherwise."""
    import mpi4py

    asked = any(f"MPI4PY_RC_{name}" in os.environ for name in ("INITIALIZE", *_LEVELS))
    rc = mpi4py.rc
    return not asked and rc.initialize and rc.threads and rc.thread_level == "multiple"


def _start_mpi(deadline: Deadline) -> None:
    """Start MPI, at most until the deadline: MPI_Init has no time limit of its own."""
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
    """Context manager in which MPI starts with its failure detector, if horovodrun has set it up.

    Each process observes the heartbeats of one other process. By default a failure is reported through the
    launcher's daemons only, which cannot report it if the host of the failed process is gone. So a variable
    is set by which MPI itself broadcasts the failure.

    The variables are removed afterwards: with the detector, MPI_Finalize between hosts does not return. This
    library does not wait for MPI_Finalize, but other programs that this process starts would.
    """
    global _missed_heartbeats
    prepared = os.environ.get(f"{_DETECTOR}_thread") == "1" and _DETECTOR not in os.environ
    if _missed_heartbeats is None:
        _missed_heartbeats = (
            prepared and "mpi4py.MPI" in sys.modules and _library().Is_initialized()
        )
    added = {_DETECTOR, _PROPAGATOR} - set(os.environ) if prepared else set()
    with variables(dict.fromkeys(added, "1")):
        yield


def misses_heartbeats() -> bool:
    """Return whether MPI was running before init(), which could not start it with its failure detector."""
    return bool(_missed_heartbeats)


def _library() -> Any:
    """Import and return mpi4py.MPI, which loads the MPI library."""
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
    """Return a private MPI communicator of all learners, with the error handler MPI.ERRORS_RETURN.

    Raises:
        LaunchError: if a learner does not call this in time, or was not started under this MPI.
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
    """Raise LaunchError if a launcher started several processes, but MPI sees only this one."""
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
    """Raise LaunchError if a launcher has started several processes that would not find each other."""
    for name in _LAUNCHED_SIZES:
        size = environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise LaunchError(
                f"init(): HVD_ADPSGD_JOIN is set, and {name}={size}: a super learner joins without MPI. "
                "Start its learners with `horovodrun --gloo`, `srun --mpi=none` or torchrun, or one without "
                "a launcher."
            )


_attempts = itertools.count()  # numbers the attempts of init(), which may be called again


def over_sockets(
    place: Place, opener: Opener | None, config: Config, deadline: Deadline
) -> Communicator:
    """Return a private communicator of all learners over sockets, whose addresses are exchanged in a store.

    Args:
        place: rank of this process, and where the store is.
        opener: connects to torch's TCPStore; None: the store is Horovod's rendezvous server.
        config: the options, see Hub.
        deadline: the deadline of all waits together.

    Raises:
        LaunchError: if a learner does not come in time, or cannot be reached.
        TopologyError: on all learners, if one of them finds no address to listen on.
    """
    if exit_state.hub is None:
        http = opener is None or place.speaks_http
        store = opened(place, HttpStore if http or opener is None else opener, deadline)
        gather = StoreGather(store, place, deadline, next(_attempts))
        try:
            hub = Hub(place.rank, place.size, config, gather)
        except TopologyError:
            with contextlib.suppress(LaunchError):
                # waits until all have read the store, which may end with the process that serves it
                gather(None)
            raise
        everyone = hub.communicator(range(place.size))
        assert everyone is not None
        _require_connected(everyone, place, deadline)
        exit_state.hub = hub
        if place.rank == 0:
            gather.clear()  # the job's secret must not stay in a store of another program (torchrun)
        if place.speaks_http:
            store.set(BEGUN, "1")  # from now on the launcher does not end the others if one fails
        return everyone
    everyone = exit_state.hub.communicator(range(exit_state.hub.size))
    assert everyone is not None
    return everyone


def _require_connected(everyone: Communicator, place: Place, deadline: Deadline) -> None:
    """Wait until all learners are connected to each other, and so have read the store."""
    everyone.ends = deadline.ends
    try:
        everyone.allgather(None)
    except PeerFailedError:
        hub = everyone.hub
        silent = sorted(hub.ended) or [r for r in range(hub.size) if r not in hub.heard]
        where = ", ".join(f"{rank} at {hub.address_of(rank)}" for rank in silent)
        hub.close()
        raise LaunchError(
            f"init(): {place} found all others in {place.store}, but has no connection with learners "
            f"{where or 'that others could not reach'} after {deadline}: they have ended, or a firewall is "
            "in between. Look at their output, and name the network that all hosts share in HVD_ADPSGD_NICS."
        ) from None
    everyone.ends = None


def options_of_network() -> Config:
    """Return the options; the defaults if an option is invalid, which init() reports after connecting."""
    try:
        return Config.from_environment()
    except ConfigError:
        return Config()


def with_wire(config: Config, everyone: Any) -> Config:
    """Return the options, with wire="tcp" if the learners are connected over sockets.

    Raises:
        ConfigError: if the options ask for wire="mpi" although the learners are connected over sockets.
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
    """Return a new communicator with the learners of `everyone`, which all call this together."""
    if isinstance(everyone, Communicator):
        return everyone.hub.communicator(everyone.ranks)
    return everyone.Dup()


def of_host(everyone: Any) -> Any:
    """Return a communicator of the learners of this host, which can share memory."""
    if isinstance(everyone, Communicator):
        # Slurm may have several nodes on one host, each with tasks and devices of its own
        node = os.environ.get("SLURM_NODEID")
        mine = (host_name(), os.stat(SHARED_FOLDER).st_dev, node)
        hosts = everyone.allgather(mine)
        return everyone.hub.communicator([rank for rank, host in enumerate(hosts) if host == mine])

    from mpi4py import MPI

    return everyone.Split_type(MPI.COMM_TYPE_SHARED, key=everyone.Get_rank())


def split(everyone: Any, groups: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Return two communicators: inner, of this super learner; outer, of the learners with this inner rank.

    Args:
        everyone: communicator of all learners.
        groups: ranks of the learners of each super learner, by super_rank. For learners whose inner rank some
            super learner lacks, outer is None.
    """
    rank = everyone.Get_rank()
    super_rank = next(i for i, group in enumerate(groups) if rank in group)
    if isinstance(everyone, Communicator):
        inner = everyone.hub.communicator(groups[super_rank])
        return inner, counterparts(everyone.hub, groups, rank)

    from mpi4py import MPI

    place = groups[super_rank].index(rank)
    inner = everyone.Split(super_rank, rank)
    outer = everyone.Split(place if place < min(map(len, groups)) else MPI.UNDEFINED, rank)
    return inner, None if outer == MPI.COMM_NULL else outer


def counterparts(hub: Hub, groups: Sequence[Sequence[int]], rank: int) -> Communicator | None:
    """Return a communicator of all learners with this one's inner rank; None if a super learner has none."""
    place = next(group.index(rank) for group in groups if rank in group)
    everywhere = place < min(map(len, groups))
    return hub.communicator([group[place] for group in groups] if everywhere else [])
