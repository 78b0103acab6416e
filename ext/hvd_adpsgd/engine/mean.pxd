# The exact mean of all models; the engine's thread calls all functions but open_mean and close_mean.
from hvd_adpsgd.engine.core cimport Core

cdef bint open_mean(Core* e) noexcept
cdef void close_mean(Core* e) noexcept
cdef void listen_mean(Core* e) noexcept nogil
cdef bint release_mean(Core* e) noexcept nogil
cdef bint advance_mean(Core* e) noexcept nogil
