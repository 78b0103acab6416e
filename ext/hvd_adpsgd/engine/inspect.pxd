# The state of the engine's thread, as Python sees it.
from hvd_adpsgd.engine.core cimport Core

# Called by the thread between two turns.
cdef void make_inspection(Core* e) noexcept nogil

cdef exchanges_under_way(Core* e, bint running)
cdef counters_of(Core* e)
cdef view_of(Core* e, bint running)
