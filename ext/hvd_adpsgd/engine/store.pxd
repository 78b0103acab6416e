# The memory of one super learner's averaging: the mirror and two slots of corrections, in chunks.
from libc.stdint cimport int64_t, uint8_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass

cdef enum:
    ADDS = 1                # a slot's correction is added to the parameters
    REPLACES = 2            # a slot holds the new parameters themselves

cdef struct Chunk:
    char* mirror            # the model as last offered; NULL on learners that are not leaders
    char* slot[2]           # corrections; slot[open] is being filled, the other is published
    uint8_t* full[2]        # does the slot hold something for this chunk: 0, ADDS or REPLACES
    bint absorbed           # the mirror already contains the published correction
    int64_t count           # elements
    int dtype
    int64_t step            # the trainer's step of the mirror

cdef struct Memory:
    pthread_mutex_t lock
    Chunk* chunks
    int nchunks
    int capacity
    int open
    bint held               # the open slot may still be read: nothing is merged
    int stream              # the model is larger than the caches

cdef int64_t memory_nbytes(Memory* m, int chunk, int wire) noexcept nogil
cdef int memory_snapshot(Memory* m, int chunk, int wire, bint offered_only, bint stream, void* out, void* keep,
                         int64_t* step) noexcept nogil
cdef double memory_merge(Memory* m, int chunk, int wire, double weight, const void* received,
                         const void* sent) noexcept nogil

cdef int64_t memory_sum_nbytes(Memory* m, int chunk, int64_t* count, int* itemsize) noexcept nogil
cdef int memory_share(Memory* m, int chunk, bint offered_only, void* own, void* share,
                      int64_t* step) noexcept nogil
cdef double memory_merge_mean(Memory* m, int chunk, bint replace, double learners, const void* sum,
                              const void* share) noexcept nogil

cdef class Store:
    cdef Memory memory
