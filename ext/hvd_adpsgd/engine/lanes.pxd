# The chunks of an exchange: their snapshots or differences are sent, received and merged.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Core, Exchange

cdef bint advance_lanes(Core* e, Exchange* x) noexcept nogil
cdef int64_t oldest_step(Exchange* x) noexcept nogil
