from hvd_adpsgd.engine.core cimport Core

cdef void take_back(Core* e) noexcept
