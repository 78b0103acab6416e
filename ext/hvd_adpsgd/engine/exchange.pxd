# Exchanges with one peer; all functions run on the engine's thread.
from hvd_adpsgd.engine.core cimport Core, Exchange, Message
from hvd_adpsgd.engine.mailbox cimport Orders

cdef void handle_control(Core* e, int peer, Message* m) noexcept nogil
cdef bint advance_pairs(Core* e) noexcept nogil
cdef bint ask_if_due(Core* e) noexcept nogil
cdef bint wants_to_ask(Core* e, Orders* orders) noexcept nogil
cdef bint under_way(Core* e, Exchange* x) noexcept nogil
cdef bint any_under_way(Core* e) noexcept nogil
cdef void cut(Core* e, Exchange* x) noexcept nogil
