# The memory that one super learner averages in: the mirror of its model and slots of corrections, in chunks.
from libc.stdint cimport int64_t, uint8_t, uint16_t

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass

cdef enum:
    ADDS = 1                # the correction in the slot is added to the parameters
    REPLACES = 2            # the slot holds the new parameters themselves
    SLOTS = 3               # slots of a chunk, at most
    MIRROR = -1
    NO_SLOT = -2
    REFRESH = 16            # of so many offers of a chunk in few bits one has 16 bits
    FIRST = 16              # chunks in the first block of the chunk table; each further block doubles that
    BLOCKS = 27

cdef struct Live:           # shared description of a chunk, with which peers on the host read it in place
    int64_t version         # odd while the chunk changes
    int64_t step
    int base                # base buffer (MIRROR or slot index), then the slots to add; NO_SLOT ends the list
    int first
    int second

cdef struct Neighbour:      # memory of a peer on the host, mapped here; chunks have the same offsets as ours
    char* lives             # a Live of each chunk; NULL: the peer shares no memory, and chunks go over the wire
    char* area              # the peer's mirror and slots
    char* outbox            # the differences that the peer computes
    void (*meanwhile)(Neighbour*, int chunk) noexcept nogil     # a simulator's: called while a chunk is read
    void* simulated         # data of the simulator

cdef struct Chunk:
    pthread_mutex_t lease   # protects all fields that change: not count, dtype and addresses
    char* mirror            # the model as last offered; NULL on learners that are not leaders
    char* slot[SLOTS]       # corrections: float64 for float64, else float32
    uint8_t* full[SLOTS]    # what the slot holds for this chunk: 0 (nothing), ADDS or REPLACES
    int open                # the slot to which the engine adds; the slot before it is published
    bint absorbed           # the mirror already contains the published correction
    bint stream             # the model is larger than the caches
    int64_t count           # elements
    int dtype
    int64_t step            # the trainer's step of the mirror
    int merged              # exchanges merged into the open slot
    bint rare               # see windows.pxi
    uint16_t* steps         # of the next offer in few bits, by block; 0 where none is known. NULL: not allocated
    int64_t offers          # offers in few bits, or in 16 bits in their place
    int64_t left_out        # consecutive exchanges and means that could not average this chunk
    double apart            # of the engine's thread: squared distance of the two models at the last exchange,
    int64_t exchanged       # ... and how many exchanges had finished by then
    Live* live              # NULL: no peer reads this chunk in place

cdef enum Compared:
    MERGED = 0
    NOT_FINITE = 1
    CHANGING = 2            # the peer's trainer or engine was changing the chunk: try again

cdef struct Memory:
    Chunk* blocks[BLOCKS]   # the chunk table; a new block moves no chunk
    int nchunks             # read by the trainer only; the engine reads its newest Generation
    int nslots
    int open                # the open slot of all chunks, read by the trainer only
    double arrivals         # exchanges merged into the published slot, mean of the chunks that have some; where
                            # chunks are rare, of these
    double covered          # those chunks, as a share of all, or of all rare ones
    int nrare               # chunks that are rare
    int shown               # how many chunks, from the first one on, peers on the host may read in place
    char* area              # beginning of the memory with the mirrors and slots of these chunks

cdef extern from *:
    """
    #if defined(__SSE2__)
    #include <emmintrin.h>
    #endif
    /* Order all loads and stores before the fence, also stores past the caches, before all those after it. */
    static inline void adpsgd_fence(void)
    {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);    /* need not order streamed stores */
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
    """Return the slot that was open before slot `opened`."""
    return (opened + m.nslots - 1) % m.nslots


cdef int64_t memory_elements(Memory* m, int chunk) noexcept nogil
cdef int64_t memory_nbytes(Memory* m, int chunk, int wire) noexcept nogil
cdef int memory_snapshot_as(Memory* m, int chunk, int dtype, bint offered_only, void* out, int64_t* step) noexcept nogil
cdef int memory_snapshot(Memory* m, int chunk, int wire, bint offered_only, void* out, int64_t* step) noexcept nogil
cdef void memory_leave_out(Memory* m, int chunk) noexcept nogil
cdef double memory_merge(Memory* m, int chunk, int wire, double weight, const void* received,
                         const void* sent) noexcept nogil

cdef Compared memory_compare(Memory* m, Neighbour* peer, int chunk, int wire, bint offered_only, double weight, void* half,
                             void* keep, int64_t* step, int64_t* peer_step, double* square) noexcept nogil
cdef double memory_merge_half(Memory* m, int chunk, int wire, double weight, const void* half) noexcept nogil

cdef int64_t memory_offer(Memory* m, int chunk, int wire, bint offered_only, void* out, int64_t* step) noexcept nogil
cdef bint memory_fits(Memory* m, int chunk, int wire, const void* message, int64_t nbytes) noexcept nogil
cdef int64_t memory_answer(Memory* m, int chunk, int wire, bint offered_only, double weight, const void* offer,
                           int64_t nbytes, void* out, int64_t* step, double* square) noexcept nogil
cdef double memory_merge_answer(Memory* m, int chunk, int wire, double weight, const void* answer) noexcept nogil

cdef int64_t memory_sum_nbytes(Memory* m, int chunk, int64_t* count, int* itemsize) noexcept nogil
cdef int memory_share(Memory* m, int chunk, bint offered_only, void* share, int64_t* step) noexcept nogil
cdef double memory_merge_mean(Memory* m, int chunk, bint replace, double learners, const void* sum,
                              const void* share) noexcept nogil

cdef class Store:
    cdef Memory memory
