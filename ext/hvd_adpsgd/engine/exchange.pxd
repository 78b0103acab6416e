# Exchanges of pairs, on the engine's thread.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Core, Exchange, Message, Pairs
from hvd_adpsgd.engine.port cimport Orders
from hvd_adpsgd.engine.wire cimport Transfer

cdef double RETRY_FIRST_S

cdef bint open_pairs(Pairs* p, const int* schedule, int64_t length) noexcept
cdef void close_pairs(Pairs* p) noexcept
cdef void handle_control(Core* e, int peer, Message* m) noexcept nogil
cdef bint advance_pairs(Core* e) noexcept nogil
cdef bint ask_if_due(Core* e) noexcept nogil
cdef bint under_way(Core* e, Exchange* x) noexcept nogil
cdef bint any_under_way(Core* e) noexcept nogil
cdef void cut(Core* e, Exchange* x) noexcept nogil
cdef void transfer_failed(Core* e, int peer, Transfer* t) noexcept nogil
cdef void take_failures(Core* e, bint look) noexcept nogil
