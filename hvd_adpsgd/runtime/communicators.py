"""MPI under the worlds: initialization, thread level, and communicators of learners."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hvd_adpsgd.errors import ConfigError, LaunchError, MissingRequirementError
from hvd_adpsgd.runtime.shutdown import exit_state

__all__ = ["load_mpi", "of_host", "of_learners", "require_mpi_launcher", "split"]

# Set by a launcher for every process of a job. SLURM_NTASKS is left out: a batch script has it too.
_LAUNCHED_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "SLURM_STEP_NUM_TASKS")


def require_mpi_launcher(environ: Mapping[str, str]) -> None:
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
    """The module mpi4py.MPI, initialized with MPI_THREAD_MULTIPLE.

    Args:
        start: initializes MPI in place of mpi4py, if it is not; receives the module.

    Raises:
        LaunchError: if MPI is finalized, or its thread level is lower.
        MissingRequirementError: if mpi4py loads no MPI library.
    """
    import mpi4py

    os.environ.setdefault("HOME", os.path.expanduser("~"))  # without it Open MPI does not start
    if "mpi4py.MPI" not in sys.modules:  # else mpi4py has read its rc already, and finalizes
        mpi4py.rc.finalize = False
        if start is not None:
            mpi4py.rc.initialize = False
        exit_state.finalizes = True
    MPI = _library()
    if MPI.Is_finalized():
        raise LaunchError(
            "init(): MPI is finalized in this process, and cannot be started twice. Call "
            "hvd.init() before MPI.Finalize()."
        )
    if not MPI.Is_initialized() and start is not None:
        start(MPI)
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    _require_threads(MPI)
    return MPI


def _library() -> Any:
    """mpi4py.MPI; it loads the MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingRequirementError(
            f"init(): mpi4py loads no MPI library: {error}. Install the MPI that Horovod was built "
            "with, or python -m pip install 'hvd_adpsgd[mpi]' and python -m hvd_adpsgd build-horovod."
        ) from error
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


def of_learners(mpi: Any, comm: Any) -> Any:
    """A private communicator of all learners, errors returned."""
    everyone = _named_communicator(mpi, comm)
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
            f"init(): WORLD_SIZE={started}, but MPI sees a world of one: torchrun, accelerate or a launcher "
            "like them started this process. Launch with `horovodrun -np N python ...`, or with mpirun."
        )
    for name in _LAUNCHED_SIZES:
        launched = environ.get(name, "")
        if size == 1 and launched.isdigit() and int(launched) > 1:
            raise LaunchError(
                f"init(): {name}={launched}, but MPI sees a world of one: the launcher belongs to "
                "another MPI than the one mpi4py was built with. Use the mpirun of this Python's "
                f"environment ({os.path.join(sys.prefix, 'bin', 'mpirun')}), or rebuild mpi4py and "
                "Horovod with the launcher's MPI."
            )


def of_host(everyone: Any) -> Any:
    """The learners of this host, by MPI's shared-memory split."""
    from mpi4py import MPI

    return everyone.Split_type(MPI.COMM_TYPE_SHARED, key=everyone.Get_rank())


def split(everyone: Any, super_rank: int, leads: bool) -> tuple[Any, Any]:
    """(inner, outer or None): both ordered by rank."""
    from mpi4py import MPI

    rank = everyone.Get_rank()
    inner = everyone.Split(super_rank, rank)
    outer = everyone.Split(0 if leads else MPI.UNDEFINED, rank)
    return inner, None if outer == MPI.COMM_NULL else outer
