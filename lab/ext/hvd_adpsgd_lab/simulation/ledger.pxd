# A record of what the engines of a job have merged and decided.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.mailbox cimport Event

cdef struct Half:           # a chunk that one of the two sides of an exchange has merged
    int asker               # engine that asked for the exchange
    int server              # engine that served it
    int number              # of the exchange
    int chunk
    int by                  # engine that has merged the chunk
    double square           # squared distance of the two models

cdef class Ledger:
    cdef Half* halves
    cdef int64_t count
    cdef int64_t room
    cdef dict means             # (number, chunk) -> the mean that the first engine computed
    cdef dict decisions         # number -> the decision that the first engine found
    cdef set abandoned          # exchanges that were unfinished when one side left, as its peer was silent

    cdef int merged(self, int i, int peer, Event* event) except -1
    cdef Half* other_half(self, Half* half) noexcept
    cdef void keep(self, Half* half) noexcept
    cdef int check_halves(self, object dead, object suspected=*) except -1
    cdef double allowed(self, int chunk) noexcept
    cdef int same(self, dict seen, object key, object found, str what) except -1
