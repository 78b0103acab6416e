# Copies of the state of the engine's thread, for Python.
from hvd_adpsgd.engine.core cimport Core

# The engine's thread calls this between two turns.
cdef void make_inspection(Core* e) noexcept nogil

cdef exchanges_under_way(Core* e, bint running)
cdef counters_of(Core* e)
cdef view_of(Core* e, bint running)
