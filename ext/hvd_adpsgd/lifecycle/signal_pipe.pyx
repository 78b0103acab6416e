# cython: language_level=3
"""A handler that writes a byte to a pipe for each signal, even while Python is blocked; and exit by a signal.

Compiled, because a Python handler runs only when the main thread returns to Python: SIGUSR1 is sent to find
out why the main thread does not return, and after SIGTERM a process has only a few seconds. Rejected
alternatives:

- signal.set_wakeup_fd writes from C too, but a process has only one such descriptor, and asyncio uses it;
- a thread in sigwait needs the signal blocked in every other thread, but threads started earlier (by torch,
  by MPI, by the script) do not block it, and every program that the script starts inherits the mask;
- faulthandler.register reads the stacks of running threads without the GIL.

After exec the handler is removed. In a forked child it ignores SIGUSR1 (pkill by command line also finds a
DataLoader's worker, which has the trainer's); a signal registered with `ends` ends the child.
"""

cdef extern from *:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>
    #include <unistd.h>

    static volatile int adpsgd_pipes[NSIG];     /* descriptor to write to, by signal number */
    static volatile char adpsgd_ends[NSIG];     /* by signal number: whether the signal ends a forked child */
    static volatile pid_t adpsgd_owner = 0;     /* process that registered the handlers */

    static void adpsgd_end_by(int number)
    {
        struct sigaction action;
        sigset_t mask;
        memset(&action, 0, sizeof action);
        action.sa_handler = SIG_DFL;
        sigaction(number, &action, NULL);
        sigemptyset(&mask);
        sigaddset(&mask, number);
        pthread_sigmask(SIG_UNBLOCK, &mask, NULL);
        kill(getpid(), number);
        _exit(128 + number);    /* reached by process 1 of a container, which its own signals do not end */
    }

    static void adpsgd_heard(int number)
    {
        int before = errno;
        if (getpid() != adpsgd_owner) {
            if (adpsgd_ends[number]) adpsgd_end_by(number);
        } else if (write(adpsgd_pipes[number], "", 1) < 0) {
            /* the pipe is full: the reader will be woken anyway */
        }
        errno = before;
    }

    /* Install the handler. 0: done; 1: the signal has a handler or is ignored; -1: refused, see errno */
    static int adpsgd_listen(int number, int fd, int ends)
    {
        struct sigaction action, before;
        if (sigaction(number, NULL, &before) != 0) return -1;
        if ((before.sa_flags & SA_SIGINFO) || (before.sa_handler != SIG_DFL
                                               && before.sa_handler != adpsgd_heard)) return 1;
        adpsgd_owner = getpid();
        adpsgd_pipes[number] = fd;
        adpsgd_ends[number] = (char)ends;
        memset(&action, 0, sizeof action);
        action.sa_handler = adpsgd_heard;
        action.sa_flags = SA_RESTART;
        sigemptyset(&action.sa_mask);
        return sigaction(number, &action, NULL);
    }
    """
    int adpsgd_listen(int number, int fd, int ends) nogil
    void adpsgd_end_by(int number) nogil


def listen(int number, int fd, bint ends=False):
    """Write a byte to `fd` whenever this process receives the signal.

    Args:
        number: number of the signal.
        fd: non-blocking descriptor of a pipe's writing end.
        ends: whether the signal ends a forked child; a child ignores it otherwise.

    Returns:
        Whether the handler was installed; False if the signal has another handler already, or is ignored.

    Raises:
        OSError: if the operating system refuses the handler.
    """
    cdef int answer = adpsgd_listen(number, fd, ends)
    if answer < 0:
        raise OSError(f"sigaction() refused a handler for signal {number}")
    return answer == 0


def end_by(int number):
    """End this process by a signal, as if the signal had no handler; may be called from any thread.

    The first process of a container, which its own signals do not end, exits with the status that a shell
    shows for this signal, 128 + number.
    """
    with nogil:
        adpsgd_end_by(number)
