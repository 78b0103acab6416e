# Announcements that engines have left: this engine's own, and those of other engines, which it passes on.
from hvd_adpsgd.engine.core cimport Core, Message

cdef void announce_departure(Core* e) noexcept nogil
cdef bint departure_is_taken_over(Core* e) noexcept nogil
cdef void pass_on(Core* e) noexcept nogil
cdef const unsigned char* departed_in(Message* m) noexcept nogil
cdef void answer(Core* e, int peer, Message* m) noexcept nogil
cdef void note_answer(Core* e, int peer, Message* m) noexcept nogil
