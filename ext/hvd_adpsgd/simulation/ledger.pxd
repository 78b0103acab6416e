# What the engines of a job have merged and decided.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.mailbox cimport Event

cdef struct Half:           # a chunk that one of two sides has merged
    int asker
    int server
    int number
    int chunk
    int by
    double square

cdef class Ledger:
    cdef Half* halves
    cdef int64_t count
    cdef int64_t room
    cdef dict means             # (number, chunk) -> the bytes that the first engine had
    cdef dict decisions         # number -> the first engine's
    cdef set abandoned          # exchanges that somebody left with: its peer was silent to the end

    cdef int merged(self, int i, int peer, Event* event) except -1
    cdef Half* other_half(self, Half* half) noexcept
    cdef void keep(self, Half* half) noexcept
    cdef int check_halves(self, object dead, object suspected=*) except -1
    cdef double allowed(self, int chunk) noexcept
    cdef int same(self, dict seen, object key, object found, str what) except -1
