# cython: language_level=3
"""Exit of a process that cannot wait until MPI_Finalize returns.

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
    """End the process, as the last handler of exit(): no handler that was registered earlier runs.

    After an exit without MPI_Finalize, Open MPI's launcher notifies the other processes only if the
    status is 0 or a signal ended the process; with another status it ends the job. The cost: the
    launcher sees only the status of the last process.
    """
    if status == 0:
        _exit(instead_of_0)
    if keeps_status:
        _exit(status)
    kill(getpid(), SIGKILL)
    _exit(status)  # reached by the first process of a container, which its own signals do not end


def end_without_finalize(bint last, int verdict=0):
    """Let exit() end the process without MPI_Finalize and C++ destructors from now on.

    The process ends with its exit status if that is 0 or if `last`, else by SIGKILL.

    Args:
        last: whether no other process of the job runs, or Open MPI's launcher reports this one's status to
            none.
        verdict: exit status in place of 0; must be 0 unless `last`.

    Raises:
        OSError: if the C library refuses the handler.
    """
    global keeps_status, instead_of_0
    keeps_status = last
    instead_of_0 = verdict if last else 0
    if on_exit(_end, NULL) != 0:
        raise OSError("on_exit() refused a handler")
