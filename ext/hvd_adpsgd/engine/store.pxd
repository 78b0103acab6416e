# The memory of one super learner's averaging: the mirror and slots of corrections, in chunks.
from libc.stdint cimport int64_t, uint8_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass

cdef enum:
    ADDS = 1                # a slot's correction is added to the parameters
    REPLACES = 2            # a slot holds the new parameters themselves
    SLOTS = 3               # at most
    MIRROR = -1
    NO_SLOT = -2
    FIRST = 16              # chunks in the first block; each block has twice those of the one before
    BLOCKS = 27

cdef struct Live:           # what peers on the host must know of a chunk to read it where it lies
    int64_t version         # odd while it changes
    int64_t step
    int base                # base buffer (MIRROR or slot index), then the slots to add; NO_SLOT ends the list
    int first
    int second

cdef struct Neighbour:      # where a peer on the host has what it shows (its chunks lie as ours do)
    char* lives             # NULL: it shows no model
    char* area
    char* outbox            # NULL: chunks go over the wire
    void (*meanwhile)(Neighbour*, int chunk) noexcept nogil     # a simulator's: what happens while a chunk is read; NULL
    void* simulated         # ... its own

cdef struct Chunk:
    pthread_mutex_t lease   # of all below, but what never changes: count, dtype and addresses
    char* mirror            # the model as last offered; NULL on learners that are not leaders
    char* slot[SLOTS]       # corrections: float64 for float64, else float32
    uint8_t* full[SLOTS]    # does the slot hold something for this chunk: 0, ADDS or REPLACES
    int open                # the slot that is being filled; the one before it is published
    bint absorbed           # the mirror already contains the published correction
    bint stream             # the model is larger than the caches
    int64_t count           # elements
    int dtype
    int64_t step            # the trainer's step of the mirror
    int64_t left_out        # exchanges and means in a row that could not average it
    Live* live              # NULL: no peer reads it

cdef enum Compared:
    MERGED = 0
    NOT_FINITE = 1
    CHANGING = 2            # the peer's trainer or engine works on it: try again

cdef struct Memory:
    Chunk* blocks[BLOCKS]   # growing moves no chunk
    int nchunks             # for the trainer; the engine knows those of the generations that it was told
    int nslots
    int open                # of all chunks, for the trainer
    int shown               # the first chunks, which peers on the host may read
    char* area              # ... from here on

cdef extern from *:
    """
    #if defined(__SSE2__)
    #include <emmintrin.h>
    #endif
    /* All loads and stores before it, also those past the caches, come before all of them after it. */
    static inline void adpsgd_fence(void)
    {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);    /* a locked instruction, which need not order streamed stores */
    #if defined(__SSE2__)
        _mm_sfence();
    #endif
    }
    """
    void fence "adpsgd_fence"() nogil

cdef extern from *:
    int leading_zeros "__builtin_clz"(unsigned int) nogil


cdef inline Chunk* chunk_at(Memory* m, int i) noexcept nogil:
    cdef int block = 31 - leading_zeros(i // FIRST + 1)
    return &m.blocks[block][i - FIRST * ((1 << block) - 1)]


cdef inline int published_slot(Memory* m, int opened) noexcept nogil:
    """The slot that was open before `opened`."""
    return (opened + m.nslots - 1) % m.nslots


cdef int64_t memory_elements(Memory* m, int chunk) noexcept nogil
cdef int64_t memory_nbytes(Memory* m, int chunk, int wire) noexcept nogil
cdef int memory_snapshot_as(Memory* m, int chunk, int dtype, bint offered_only, bint stream, void* out, void* keep,
                            int64_t* step) noexcept nogil
cdef int memory_snapshot(Memory* m, int chunk, int wire, bint offered_only, bint stream, void* out, void* keep,
                         int64_t* step) noexcept nogil
cdef void memory_leave_out(Memory* m, int chunk) noexcept nogil
cdef double memory_merge(Memory* m, int chunk, int wire, double weight, const void* received,
                         const void* sent) noexcept nogil

cdef Compared memory_compare(Memory* m, Neighbour* peer, int chunk, int wire, bint offered_only, double weight, void* half,
                             void* keep, int64_t* step, int64_t* peer_step, double* square) noexcept nogil
cdef double memory_merge_half(Memory* m, int chunk, int wire, double weight, const void* half) noexcept nogil

cdef int64_t memory_sum_nbytes(Memory* m, int chunk, int64_t* count, int* itemsize) noexcept nogil
cdef int memory_share(Memory* m, int chunk, bint offered_only, void* share, int64_t* step) noexcept nogil
cdef double memory_merge_mean(Memory* m, int chunk, bint replace, double learners, const void* sum,
                              const void* share) noexcept nogil

cdef class Store:
    cdef Memory memory
