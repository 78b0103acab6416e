# The doorbell of an engine: its thread sleeps until somebody rings it, or for some time. It may lie in memory that other
# processes of the host map.
from libc.stdint cimport uint32_t

cdef extern from *:
    """
    #if defined(__linux__)
    #include <linux/futex.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    /* Ring: one system call, and only if somebody sleeps. */
    static inline void adpsgd_ring(uint32_t *rung, uint32_t *asleep)
    {
        __atomic_add_fetch(rung, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(asleep, __ATOMIC_SEQ_CST)) syscall(SYS_futex, rung, FUTEX_WAKE, 1, NULL, NULL, 0);
    }

    static inline uint32_t adpsgd_rung(uint32_t *rung) { return __atomic_load_n(rung, __ATOMIC_SEQ_CST); }

    /* Sleep, unless it was rung since `heard`. The kernel compares: a ring between that and the sleep is not lost. */
    static inline void adpsgd_await_ring(uint32_t *rung, uint32_t *asleep, uint32_t heard, double seconds)
    {
        struct timespec wait = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
        __atomic_store_n(asleep, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, rung, FUTEX_WAIT, heard, &wait, NULL, 0);
        __atomic_store_n(asleep, 0, __ATOMIC_SEQ_CST);
    }
    #endif
    """
    void adpsgd_ring(uint32_t* rung, uint32_t* asleep) nogil
    uint32_t adpsgd_rung(uint32_t* rung) nogil
    void adpsgd_await_ring(uint32_t* rung, uint32_t* asleep, uint32_t heard, double seconds) nogil

cdef enum:
    DOORBELL_NBYTES = 64        # one cache line

cdef struct Doorbell:
    uint32_t rung           # counts
    uint32_t asleep


cdef inline void ring(Doorbell* doorbell) noexcept nogil:
    """Wake the engine, or let its next sleep end at once."""
    adpsgd_ring(&doorbell.rung, &doorbell.asleep)


cdef inline uint32_t times_rung(Doorbell* doorbell) noexcept nogil:
    """How often so far; to be read before one looks whether there is something to do."""
    return adpsgd_rung(&doorbell.rung)


cdef inline void await_ring(Doorbell* doorbell, uint32_t heard, double seconds) noexcept nogil:
    """Sleep until it has been rung more often than `heard`, or for some time."""
    adpsgd_await_ring(&doorbell.rung, &doorbell.asleep, heard, seconds)
