# Random numbers that are the same on every machine: splitmix64.
from libc.stdint cimport uint64_t

cdef inline uint64_t draw(uint64_t* state) noexcept nogil:
    cdef uint64_t z
    state[0] += <uint64_t>0x9E3779B97F4A7C15
    z = state[0]
    z = (z ^ (z >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t>0x94D049BB133111EB
    return z ^ (z >> 31)


cdef inline double uniform(uint64_t* state) noexcept nogil:
    """Return a random number, uniform in [0, 1)."""
    return (draw(state) >> 11) * (1.0 / 9007199254740992.0)


cdef inline double between(uint64_t* state, double low, double high) noexcept nogil:
    return low + (high - low) * uniform(state)


cdef inline bint happens(uint64_t* state, double probability) noexcept nogil:
    return uniform(state) < probability
