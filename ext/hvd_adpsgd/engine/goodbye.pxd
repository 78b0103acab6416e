# Goodbyes: this engine's own, and those of others that it passes on.
from hvd_adpsgd.engine.core cimport Core, Message

cdef void say_goodbye(Core* e) noexcept nogil
cdef bint has_said_goodbye(Core* e) noexcept nogil
cdef void pass_on(Core* e) noexcept nogil
cdef const unsigned char* departed_in(Message* m) noexcept nogil
cdef void answer(Core* e, int peer, Message* m) noexcept nogil
cdef void note_answer(Core* e, int peer, Message* m) noexcept nogil
