# cython: language_level=3
"""A signal becomes a byte in a pipe, at once, whatever Python is doing; and the end by a signal.

Compiled, because a Python handler runs only when the main thread returns to Python: SIGUSR1 is sent to
find out why it does not, and SIGTERM leaves a few seconds. Rejected alternatives:

- signal.set_wakeup_fd writes from C too, but there is one such descriptor in a process, and asyncio
  takes it;
- a thread in sigwait needs the signal blocked in every other thread, which threads made earlier (by
  torch, MPI, the script) do not do, and every program that the script starts inherits the mask;
- faulthandler.register walks the stacks of running threads without the GIL.

The handler is gone after exec. In a child that was forked it does nothing for SIGUSR1 (a DataLoader's worker
has the same command line as the trainer, so pkill finds it too); a signal that ends a process ends the child.
"""

cdef extern from *:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>
    #include <unistd.h>

    static volatile int adpsgd_pipes[NSIG];     /* by signal */
    static volatile char adpsgd_ends[NSIG];     /* what is not its owner ends by this signal */
    static volatile pid_t adpsgd_owner = 0;

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
        _exit(128 + number);    /* still here: process 1 of a container, to which no signal of its own comes */
    }

    static void adpsgd_heard(int number)
    {
        int before = errno;
        if (getpid() != adpsgd_owner) {
            if (adpsgd_ends[number]) adpsgd_end_by(number);
        } else if (write(adpsgd_pipes[number], "", 1) < 0) {
            /* the pipe is full: enough has been asked for */
        }
        errno = before;
    }

    /* 0: handled by us from now on; 1: the signal has another handler; -1: refused, see errno */
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
    """Write a byte to `fd` (a pipe's end, not blocking) whenever the signal comes to this process.

    Args:
        number: of the signal.
        fd: of the pipe.
        ends: a forked child ends by the signal; else it ignores it.

    Returns:
        Whether it will; False if the signal has a handler already, or is ignored.

    Raises:
        OSError: if the system refuses.
    """
    cdef int answer = adpsgd_listen(number, fd, ends)
    if answer < 0:
        raise OSError(f"sigaction() refused a handler for signal {number}")
    return answer == 0


def end_by(int number):
    """End this process by the signal, as if nobody had listened to it; from any thread.

    The first process of a container, which cannot signal itself, ends with the status that a shell shows for it.
    """
    with nogil:
        adpsgd_end_by(number)
