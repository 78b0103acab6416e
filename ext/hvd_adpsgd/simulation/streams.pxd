# Messages over connections that end, in virtual time.
from libc.stdint cimport uint64_t

from hvd_adpsgd.simulation.network cimport Envelope, Net, SimulatedWire

cdef enum:
    COUNT = 6               # kinds of entries: a count comes back to the sender of a stream
    REDIAL = 7              # ... its connection is opened again

cdef void came(Net* net, Envelope* m) noexcept nogil
cdef bint read_count(Net* net, int at, uint64_t what) noexcept nogil
cdef void end_connection(Net* net, int src, int dst, double seconds) noexcept nogil
cdef void redial(Net* net, int at) noexcept nogil
cdef void shut(Net* net, int src, int dst) noexcept nogil

cdef class StreamWire(SimulatedWire):
    pass
