# cython: language_level=3
# Why compiled: the trainer and the engine's thread share it chunk by chunk, without the GIL.
"""The model in chunks, shared by the trainer and the engine.

The engine adds corrections to the open slot. (After an exact mean of all models the slot holds that mean
itself, which replaces the model, so that all super learners have the same bits.) The trainer publishes: the
two slots change places. Then it absorbs the published slot: parameter += correction, mirror = parameter.

    trainer                          engine
    publish: open <-> published
                                     merge -> open slot
    absorb chunk 0 (lock)            snapshot chunk 7 (lock): mirror + published + open
    absorb chunk 1 (lock)            snapshot chunk 1: mirror + open, published is in the mirror

All learners of the super learner read a published slot without a lock. The next publication makes it the
open one, while some learner may still be reading it: so it is held, and nothing is merged into it, until the
gradient all-reduce after the publication has completed, which every learner enters only after it has absorbed.
"""

from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.stdlib cimport free, realloc

from hvd_adpsgd.engine.kernels cimport (adpsgd_apply, adpsgd_itemsize, adpsgd_merge, adpsgd_merge_mean,
                                  adpsgd_snapshot, adpsgd_sum_itemsize, adpsgd_widen)

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)


cdef struct Span:
    int64_t tensor          # which tensor
    int64_t start           # first element in the tensor
    int64_t chunk
    int64_t offset          # first element in the chunk
    int64_t count           # elements


cdef int wire_type(Chunk* chunk, int wire) noexcept nogil:
    """The element type on the wire: `wire` narrows 32- and 64-bit elements, -1 narrows nothing."""
    return wire if wire >= 0 and adpsgd_itemsize(chunk.dtype) > 2 else chunk.dtype


cdef int64_t memory_nbytes(Memory* m, int chunk, int wire) noexcept nogil:
    """Bytes of one chunk on the wire."""
    cdef int64_t nbytes
    pthread_mutex_lock(&m.lock)
    nbytes = m.chunks[chunk].count * adpsgd_itemsize(wire_type(&m.chunks[chunk], wire))
    pthread_mutex_unlock(&m.lock)
    return nbytes


cdef int memory_snapshot(Memory* m, int chunk, int wire, bint offered_only, bint stream, void* out, void* keep,
                         int64_t* step) noexcept nogil:
    """out = mirror + corrections that the mirror lacks. Returns 1 if out is not finite."""
    cdef Chunk* c
    cdef void* base
    cdef void* published = NULL
    cdef void* pending = NULL
    cdef int bad
    pthread_mutex_lock(&m.lock)
    c = &m.chunks[chunk]
    base = c.mirror
    if not offered_only:
        if c.full[1 - m.open][0] and not c.absorbed:
            published = c.slot[1 - m.open]
            if c.full[1 - m.open][0] == REPLACES:
                base = published
                published = NULL
        if c.full[m.open][0] and not m.held:
            pending = c.slot[m.open]
            if c.full[m.open][0] == REPLACES:
                base = pending
                published = NULL
                pending = NULL
    step[0] = c.step
    bad = adpsgd_snapshot(c.dtype, wire_type(c, wire), out, base, published, pending, keep,
                          c.count, stream)
    pthread_mutex_unlock(&m.lock)
    return bad


cdef Chunk* lock_open(Memory* m, int chunk) noexcept nogil:
    """Lock the memory to merge into the open slot of a chunk. NULL, and no lock, if the slot is held."""
    pthread_mutex_lock(&m.lock)
    if m.held:
        pthread_mutex_unlock(&m.lock)
        return NULL
    return &m.chunks[chunk]


cdef double memory_merge(Memory* m, int chunk, int wire, double weight, const void* received,
                         const void* sent) noexcept nogil:
    """open slot += weight (received - sent). Returns sum((received - sent)^2), -1 if held."""
    cdef Chunk* c = lock_open(m, chunk)
    cdef double square
    if c == NULL:
        return -1.0
    square = adpsgd_merge(c.dtype, wire_type(c, wire), c.slot[m.open], received, sent, weight,
                          c.count, not c.full[m.open][0], m.stream)
    if not c.full[m.open][0]:
        c.full[m.open][0] = ADDS
    pthread_mutex_unlock(&m.lock)
    return square


cdef int64_t memory_sum_nbytes(Memory* m, int chunk, int64_t* count, int* itemsize) noexcept nogil:
    """Bytes of one chunk in the type of sums; also its elements, and the size of one there."""
    pthread_mutex_lock(&m.lock)
    count[0] = m.chunks[chunk].count
    itemsize[0] = adpsgd_sum_itemsize(m.chunks[chunk].dtype)
    pthread_mutex_unlock(&m.lock)
    return count[0] * itemsize[0]


cdef int memory_share(Memory* m, int chunk, bint offered_only, void* own, void* share,
                      int64_t* step) noexcept nogil:
    """share = the model in the type of sums, zeros if it is not finite: then 1 is returned.

    `own` is room for the chunk in its own type."""
    cdef int bad = memory_snapshot(m, chunk, -1, offered_only, False, own, NULL, step)
    cdef Chunk* c
    pthread_mutex_lock(&m.lock)
    c = &m.chunks[chunk]
    adpsgd_widen(c.dtype, share, own, c.count, bad)
    pthread_mutex_unlock(&m.lock)
    return bad


cdef double memory_merge_mean(Memory* m, int chunk, bint replace, double learners, const void* sum,
                              const void* share) noexcept nogil:
    """Merge the mean, sum / learners, into the open slot. Returns the squared distance to it.

    -1 if the slot is held, -2 if the mean is not finite and nothing was merged."""
    cdef Chunk* c = lock_open(m, chunk)
    cdef double square
    if c == NULL:
        return -1.0
    square = adpsgd_merge_mean(c.dtype, c.slot[m.open], sum, share, learners, c.count,
                               not c.full[m.open][0], replace)
    if square < 0:
        pthread_mutex_unlock(&m.lock)
        return -2.0
    if replace:
        c.full[m.open][0] = REPLACES
    elif not c.full[m.open][0]:
        c.full[m.open][0] = ADDS
    pthread_mutex_unlock(&m.lock)
    return square


cdef int absorb_spans(Memory* m, const Span* spans, int64_t nspans, const uintptr_t* tensors,
                      int published, int64_t step) noexcept nogil:
    """Apply the published slot to tensors and, on a leader, refresh the mirror.

    Returns 1 if any parameter is not finite."""
    cdef int64_t i = 0, chunk
    cdef int bad = 0, size, replace
    cdef Chunk* c
    cdef char* correction
    cdef char* mirror
    while i < nspans:
        chunk = spans[i].chunk
        c = &m.chunks[chunk]
        size = adpsgd_itemsize(c.dtype)
        if c.mirror != NULL:
            pthread_mutex_lock(&m.lock)
        while i < nspans and spans[i].chunk == chunk:
            correction = NULL
            mirror = NULL
            replace = 0
            if published >= 0 and c.full[published][0]:
                correction = c.slot[published] + spans[i].offset * size
                replace = c.full[published][0] == REPLACES
            if c.mirror != NULL:
                mirror = c.mirror + spans[i].offset * size
            bad |= adpsgd_apply(c.dtype, <char*>tensors[spans[i].tensor] + spans[i].start * size,
                                correction, mirror, spans[i].count, replace, m.stream)
            i += 1
        if c.mirror != NULL:
            c.absorbed = True
            c.step = step
            pthread_mutex_unlock(&m.lock)
    return bad


cdef class Store:
    """Chunks of one layout. Memory belongs to the caller, who keeps it alive."""

    def __cinit__(self):
        pthread_mutex_init(&self.memory.lock, NULL)
        self.memory.chunks = NULL
        self.memory.nchunks = 0
        self.memory.capacity = 0
        self.memory.open = 0
        self.memory.stream = 0
        self.memory.held = False

    def __dealloc__(self):
        free(self.memory.chunks)
        pthread_mutex_destroy(&self.memory.lock)

    def __len__(self):
        return self.memory.nchunks

    def add_chunk(self, uintptr_t mirror, uintptr_t slot0, uintptr_t slot1, uintptr_t full0,
                  uintptr_t full1, int64_t count, int dtype):
        """Append a chunk of `count` elements; addresses of its mirror (0: none), slots, flags."""
        cdef Memory* m = &self.memory
        cdef Chunk* grown
        cdef Chunk* c
        pthread_mutex_lock(&m.lock)
        if m.nchunks == m.capacity:
            grown = <Chunk*>realloc(m.chunks, max(64, 2 * m.capacity) * sizeof(Chunk))
            if grown == NULL:
                pthread_mutex_unlock(&m.lock)
                raise MemoryError("chunk table")
            m.chunks = grown
            m.capacity = max(64, 2 * m.capacity)
        c = &m.chunks[m.nchunks]
        c.mirror = <char*>mirror
        c.slot[0] = <char*>slot0
        c.slot[1] = <char*>slot1
        c.full[0] = <uint8_t*>full0
        c.full[1] = <uint8_t*>full1
        c.absorbed = True
        c.count = count
        c.dtype = dtype
        c.step = -1
        m.nchunks += 1
        pthread_mutex_unlock(&m.lock)

    def stream(self, bint past_the_caches):
        """Write mirror and corrections past the caches, for models larger than those are."""
        self.memory.stream = past_the_caches

    def publish(self, bint hold=False):
        """Let the slots change places. Returns the index of the published one (leader only).

        With `hold` nothing is merged into the other slot before `reopen`."""
        cdef Memory* m = &self.memory
        cdef int i, published
        with nogil:
            pthread_mutex_lock(&m.lock)
            published = m.open
            m.open = 1 - published
            m.held = hold
            for i in range(m.nchunks):
                m.chunks[i].absorbed = False
                if not hold:
                    m.chunks[i].full[m.open][0] = 0
            pthread_mutex_unlock(&m.lock)
        return published

    def reopen(self):
        """Every learner of the node has read the slot that is open now: fill it anew."""
        cdef Memory* m = &self.memory
        cdef int i
        with nogil:
            pthread_mutex_lock(&m.lock)
            if m.held:
                for i in range(m.nchunks):
                    m.chunks[i].full[m.open][0] = 0
                m.held = False
            pthread_mutex_unlock(&m.lock)

    def absorb(self, const int64_t[:, ::1] spans, const uintptr_t[::1] tensors, int published,
               int64_t step):
        """parameter += published correction; mirror = parameter.

        Args:
            spans: shape (n, 5): tensor, first element in it, chunk, first element there, count;
                sorted by chunk.
            tensors: address of each tensor's first element.
            published: slot to apply, -1 for none.
            step: the trainer's step of the parameters.

        Returns:
            True if any parameter is infinite or not a number.
        """
        cdef int bad
        cdef int64_t n = spans.shape[0]
        if n == 0:
            return False
        with nogil:
            bad = absorb_spans(&self.memory, <const Span*>&spans[0, 0], n, &tensors[0], published,
                               step)
        return bool(bad)

    def pending(self, int slot):
        """How many chunks of `slot` (0 or 1) hold a correction."""
        cdef int i, count = 0
        for i in range(self.memory.nchunks):
            count += self.memory.chunks[i].full[slot][0] != 0
        return count

    @property
    def open(self):
        """The slot that the engine fills."""
        return self.memory.open

    def snapshot(self, int chunk, int wire, unsigned char[::1] out, bint offered_only=False):
        """Test door of the engine's snapshot. Returns (finite, step)."""
        cdef int64_t step = 0
        cdef int bad = memory_snapshot(&self.memory, chunk, wire, offered_only, False, &out[0], NULL,
                                  &step)
        return not bad, step

    def merge(self, int chunk, int wire, double weight, const unsigned char[::1] received,
              const unsigned char[::1] sent):
        """Test door of the engine's merge. Returns sum((received - sent)^2)."""
        return memory_merge(&self.memory, chunk, wire, weight, &received[0], &sent[0])
