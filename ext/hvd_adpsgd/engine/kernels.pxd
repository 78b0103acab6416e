# Declarations of the C loops for the other compiled modules.
from libc.stdint cimport int64_t

cdef extern from "kernels.h" nogil:
    enum:
        ADPSGD_OWN
        ADPSGD_FLOAT32
        ADPSGD_FLOAT64
        ADPSGD_BFLOAT16
        ADPSGD_FLOAT16
        ADPSGD_DTYPES
        ADPSGD_INT8
        ADPSGD_INT4
        ADPSGD_INT16
    enum:
        ADPSGD_NOT_FINITE
        ADPSGD_HELD_BACK
    ctypedef struct adpsgd_model:
        int dtype
        const void* base
        const void* first
        const void* second
    int adpsgd_itemsize(int dtype)
    int adpsgd_slot_dtype(int dtype)
    int adpsgd_slot_itemsize(int dtype)
    int adpsgd_snapshot(int dtype, int wire, void* out, const void* mirror, const void* first,
                        const void* second, int64_t n)
    double adpsgd_merge(int dtype, int wire, void* correction, const void* received,
                        const void* sent, double weight, int64_t n, int fresh, int stream)
    int adpsgd_half_difference(int sums, int wire, void* half, const adpsgd_model* mine, const adpsgd_model* theirs,
                               void* keep, int64_t n, int stream)
    double adpsgd_merge_half(int dtype, int wire, void* correction, const void* half, double weight, int64_t n,
                             int fresh, int stream)
    int adpsgd_apply(int dtype, void* parameter, const void* correction, void* mirror, void* back, int64_t n,
                     int replace, int fresh, int stream)
    double adpsgd_merge_mean(int dtype, void* slot, const void* sum, const void* own,
                             double learners, int64_t n, int fresh, int replace)
    int adpsgd_any_large(int dtype, const void* numbers, int64_t n)
