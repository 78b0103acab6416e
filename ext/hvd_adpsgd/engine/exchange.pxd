# Exchanges of pairs, and detection of failed peers, on the engine's thread.
from hvd_adpsgd.engine.state cimport Kind, State

cdef double RETRY_FIRST_S

cdef void listen(State* e) noexcept nogil
cdef void send_control(State* e, int peer, Kind kind, int exchange, int nchunks) noexcept nogil
cdef bint reap_outgoing(State* e) noexcept nogil
cdef bint read_inbox(State* e) noexcept nogil
cdef void cut(State* e, int peer) noexcept nogil
cdef bint advance(State* e, int peer) noexcept nogil
cdef bint under_way(State* e, int peer) noexcept nogil
cdef bint due(State* e) noexcept nogil
cdef bint ask_if_due(State* e) noexcept nogil
cdef bint retire(State* e, int peer) noexcept nogil
cdef void check_failures(State* e) noexcept nogil
cdef void handle_failure(State* e, int code, int peer) noexcept nogil
cdef void mark_failed_peers(State* e) noexcept nogil
