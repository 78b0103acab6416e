# The mean of all models, on the engine's thread.
from hvd_adpsgd.engine.state cimport State

cdef bint advance_mean(State* e) noexcept nogil
