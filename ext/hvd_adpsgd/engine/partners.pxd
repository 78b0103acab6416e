# The choice of the next peer to ask; all functions run on the engine's thread, but open_speeds.
from hvd_adpsgd.engine.core cimport Core, Pairs

cdef bint open_speeds(Pairs* p, int rank, int size, double prefer) noexcept
cdef bint eligible(Core* e, int peer) noexcept nogil
cdef int choose(Core* e) noexcept nogil
cdef void note_speed(Core* e, int peer, double seconds) noexcept nogil
