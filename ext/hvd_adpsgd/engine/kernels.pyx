# cython: language_level=3
# Why compiled: it gives Python the C loops, so that tests can compare every
# element type with NumPy. The engine calls the same loops through pointers (kernels.pxd).
"""The engine's loops over raw buffers: snapshot, merge, apply."""

from libc.stdint cimport int64_t

cdef extern from *:
    """
    static inline void adpsgd_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    void adpsgd_fence() nogil

FLOAT32 = 0
FLOAT64 = 1
BFLOAT16 = 2
FLOAT16 = 3


def fence():
    """Let no load or store of this thread move over this call; without it only x86 keeps their order."""
    adpsgd_fence()


def itemsize(int dtype):
    """Return the bytes of one element of dtype code `dtype`; 0 if the code is unknown."""
    return adpsgd_itemsize(dtype)


cdef int64_t elements(const unsigned char[::1] buffer, int dtype) except -1:
    cdef int size = adpsgd_itemsize(dtype)
    if size == 0 or buffer.shape[0] % size:
        raise ValueError(f"buffer of {buffer.shape[0]} bytes does not hold elements of dtype {dtype}")
    return buffer.shape[0] // size


cdef const void* pointer(const unsigned char[::1] buffer) noexcept:
    if buffer is None or buffer.shape[0] == 0:
        return NULL
    return <const void*>&buffer[0]


cdef int64_t slot_elements(const unsigned char[::1] buffer, int dtype) except -1:
    return elements(buffer, adpsgd_slot_dtype(dtype))


def snapshot(int dtype, int wire, unsigned char[::1] out, const unsigned char[::1] mirror,
             const unsigned char[::1] first=None, const unsigned char[::1] second=None):
    """out = mirror + first + second, in the element type `wire`.

    Returns True if out holds an Inf or a NaN."""
    cdef int64_t n = elements(mirror, dtype)
    if elements(out, wire) != n:
        raise ValueError("out and mirror differ in length")
    return bool(adpsgd_snapshot(dtype, wire, <void*>pointer(out), pointer(mirror), pointer(first),
                                pointer(second), n))


def merge(int dtype, int wire, unsigned char[::1] correction, const unsigned char[::1] received,
          const unsigned char[::1] sent, double weight, bint fresh, bint stream=False):
    """correction += weight (received - sent), with `fresh` = instead of +=.

    Returns sum((received - sent)^2)."""
    cdef int64_t n = slot_elements(correction, dtype)
    if elements(received, wire) != n or elements(sent, wire) != n:
        raise ValueError("correction, received and sent differ in length")
    return adpsgd_merge(dtype, wire, <void*>pointer(correction), pointer(received), pointer(sent),
                        weight, n, fresh, stream)


cdef adpsgd_model model_of(int dtype, int64_t n, const unsigned char[::1] base, const unsigned char[::1] first,
                           const unsigned char[::1] second) except *:
    """Return the model base + first + second, of n elements; first and second may be None."""
    cdef adpsgd_model model = [dtype, pointer(base), pointer(first), pointer(second)]
    if (elements(base, dtype) != n or first is not None and slot_elements(first, dtype) != n
            or second is not None and slot_elements(second, dtype) != n):
        raise ValueError("half and the models differ in length")
    return model


def half_difference(int dtype, int wire, unsigned char[::1] half, mine, theirs, unsigned char[::1] keep=None,
                    bint stream=False):
    """half = (theirs - mine) / 2, in the element type `wire`. Returns True if half holds an Inf or a NaN.

    Args:
        mine, theirs: each (base, first, second), whose sum is a model; base of `dtype`, first and second None or in
            the type of corrections.
    """
    cdef int64_t n = elements(half, wire)
    cdef adpsgd_model a = model_of(dtype, n, mine[0], mine[1], mine[2])
    cdef adpsgd_model b = model_of(dtype, n, theirs[0], theirs[1], theirs[2])
    return bool(adpsgd_half_difference(adpsgd_slot_dtype(dtype), wire, <void*>pointer(half), &a, &b,
                                       <void*>pointer(keep), n, stream))


def merge_half(int dtype, int wire, unsigned char[::1] correction, const unsigned char[::1] half, double weight,
               bint fresh, bint stream=False):
    """correction += 2 weight half, with `fresh` = instead of +=. Returns sum((2 half)^2)."""
    cdef int64_t n = slot_elements(correction, dtype)
    if elements(half, wire) != n:
        raise ValueError("correction and half differ in length")
    return adpsgd_merge_half(dtype, wire, <void*>pointer(correction), pointer(half), weight, n, fresh, stream)


def apply(int dtype, unsigned char[::1] parameter, const unsigned char[::1] correction=None,
          unsigned char[::1] mirror=None, unsigned char[::1] back=None, bint replace=False,
          bint fresh=True, bint stream=False):
    """parameter += correction, with `replace` parameter = correction; then mirror = parameter.

    The rounding error of a 16-bit parameter is added to `back`; with `fresh` it overwrites `back`.

    Returns:
        Whether a parameter is Inf or NaN, and whether any rounding error was not 0."""
    cdef int64_t n = elements(parameter, dtype)
    cdef int found
    if correction is not None and slot_elements(correction, dtype) != n:
        raise ValueError("parameter and correction differ in length")
    if back is not None and slot_elements(back, dtype) != n:
        raise ValueError("parameter and back differ in length")
    found = adpsgd_apply(dtype, <void*>pointer(parameter), pointer(correction), <void*>pointer(mirror),
                         <void*>pointer(back), n, replace, fresh, stream)
    return bool(found & ADPSGD_NOT_FINITE), bool(found & ADPSGD_HELD_BACK)


def merge_mean(int dtype, unsigned char[::1] slot, const unsigned char[::1] sum,
               const unsigned char[::1] own, double learners, bint fresh, bint replace=False):
    """slot += sum / learners - own, with `fresh` = instead of +=; with `replace` slot = sum / learners.

    Returns sum((sum / learners - own)^2); or -1, and slot is unchanged, if a sum is not finite."""
    cdef int64_t n = slot_elements(slot, dtype)
    if slot_elements(sum, dtype) != n or slot_elements(own, dtype) != n:
        raise ValueError("slot, sum and own differ in length")
    return adpsgd_merge_mean(dtype, <void*>pointer(slot), pointer(sum), pointer(own), learners, n,
                             fresh, replace)
