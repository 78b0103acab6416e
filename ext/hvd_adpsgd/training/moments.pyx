# cython: language_level=3
# Why compiled: one pass over memory each, where torch makes a dozen.
"""The passes over the moments of an adaptive optimizer in host memory: see training/shared_moments.py."""

from libc.stdint cimport int64_t, uintptr_t

cdef extern from "kernels.h" nogil:
    enum:
        ADPSGD_FLOAT32
        ADPSGD_FLOAT64

cdef extern from "moments.h" nogil:
    ctypedef struct adpsgd_second:
        double lacking, decay, known, share, l2, first, bound
    void adpsgd_correct(int dtype, void* second, void* own, const void* gradient, const void* parameter,
                        const void* moment, void* cross, const adpsgd_second* law, int64_t n)
    ctypedef struct adpsgd_product:
        double rate, scale, known
    void adpsgd_multiply(int dtype, void* cross, const void* moment, const void* before, const void* offered,
                         const adpsgd_product* law, int64_t n, int64_t* arrived, int64_t* live)


def correct(bint is_double, int64_t n, uintptr_t second, uintptr_t own, uintptr_t gradient, uintptr_t parameter,
            uintptr_t moment, uintptr_t cross, double lacking, double decay, double known, double share, double l2,
            double first, double bound):
    """Let an optimizer's update make v of `second`; own = the second moment of this super learner: see moments.h.

    Args:
        is_double: float64, else float32.
        n: elements of each array.
        second, own, gradient, parameter, moment, cross: addresses of the arrays.
        lacking, decay, known, share, l2, first, bound: see moments.h.
    """
    cdef adpsgd_second law = [lacking, decay, known, share, l2, first, bound]
    with nogil:
        adpsgd_correct(ADPSGD_FLOAT64 if is_double else ADPSGD_FLOAT32, <void*>second, <void*>own, <void*>gradient,
                       <void*>parameter, <void*>moment, <void*>cross, &law, n)


def multiply(bint is_double, int64_t n, uintptr_t cross, uintptr_t moment, uintptr_t before, uintptr_t offered,
             double rate, double scale, double known):
    """Add products with the moments of peers to `cross`; return how many elements have some, and may have."""
    cdef adpsgd_product law = [rate, scale, known]
    cdef int64_t arrived = 0, live = 0
    with nogil:
        adpsgd_multiply(ADPSGD_FLOAT64 if is_double else ADPSGD_FLOAT32, <void*>cross, <void*>moment, <void*>before,
                        <void*>offered, &law, n, &arrived, &live)
    return arrived, live
