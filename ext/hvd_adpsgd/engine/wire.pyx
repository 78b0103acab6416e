# cython: language_level=3
# Why compiled: the engine's thread calls a wire and a clock through C function pointers, without the GIL.
"""Python classes that hold the C functions of a wire and of a clock for the engine; the system's clock."""

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
    """A wire, which moves bytes between super learners; a subclass sets the functions in `calls`."""

    def __dealloc__(self):
        free(self.calls.doorbells)

    @property
    def rank(self):
        """The rank of this engine among the engines that the wire connects."""
        return self.calls.rank

    @property
    def size(self):
        """How many engines the wire connects, this one included."""
        return self.calls.size


cdef class AnyClock:
    """A clock, in seconds; a subclass sets the functions in `calls`."""

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
