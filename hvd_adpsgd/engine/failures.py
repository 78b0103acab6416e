"""Turns MPI's exceptions into this library's, and tells whether processes survive a peer's failure (ULFM)."""

import contextlib
import os
import sys
from collections.abc import Iterator

from hvd_adpsgd.errors import PeerFailedError, TransportError


def ulfm_enabled() -> bool:
    """Whether Open MPI runs with ULFM, so that processes survive the failure of a peer."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")  # noqa: SIM112


def is_under_mpi() -> bool:
    """Whether this job runs over MPI: a job without MPI never imports mpi4py.MPI, as that initialises MPI."""
    return "mpi4py.MPI" in sys.modules


def mpi_exceptions() -> tuple[type[Exception], ...]:
    """The exception types of MPI for an `except` clause; () if the job runs without MPI."""
    if not is_under_mpi():
        return ()

    from mpi4py import MPI

    return (MPI.Exception,)


def ulfm_advice() -> str:
    """The last sentence of an error message about a failed learner: what the user should do."""
    if ulfm_enabled() or not is_under_mpi():
        return "Start the job again."
    return "Start the job again, under Open MPI's `--with-ft ulfm`, which lets the job continue without it."


@contextlib.contextmanager
def mpi_failures(doing: str) -> Iterator[None]:
    """Context manager that turns MPI's exceptions into PeerFailedError and TransportError.

    Args:
        doing: what the body does, for the message.

    Raises:
        PeerFailedError: if a learner failed.
        TransportError: if MPI failed otherwise.
    """
    if not is_under_mpi():
        yield
        return

    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        kind, text = error.Get_error_class(), error.Get_error_string()
        if kind in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED):
            raise PeerFailedError(
                f"{doing}: a learner failed meanwhile ({text}). {ulfm_advice()}", code=kind
            ) from error
        raise TransportError(
            f"{doing}: MPI failed ({text}). Start the job again.", code=kind
        ) from error
