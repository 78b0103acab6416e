# Declarations of the C loops for differences in few bits.
from libc.stdint cimport int64_t, uint16_t

from hvd_adpsgd.engine.kernels cimport adpsgd_model

cdef extern from "codes.h" nogil:
    int adpsgd_codes_bits(int format)
    int adpsgd_codes_format(const void* message)
    int64_t adpsgd_codes_nbytes(int format, int64_t n)
    int64_t adpsgd_codes_blocks(int64_t n)
    int adpsgd_codes_offer(int format, int sums, void* out, const adpsgd_model* mine, const uint16_t* steps,
                           int64_t n)
    int adpsgd_codes_answer(int sums, void* out, const void* offer, const adpsgd_model* mine, int64_t n)
    double adpsgd_codes_merge(int next, int sums, void* correction, const void* answer, double weight,
                              uint16_t* steps, int64_t n, int fresh)
