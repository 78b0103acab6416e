# Digests of the states of engines and messages, and the set of digests that have been seen.
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd_lab.simulation.choices cimport Wires

cdef enum:
    LANE_NBYTES = 8         # a chunk of a small job is one float64

cdef double TICK_S          # the time that passes in a DEADLINE: a deadline is over after one or two of them

cdef struct Seen:           # a hash set of digests
    uint64_t* slots         # 0: free
    int64_t room            # a power of two
    int64_t count

cdef bint add_seen(Seen* s, uint64_t digest) noexcept nogil
cdef uint64_t digest_memory(Core* e) noexcept nogil
cdef uint64_t digest_engine(Core* e) noexcept nogil
cdef uint64_t digest_messages(Wires* f) noexcept nogil

cdef inline uint64_t mixed(uint64_t h, uint64_t value) noexcept nogil:
    cdef uint64_t z = h * <uint64_t>0x9E3779B97F4A7C15 + value
    z = (z ^ (z >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t>0x94D049BB133111EB
    return z ^ (z >> 31)


cdef inline uint64_t mixed_bytes(uint64_t h, const void* start, int64_t nbytes) noexcept nogil:
    cdef const char* at = <const char*>start
    cdef uint64_t word
    while nbytes > 0:
        word = 0
        memcpy(&word, at, min(nbytes, 8))
        h = mixed(h, word)
        at += 8
        nbytes -= 8
    return h
