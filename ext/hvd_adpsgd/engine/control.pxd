# Control messages: small, on one channel, from any peer.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Control, Core, Exchange, Kind, Letter, Message, Pairs

cdef enum:
    NEWEST = 0x7FFFFFFF     # a message names our newest layout

cdef bint open_control(Control* c, int size) noexcept
cdef void close_control(Control* c) noexcept
cdef void listen(Core* e) noexcept nogil
cdef Message* take_message(Core* e, int* peer) noexcept nogil
cdef bint same_layout(Core* e, const Message* m) noexcept nogil
cdef void send_no(Core* e, int peer, const Message* m) noexcept nogil
cdef void send_window(Core* e, int peer, Kind kind, Exchange* x, int nchunks, int window, int64_t generation) noexcept nogil
cdef void send_control(Core* e, int peer, Kind kind, int exchange, int nchunks) noexcept nogil
cdef void send_departures(Core* e, int peer, Kind kind) noexcept nogil
cdef bint may_have(Pairs* p, int wire_format) noexcept nogil
cdef void note_malformed(Core* e, int peer) noexcept nogil
cdef bint owes_answers(Core* e) noexcept nogil
cdef void tell_reports(Core* e) noexcept nogil
cdef bint reap(Core* e, Letter** link) noexcept nogil
