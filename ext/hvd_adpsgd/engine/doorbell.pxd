# The doorbell of an engine: the engine's thread sleeps on it until another thread rings it, or until a
# timeout. A doorbell may be in shared memory, so that other processes of the host can ring it.
from libc.stdint cimport uint32_t

cdef extern from *:
    """
    #if defined(__linux__)
    #include <linux/futex.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    /* Count a ring; one system call wakes the engine's thread, only if that sleeps. */
    static inline void adpsgd_ring(uint32_t *rung, uint32_t *asleep)
    {
        __atomic_add_fetch(rung, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(asleep, __ATOMIC_SEQ_CST)) syscall(SYS_futex, rung, FUTEX_WAKE, 1, NULL, NULL, 0);
    }

    static inline uint32_t adpsgd_rung(uint32_t *rung) { return __atomic_load_n(rung, __ATOMIC_SEQ_CST); }

    /* Sleep, unless the count `rung` is no longer `heard`. The kernel compares the two: a ring just before
     * the sleep is not lost. */
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
    uint32_t rung           # counts the rings, modulo 2^32
    uint32_t asleep         # 1 while the engine's thread sleeps


cdef inline void ring(Doorbell* doorbell) noexcept nogil:
    """Wake the engine's thread; if it does not sleep, its next await_ring returns at once."""
    adpsgd_ring(&doorbell.rung, &doorbell.asleep)


cdef inline uint32_t times_rung(Doorbell* doorbell) noexcept nogil:
    """Return how often the doorbell has been rung; read this before looking for work, for await_ring."""
    return adpsgd_rung(&doorbell.rung)


cdef inline void await_ring(Doorbell* doorbell, uint32_t heard, double seconds) noexcept nogil:
    """Sleep until the doorbell has been rung more often than `heard`, or for `seconds`."""
    adpsgd_await_ring(&doorbell.rung, &doorbell.asleep, heard, seconds)
