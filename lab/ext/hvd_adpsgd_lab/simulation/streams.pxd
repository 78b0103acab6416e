# A wire whose messages travel over connections that may end, in virtual time.
from libc.stdint cimport uint64_t

from hvd_adpsgd_lab.simulation.network cimport Envelope, Net, SimulatedWire

cdef enum:
    COUNT = 6               # kind of a calendar entry: a count arrives at the sender of a stream
    REDIAL = 7              # kind of a calendar entry: the connection of a stream is opened again

cdef void came(Net* net, Envelope* m) noexcept nogil
cdef bint read_count(Net* net, int at, uint64_t what) noexcept nogil
cdef void end_connection(Net* net, int src, int dst, double seconds) noexcept nogil
cdef void redial(Net* net, int at) noexcept nogil
cdef void shut(Net* net, int src, int dst) noexcept nogil

cdef class StreamWire(SimulatedWire):
    pass
