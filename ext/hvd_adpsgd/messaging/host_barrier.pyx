# cython: language_level=3
"""A barrier of processes on one host: each process that arrives increments a count in shared memory.

Compiled, because the count needs an atomic addition, and the wait a call of Linux (futex) that sleeps until the
count has changed. The process that arrives last wakes the others; none spins, because there may be more
learners than cores. A process that dies leaves no lock behind: the count is plain memory, and waits have a
timeout.
"""

cdef extern from *:
    """
    #include <errno.h>
    #include <linux/futex.h>
    #include <stdint.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    static void adpsgd_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

    static uint32_t adpsgd_arrive(uint32_t *count, uint32_t target)
    {
        uint32_t now = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
        if (now == target) syscall(SYS_futex, count, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
        return now;
    }

    /* Wait until the count has reached or passed the target; returns 0 if it has not after `seconds`. */
    static int adpsgd_await(uint32_t *count, uint32_t target, double seconds)
    {
        struct timespec wait = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
        for (;;) {
            uint32_t now = __atomic_load_n(count, __ATOMIC_SEQ_CST);
            if ((int32_t)(now - target) >= 0) return 1;
            if (syscall(SYS_futex, count, FUTEX_WAIT, now, &wait, NULL, 0) != 0
                && errno != EAGAIN) return 0;               /* timeout, or a signal */
        }
    }
    """
    ctypedef unsigned int uint32_t
    void adpsgd_fence() nogil
    uint32_t adpsgd_arrive(uint32_t* count, uint32_t target) nogil
    int adpsgd_await(uint32_t* count, uint32_t target, double seconds) nogil


def fence() -> None:
    """Let no load or store of this thread move over this call; without it only x86 keeps their order."""
    adpsgd_fence()


def arrive(unsigned char[::1] memory, unsigned int target):
    """Add one to the count; if that makes it `target`, wake all processes that wait in await_count.

    Args:
        memory: shared memory, aligned to four bytes; its first four bytes are the count.
        target: count at which all have arrived, modulo 2^32.
    """
    cdef uint32_t* count = <uint32_t*>&memory[0]
    with nogil:
        adpsgd_arrive(count, target)


def await_count(unsigned char[::1] memory, unsigned int target, double seconds) -> bool:
    """Sleep until the count has reached `target`, or for `seconds`; return whether it has.

    Args:
        memory: as for `arrive`.
        target: count to wait for, modulo 2^32; less than 2^31 more than the count now.
        seconds: longest wait; a signal ends the wait earlier.
    """
    cdef uint32_t* count = <uint32_t*>&memory[0]
    cdef int reached
    with nogil:
        reached = adpsgd_await(count, target, seconds)
    return reached != 0
