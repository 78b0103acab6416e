# cython: language_level=3
"""Call of MPI_Init_thread that releases the GIL.

Compiled, because mpi4py holds the GIL during this call: MPI_Init waits without bound for a process that has
ended before calling it, and no other Python thread could report that.
"""

from mpi4py cimport libmpi as mpi


def start() -> None:
    """Start MPI with MPI_THREAD_MULTIPLE unless it was started before; wait for all processes of the job."""
    cdef int started = 0, provided = 0, error = mpi.MPI_SUCCESS
    with nogil:
        mpi.MPI_Initialized(&started)
        if not started:
            error = mpi.MPI_Init_thread(NULL, NULL, mpi.MPI_THREAD_MULTIPLE, &provided)
    if error != mpi.MPI_SUCCESS:
        raise RuntimeError(f"MPI_Init_thread() failed [error code: {error}]")
