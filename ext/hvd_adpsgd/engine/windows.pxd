# Which chunks of the model an exchange moves.
from hvd_adpsgd.engine.core cimport Core, Exchange, Generation

cdef int set_layout(Generation* layout, int nchunks, rare, int period) except -1
cdef int window_of(Core* e, int total) noexcept nogil
cdef int next_first(Core* e, int total) noexcept nogil
cdef void mark_next(Core* e, int total, double share, unsigned char* marks) noexcept nogil
cdef void open_window(Core* e, Exchange* x, int total, int window) noexcept nogil
cdef int chunk_of(Exchange* x, int index) noexcept nogil
cdef double stands_for(Exchange* x, int index) noexcept nogil
cdef double turn_elements(Core* e, Exchange* x) noexcept nogil
cdef void move_on(Core* e, int total, Exchange* x, int window) noexcept nogil
cdef void note_distance(Core* e, int chunk, double square) noexcept nogil
cdef Generation* layout_of(Core* e, int total) noexcept nogil
