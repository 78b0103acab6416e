# Declarations of the C loops for the other compiled modules.
from libc.stdint cimport int64_t

cdef extern from "kernels.h" nogil:
    int adpsgd_itemsize(int dtype)
    int adpsgd_snapshot(int dtype, int wire, void* out, const void* mirror, const void* first,
                        const void* second, void* keep, int64_t n, int stream)
    double adpsgd_merge(int dtype, int wire, void* correction, const void* received,
                        const void* sent, double weight, int64_t n, int fresh, int stream)
    int adpsgd_apply(int dtype, void* parameter, const void* correction, void* mirror, int64_t n,
                     int replace, int stream)
    int adpsgd_sum_itemsize(int dtype)
    void adpsgd_widen(int dtype, void* out, const void* own, int64_t n, int none)
    double adpsgd_merge_mean(int dtype, void* slot, const void* sum, const void* own,
                             double learners, int64_t n, int fresh, int replace)
