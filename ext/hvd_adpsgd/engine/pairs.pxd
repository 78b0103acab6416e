# The list of exchanges of an engine: their phases, their buffers, and failures of their peers.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Core, Exchange, Pairs, Phase
from hvd_adpsgd.engine.wire cimport Transfer

cdef double RETRY_FIRST_S

cdef void become(Core* e, Exchange* x, Phase phase) noexcept nogil
cdef Exchange* find(Core* e, int peer) noexcept nogil
cdef Exchange* enlist(Core* e, int peer) noexcept nogil
cdef void sweep(Pairs* p) noexcept nogil
cdef void release_side(Core* e, int peer) noexcept nogil
cdef bint open_pairs(Pairs* p, const int* schedule, int64_t length) noexcept
cdef void close_pairs(Pairs* p) noexcept
cdef char* mapped(Core* e, int peer) noexcept nogil
cdef void return_buffers(Pairs* p, Exchange* x) noexcept nogil
cdef bint has_room(Core* e, int peer) noexcept nogil
cdef bint allocate(Core* e, Exchange* x) noexcept nogil
cdef bint posted(Core* e, int peer, Transfer* t) noexcept nogil
cdef void transfer_failed(Core* e, int peer, Transfer* t) noexcept nogil
cdef bint retire(Core* e, Exchange* x) noexcept nogil
cdef bint release_pairs(Core* e) noexcept nogil
cdef void take_failures(Core* e, bint look) noexcept nogil
