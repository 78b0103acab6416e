# cython: language_level=3
# Why compiled: this room is the Python door to the C loops, so that tests can compare every
# element type with NumPy. The engine calls the same loops through the pointer door (_kernels.pxd).
"""The engine's loops over raw buffers: snapshot, merge, apply."""

from libc.stdint cimport int64_t, uintptr_t

FLOAT32 = 0
FLOAT64 = 1
BFLOAT16 = 2
FLOAT16 = 3


def itemsize(int dtype):
    """Bytes of one element of dtype code `dtype`; 0 if the code is unknown."""
    return adpsgd_itemsize(dtype)


cdef int64_t elements(const unsigned char[::1] buffer, int dtype) except -1:
    cdef int size = adpsgd_itemsize(dtype)
    if size == 0 or buffer.shape[0] % size:
        raise ValueError(f"buffer of {buffer.shape[0]} bytes does not hold elements of dtype {dtype}")
    return buffer.shape[0] // size


cdef const void* pointer(const unsigned char[::1] buffer) noexcept:
    return NULL if buffer is None or buffer.shape[0] == 0 else <const void*>&buffer[0]


def snapshot(int dtype, int wire, unsigned char[::1] out, const unsigned char[::1] mirror,
             const unsigned char[::1] first=None, const unsigned char[::1] second=None,
             unsigned char[::1] keep=None, bint stream=False):
    """out = wire(mirror + first + second). Returns True if out holds an Inf or a NaN."""
    cdef int64_t n = elements(mirror, dtype)
    if elements(out, wire) != n:
        raise ValueError("out and mirror differ in length")
    return bool(adpsgd_snapshot(dtype, wire, <void*>pointer(out), pointer(mirror), pointer(first),
                                pointer(second), <void*>pointer(keep), n, stream))


def merge(int dtype, int wire, unsigned char[::1] correction, const unsigned char[::1] received,
          const unsigned char[::1] sent, double weight, bint fresh, bint stream=False):
    """correction (+)= weight (received - sent). Returns sum((received - sent)^2)."""
    cdef int64_t n = elements(correction, dtype)
    if elements(received, wire) != n or elements(sent, wire) != n:
        raise ValueError("correction, received and sent differ in length")
    return adpsgd_merge(dtype, wire, <void*>pointer(correction), pointer(received), pointer(sent),
                        weight, n, fresh, stream)


def apply(int dtype, unsigned char[::1] parameter, const unsigned char[::1] correction=None,
          unsigned char[::1] mirror=None, bint replace=False, bint stream=False):
    """parameter += correction (or = correction, to `replace`); mirror = parameter.

    Returns True if a parameter is Inf or NaN."""
    cdef int64_t n = elements(parameter, dtype)
    return bool(adpsgd_apply(dtype, <void*>pointer(parameter), pointer(correction),
                             <void*>pointer(mirror), n, replace, stream))


def widen(int dtype, unsigned char[::1] out, const unsigned char[::1] own, bint none=False):
    """out = own in the type of sums (float64 for float64, else float32), zeros if `none`."""
    cdef int64_t n = elements(own, dtype)
    if out.shape[0] != n * adpsgd_sum_itemsize(dtype):
        raise ValueError("out and own differ in length")
    adpsgd_widen(dtype, <void*>pointer(out), pointer(own), n, none)


def merge_mean(int dtype, unsigned char[::1] slot, const unsigned char[::1] sum,
               const unsigned char[::1] own, double learners, bint fresh, bint replace=False):
    """slot (+)= sum / learners - own, or slot = sum / learners to `replace`.

    Returns sum((sum / learners - own)^2), or -1 and does nothing if that is not finite."""
    cdef int64_t n = elements(slot, dtype)
    cdef int size = adpsgd_sum_itemsize(dtype)
    if sum.shape[0] != n * size or own.shape[0] != n * size:
        raise ValueError("slot, sum and own differ in length")
    return adpsgd_merge_mean(dtype, <void*>pointer(slot), pointer(sum), pointer(own), learners, n,
                             fresh, replace)
