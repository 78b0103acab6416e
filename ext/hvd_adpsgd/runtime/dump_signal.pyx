# cython: language_level=3
"""SIGUSR1 becomes a byte in a pipe, at once, whatever Python is doing.

Compiled, because a Python handler runs only when the main thread returns to Python, and the signal is
sent to find out why it does not. Rejected alternatives:

- signal.set_wakeup_fd writes from C too, but there is one such descriptor in a process, and asyncio
  takes it;
- a thread in sigwait needs the signal blocked in every other thread, which threads made earlier (by
  torch, MPI, the script) do not do, and every program that the script starts inherits the mask;
- faulthandler.register walks the stacks of running threads without the GIL.

The handler is gone after exec, and does nothing in a child that was forked (a DataLoader's worker has
the same command line as the trainer, so pkill finds it too).
"""

from libc.signal cimport SIGUSR1

cdef extern from *:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>
    #include <unistd.h>

    static volatile sig_atomic_t adpsgd_pipe = -1;
    static volatile pid_t adpsgd_owner = 0;

    static void adpsgd_heard(int number)
    {
        int before = errno;
        if (getpid() == adpsgd_owner && write(adpsgd_pipe, "", 1) < 0) {
            /* the pipe is full: enough has been asked for */
        }
        errno = before;
        (void)number;
    }

    /* 0: handled by us from now on; 1: the signal has another handler; -1: refused, see errno */
    static int adpsgd_listen(int number, int fd)
    {
        struct sigaction action, before;
        if (sigaction(number, NULL, &before) != 0) return -1;
        if ((before.sa_flags & SA_SIGINFO) || (before.sa_handler != SIG_DFL
                                               && before.sa_handler != adpsgd_heard)) return 1;
        adpsgd_owner = getpid();
        adpsgd_pipe = fd;
        memset(&action, 0, sizeof action);
        action.sa_handler = adpsgd_heard;
        action.sa_flags = SA_RESTART;
        sigemptyset(&action.sa_mask);
        return sigaction(number, &action, NULL);
    }
    """
    int adpsgd_listen(int number, int fd) nogil


def listen(int fd):
    """Write a byte to `fd` (a pipe's end, not blocking) whenever SIGUSR1 comes to this process.

    Returns:
        Whether it will; False if the signal has a handler already, or is ignored.

    Raises:
        OSError: if the system refuses.
    """
    cdef int answer = adpsgd_listen(SIGUSR1, fd)
    if answer < 0:
        raise OSError("sigaction() refused a handler for SIGUSR1")
    return answer == 0
