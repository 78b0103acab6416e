# cython: language_level=3
"""The exit of a process that cannot wait for MPI_Finalize.

Compiled, because only a C function can act between the end of Python and the end of the process,
where the exit status is known.
"""

cdef extern from "signal.h" nogil:
    int SIGKILL
    int kill(int pid, int signal)

cdef extern from "stdlib.h" nogil:
    int on_exit(void (*function)(int, void *) noexcept nogil, void *argument)

cdef extern from "unistd.h" nogil:
    int getpid()
    void _exit(int status)


cdef int keeps_status = 0
cdef int instead_of_0 = 0


cdef void _end(int status, void *argument) noexcept nogil:
    """End now: no handler of exit() that was registered earlier runs.

    After an exit without MPI_Finalize, Open MPI's launcher notifies the other processes only if the
    status is 0 or a signal ended the process; with another status it ends the job. The cost: the
    launcher sees only the status of the last process.
    """
    if status == 0:
        _exit(instead_of_0)
    if keeps_status:
        _exit(status)
    kill(getpid(), SIGKILL)
    _exit(status)  # the first process of a container does not get its own signals


def end_without_finalize(bint last, int verdict=0):
    """From now on exit() ends the process without MPI_Finalize and C++ destructors.

    With its status if that is 0 or if `last`, else by SIGKILL.

    Args:
        last: no other process of the job runs, or none hears of this one's status from Open MPI's launcher.
        verdict: status to end with instead of 0; must be 0 unless `last`.

    Raises:
        OSError: if the C library refuses.
    """
    global keeps_status, instead_of_0
    keeps_status = last
    instead_of_0 = verdict if last else 0
    if on_exit(_end, NULL) != 0:
        raise OSError("on_exit() refused")
