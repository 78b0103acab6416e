# cython: language_level=3
"""A barrier of processes of one host: a count in memory that they share.

Compiled, because the count needs an atomic addition, and the wait a call of Linux (futex) that sleeps until the
count has changed. One that arrives last wakes the others; nobody spins, as learners may be more than cores. A
process that dies leaves nothing behind: the count is memory, and waits have a time-out.
"""

cdef extern from *:
    """
    #include <errno.h>
    #include <linux/futex.h>
    #include <stdint.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    static uint32_t adpsgd_arrive(uint32_t *count, uint32_t target)
    {
        uint32_t now = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
        if (now == target) syscall(SYS_futex, count, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
        return now;
    }

    /* Whether the count reaches the target in time; it may be past it. */
    static int adpsgd_await(uint32_t *count, uint32_t target, double seconds)
    {
        struct timespec wait = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
        for (;;) {
            uint32_t now = __atomic_load_n(count, __ATOMIC_SEQ_CST);
            if ((int32_t)(now - target) >= 0) return 1;
            if (syscall(SYS_futex, count, FUTEX_WAIT, now, &wait, NULL, 0) != 0
                && errno != EAGAIN) return 0;               /* the time is over, or a signal */
        }
    }
    """
    ctypedef unsigned int uint32_t
    uint32_t adpsgd_arrive(uint32_t* count, uint32_t target) nogil
    int adpsgd_await(uint32_t* count, uint32_t target, double seconds) nogil


def arrive(unsigned char[::1] memory, unsigned int target):
    """Add one to the count, which is the first four bytes; one that makes it `target` wakes all that wait.

    Args:
        memory: shared, aligned to four bytes.
        target: modulo 2^32.
    """
    cdef uint32_t* count = <uint32_t*>&memory[0]
    with nogil:
        adpsgd_arrive(count, target)


def await_count(unsigned char[::1] memory, unsigned int target, double seconds) -> bool:
    """Sleep until the count has reached `target`, or for so long; whether it has.

    Args:
        memory: as of `arrive`.
        target: modulo 2^32; at most 2^31 past the count.
        seconds: at most; a signal ends the wait earlier.
    """
    cdef uint32_t* count = <uint32_t*>&memory[0]
    cdef int reached
    with nogil:
        reached = adpsgd_await(count, target, seconds)
    return reached != 0
