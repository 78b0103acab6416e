# Counts of the messages, silences and failures of a peer, by the state of the exchange with the peer.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd_lab.simulation.network cimport Link

cdef enum:
    NSTATES = 8
    NMESSAGES = 10
    FAILURE = 8
    SILENCE = 9

cdef void cover(int64_t* counts, Link* link, Core* e) noexcept
cdef void covered(int64_t* counts, Core* e, int peer, int message, bint was_active) noexcept
cdef object phase_of(Core* e)
