# cython: language_level=3
# Why compiled: the engine's thread calls a wire and a clock through C function pointers, without the GIL.
"""The Python objects that carry a wire's and a clock's functions to the engine, and the system's clock."""

from libc.stdlib cimport free

from hvd_adpsgd.engine.wire cimport *

cdef extern from "<time.h>" nogil:
    ctypedef int clockid_t
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(clockid_t, timespec*)
    int nanosleep(const timespec*, timespec*)
    clockid_t CLOCK_MONOTONIC


cdef class AnyWire:
    """Moves bytes between super learners; a subclass fills `calls`."""

    def __dealloc__(self):
        free(self.calls.doorbells)

    @property
    def rank(self):
        """Of this engine among the engines that the wire connects."""
        return self.calls.rank

    @property
    def size(self):
        """Engines that the wire connects."""
        return self.calls.size


cdef class AnyClock:
    """Tells the time, in seconds; a subclass fills `calls`."""

    def now(self):
        return self.calls.now(&self.calls)


cdef double system_now(Clock* clock) noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef void system_sleep(Clock* clock, double seconds) noexcept nogil:
    cdef timespec t
    t.tv_sec = <long>seconds
    t.tv_nsec = <long>((seconds - t.tv_sec) * 1e9)
    nanosleep(&t, NULL)


cdef class SystemClock(AnyClock):
    """The machine's monotonic clock."""

    def __cinit__(self):
        self.calls.now = system_now
        self.calls.sleep = system_sleep
