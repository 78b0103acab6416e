# cython: language_level=3
# Why compiled: the trainer and the engine's thread share it chunk by chunk, without the GIL.
"""The model in chunks, which the trainer and the engine of a super learner share.

The engine adds corrections to the open slot. (After an exact mean of all models the slot holds that mean
itself, which replaces the model, so that all super learners have the same bits.) The trainer publishes: the
open slot becomes the published one, and the next slot is opened. Then the trainer absorbs the published slot:
parameter += correction, mirror = parameter.

    trainer                          engine
    publish: open -> published
                                     merge -> the next slot, open now
    absorb chunk 0 (its lease)       snapshot chunk 7 (its lease): mirror + published + open
    absorb chunk 1 (its lease)       snapshot chunk 1: mirror + open, published is in the mirror

Each chunk has a lock of its own (lease): trainer and engine wait for each other only if both use the same
chunk.

All learners of the super learner read a published slot without a lease. With three slots, publication t opens
the slot of publication t - 2 again. No learner can still be reading that slot: each has applied it before it
entered the all-reduce of step t - 1, which was over before publication t. With two slots, publication t would
open the slot of t - 1, which a late learner may still be reading, and merging would have to wait for the
all-reduce of step t. A learner that is alone in its super learner applies each slot before it publishes the
next one, and has two.

A pass need not copy each chunk. A chunk without a correction may stay as the mirror has it: the mirror then lacks
local updates, and no correction. Its peers get an older chunk, and both sides merge exactly opposite terms.

Corrections are float64 or float32. A 16-bit parameter takes the rounded sum, and the rounding error goes into
the open slot as a correction, to be applied with the next publication. The leader alone writes it: all
learners of the super learner read the same corrections, and so compute the same bits.

Peers on the host may read a chunk in place, without its lease: a lease is local to this process, and a
stopped process would never release a shared one. A thread that changes the chunk makes the chunk's version
odd before the first store and even after the last one. A reader that finds another version after its last
load than before its first one discards what it has read, and tries again.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from hvd_adpsgd.engine.codes cimport (adpsgd_codes_answer, adpsgd_codes_blocks, adpsgd_codes_format, adpsgd_codes_merge,
                                      adpsgd_codes_nbytes, adpsgd_codes_offer)
from hvd_adpsgd.engine.kernels cimport (ADPSGD_DTYPES, ADPSGD_HELD_BACK, ADPSGD_INT16, ADPSGD_NOT_FINITE, adpsgd_any_large,
                                        adpsgd_apply, adpsgd_half_difference, adpsgd_itemsize, adpsgd_merge,
                                        adpsgd_merge_half, adpsgd_merge_mean, adpsgd_model, adpsgd_slot_dtype,
                                        adpsgd_slot_itemsize, adpsgd_snapshot)

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)

cdef extern from *:
    """
    #define adpsgd_version(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define adpsgd_set_version(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    """
    int64_t version_of "adpsgd_version"(int64_t*) nogil
    void set_version "adpsgd_set_version"(int64_t*, int64_t) nogil


cdef enum:
    RUNS = 8                # threads of one pass over the model, at most: few threads saturate the memory


cdef struct Span:
    int64_t tensor          # which tensor
    int64_t start           # first element in the tensor
    int64_t chunk
    int64_t offset          # first element in the chunk
    int64_t count           # elements


cdef int wire_type(Chunk* chunk, int wire) noexcept nogil:
    """Return the element type of a chunk in the format `wire`: that type for 32- and 64-bit elements, else their own."""
    return wire if 0 <= wire < ADPSGD_DTYPES and adpsgd_itemsize(chunk.dtype) > 2 else chunk.dtype


cdef int64_t memory_elements(Memory* m, int chunk) noexcept nogil:
    """Return the number of elements of a chunk."""
    return chunk_at(m, chunk).count


cdef int64_t memory_nbytes(Memory* m, int chunk, int wire) noexcept nogil:
    """Return the bytes of a chunk on the wire."""
    cdef Chunk* c = chunk_at(m, chunk)
    return c.count * adpsgd_itemsize(wire_type(c, wire))


cdef Chunk* lease(Memory* m, int chunk) noexcept nogil:
    cdef Chunk* c = chunk_at(m, chunk)
    pthread_mutex_lock(&c.lease)
    return c


cdef void end_lease(Chunk* c) noexcept nogil:
    pthread_mutex_unlock(&c.lease)


cdef Chunk* lease_to_change(Memory* m, int chunk) noexcept nogil:
    cdef Chunk* c = lease(m, chunk)
    begin_change(c)
    return c


cdef void end_change(Memory* m, Chunk* c) noexcept nogil:
    if c.live != NULL:
        show(m, c)
    end_lease(c)


cdef void begin_change(Chunk* c) noexcept nogil:
    if c.live != NULL:
        set_version(&c.live.version, c.live.version + 1)
        fence()


cdef void show(Memory* m, Chunk* c) noexcept nogil:
    """End a change of a chunk: write its Live and make the version even, so that peers may read the chunk."""
    cdef Live found = contents(m, c)
    c.live.step, c.live.base, c.live.first, c.live.second = found.step, found.base, found.first, found.second
    set_version(&c.live.version, c.live.version + 1)


cdef Live contents(Memory* m, Chunk* c) noexcept nogil:
    """Return which buffers add up to the current model of a chunk: a base, and corrections that it lacks."""
    cdef int before = published_slot(m, c.open)
    cdef Live found = [0, c.step, MIRROR, NO_SLOT, NO_SLOT]
    if c.full[before][0] == REPLACES and not c.absorbed:
        found.base = before
    elif c.full[before][0] and not c.absorbed:
        found.first = before
    if c.full[c.open][0] == REPLACES:
        found.base, found.first = c.open, NO_SLOT
    elif c.full[c.open][0]:
        found.second = c.open
    return found


cdef adpsgd_model sum_of(Chunk* c, Live* found, const char* mirror, char** slots) noexcept nogil:
    """Return the addresses of the buffers that `found` names."""
    cdef adpsgd_model model = [c.dtype, mirror, NULL, NULL]
    if 0 <= found.base < SLOTS:
        model.dtype, model.base = adpsgd_slot_dtype(c.dtype), slots[found.base]
    if 0 <= found.first < SLOTS:
        model.first = slots[found.first]
    if 0 <= found.second < SLOTS:
        model.second = slots[found.second]
    return model


# ---- the engine's side ---------------------------------------------------------------------

cdef adpsgd_model own_model(Memory* m, Chunk* c, bint offered_only) noexcept nogil:
    """Return a chunk of this side's model: with all corrections, or as last offered."""
    cdef Live found = contents(m, c)
    if offered_only:
        found.base, found.first, found.second = MIRROR, NO_SLOT, NO_SLOT
    return sum_of(c, &found, c.mirror, c.slot)


cdef int memory_snapshot_as(Memory* m, int chunk, int dtype, bint offered_only, void* out, int64_t* step) noexcept nogil:
    """out = mirror + corrections that the mirror lacks, as `dtype`. Returns 1 if out is not finite."""
    cdef Chunk* c = lease(m, chunk)
    cdef adpsgd_model model = own_model(m, c, offered_only)
    cdef int bad = adpsgd_snapshot(model.dtype, dtype, out, model.base, model.first, model.second, c.count)
    step[0] = c.step
    end_lease(c)
    return bad


cdef int memory_snapshot(Memory* m, int chunk, int wire, bint offered_only, void* out, int64_t* step) noexcept nogil:
    """out = mirror + corrections that it lacks, in the type on the wire. Returns 1 if out is not finite."""
    return memory_snapshot_as(m, chunk, wire_type(chunk_at(m, chunk), wire), offered_only, out, step)


cdef double memory_merge(Memory* m, int chunk, int wire, double weight, const void* received,
                         const void* sent) noexcept nogil:
    """open slot += weight (received - sent). Returns sum((received - sent)^2)."""
    cdef Chunk* c = lease_to_change(m, chunk)
    cdef double square = adpsgd_merge(c.dtype, wire_type(c, wire), c.slot[c.open], received, sent, weight,
                                      c.count, not c.full[c.open][0], c.stream)
    note_merged(c)
    end_change(m, c)
    return square


cdef void note_merged(Chunk* c) noexcept nogil:
    if not c.full[c.open][0]:
        c.full[c.open][0] = ADDS
    c.merged += 1
    c.left_out = 0


cdef adpsgd_model peer_model(Memory* m, Neighbour* peer, Chunk* c, Live* live, bint offered_only) noexcept nogil:
    """Return a chunk of the peer's model, as `own_model` does for ours.

    `live` may change meanwhile: whatever it holds, the addresses are in the peer's area."""
    cdef Live found = live[0]
    cdef char* slots[SLOTS]
    cdef int i
    for i in range(SLOTS):              # all SLOTS: the peer may have another number of slots
        slots[i] = peer.area + (c.slot[0] - m.area) + i * (c.slot[1] - c.slot[0])
    if offered_only:
        found.base, found.first, found.second = MIRROR, NO_SLOT, NO_SLOT
    return sum_of(c, &found, peer.area + (c.mirror - m.area), slots)


cdef Compared memory_compare(Memory* m, Neighbour* peer, int chunk, int wire, bint offered_only, double weight, void* half,
                             void* keep, int64_t* step, int64_t* peer_step, double* square) noexcept nogil:
    """half = (peer's chunk - our chunk) / 2, in the type on the wire; open slot += 2 weight half.

    Nothing is merged if the peer's chunk has changed meanwhile, or if the difference is not finite.
    `keep` gets a second copy of `half`, in the caches; `square` the squared distance of the two chunks."""
    cdef Chunk* c = chunk_at(m, chunk)
    cdef Live* live = <Live*>peer.lives + chunk
    cdef int64_t version = version_of(&live.version)
    cdef adpsgd_model mine, theirs
    cdef int dtype = wire_type(c, wire)
    cdef bint bad
    if version % 2:
        return CHANGING
    theirs = peer_model(m, peer, c, live, offered_only)
    peer_step[0] = live.step
    pthread_mutex_lock(&c.lease)
    mine = own_model(m, c, offered_only)
    step[0] = c.step
    bad = adpsgd_half_difference(adpsgd_slot_dtype(c.dtype), dtype, half, &mine, &theirs, keep, c.count, True)
    if peer.meanwhile != NULL:
        peer.meanwhile(peer, chunk)
    fence()
    if version_of(&live.version) != version:
        end_lease(c)
        return CHANGING
    if bad:
        end_lease(c)
        return NOT_FINITE
    begin_change(c)
    square[0] = adpsgd_merge_half(c.dtype, dtype, c.slot[c.open], keep, weight, c.count, not c.full[c.open][0], c.stream)
    note_merged(c)
    end_change(m, c)
    return MERGED


cdef double memory_merge_half(Memory* m, int chunk, int wire, double weight, const void* half) noexcept nogil:
    """open slot -= 2 weight half, where the peer has computed `half`.

    Returns the squared distance of the chunks."""
    cdef Chunk* c = lease_to_change(m, chunk)
    cdef double square = adpsgd_merge_half(c.dtype, wire_type(c, wire), c.slot[c.open], half, -weight, c.count,
                                           not c.full[c.open][0], c.stream)
    note_merged(c)
    end_change(m, c)
    return square


cdef uint16_t* steps_of(Chunk* c) noexcept nogil:
    """Return the steps of a chunk's next offer in few bits; NULL if memory is exhausted."""
    if c.steps == NULL:
        c.steps = <uint16_t*>calloc(max(1, adpsgd_codes_blocks(c.count)), sizeof(uint16_t))
    return c.steps


cdef int64_t memory_offer(Memory* m, int chunk, int wire, bint offered_only, void* out, int64_t* step) noexcept nogil:
    """out = mirror + corrections that it lacks, in a format of few bits (codes.h).

    The first offer, and one of REFRESH, is an INT16. Returns the bytes, 0 if the chunk is not finite."""
    cdef Chunk* c = lease(m, chunk)
    cdef adpsgd_model model = own_model(m, c, offered_only)
    cdef uint16_t* steps = steps_of(c)
    cdef bint bad = True
    if steps != NULL:
        if steps[0] == 0 or (c.offers + chunk) % REFRESH == 0:
            wire = ADPSGD_INT16
        bad = adpsgd_codes_offer(wire, adpsgd_slot_dtype(c.dtype), out, &model, steps, c.count)
    c.offers += 1
    step[0] = c.step
    end_lease(c)
    return 0 if bad else adpsgd_codes_nbytes(wire, c.count)


cdef bint memory_fits(Memory* m, int chunk, int wire, const void* message, int64_t nbytes) noexcept nogil:
    """Whether a message is an offer of a chunk, or an answer, of an exchange in that format."""
    cdef int sent = adpsgd_codes_format(message) if nbytes >= <int64_t>sizeof(uint16_t) else wire
    return (sent == wire or sent == ADPSGD_INT16) and nbytes == adpsgd_codes_nbytes(sent, chunk_at(m, chunk).count)


cdef int64_t memory_answer(Memory* m, int chunk, int wire, bint offered_only, double weight, const void* offer,
                           int64_t nbytes, void* out, int64_t* step, double* square) noexcept nogil:
    """out = the offered chunk - ours, as `memory_merge_answer` takes it; open slot += weight out.

    Returns the bytes, those of the offer; 0 if our chunk is not finite, and nothing is merged."""
    cdef Chunk* c = lease(m, chunk)
    cdef adpsgd_model mine = own_model(m, c, offered_only)
    cdef bint bad = adpsgd_codes_answer(adpsgd_slot_dtype(c.dtype), out, offer, &mine, c.count)
    step[0] = c.step
    if bad:
        end_lease(c)
        return 0
    begin_change(c)
    square[0] = merge_answer(c, wire, weight, out)
    end_change(m, c)
    return nbytes


cdef double memory_merge_answer(Memory* m, int chunk, int wire, double weight, const void* answer) noexcept nogil:
    """open slot -= weight answer, where the peer has made the answer to our offer. Returns the squared distance."""
    cdef Chunk* c = lease_to_change(m, chunk)
    cdef double square = merge_answer(c, wire, -weight, answer)
    end_change(m, c)
    return square


cdef double merge_answer(Chunk* c, int wire, double weight, const void* answer) noexcept nogil:
    cdef double square = adpsgd_codes_merge(wire, adpsgd_slot_dtype(c.dtype), c.slot[c.open], answer, weight, steps_of(c),
                                            c.count, not c.full[c.open][0])
    note_merged(c)
    return square


cdef void memory_leave_out(Memory* m, int chunk) noexcept nogil:
    """Count an exchange or a mean that could not average a chunk, because a value of it was not finite."""
    cdef Chunk* c = lease(m, chunk)
    c.left_out += 1
    end_lease(c)


cdef int64_t memory_sum_nbytes(Memory* m, int chunk, int64_t* count, int* itemsize) noexcept nogil:
    """Return the bytes of a chunk in the type of sums, and its elements and the bytes of one as results."""
    count[0] = chunk_at(m, chunk).count
    itemsize[0] = adpsgd_slot_itemsize(chunk_at(m, chunk).dtype)
    return count[0] * itemsize[0]


cdef int memory_share(Memory* m, int chunk, bint offered_only, void* share, int64_t* step) noexcept nogil:
    """share = the chunk in the type of sums; if the chunk is not finite, zeros, and 1 is returned.

    The same if a number is so large that its distance from the mean may not be finite: then the chunk of this
    super learner is left out of the mean."""
    cdef Chunk* c = chunk_at(m, chunk)
    cdef int bad = memory_snapshot_as(m, chunk, adpsgd_slot_dtype(c.dtype), offered_only, share, step)
    bad = bad or adpsgd_any_large(adpsgd_slot_dtype(c.dtype), share, c.count)
    if bad:
        memset(share, 0, c.count * adpsgd_slot_itemsize(c.dtype))
    return bad


cdef double memory_merge_mean(Memory* m, int chunk, bint replace, double learners, const void* sum,
                              const void* share) noexcept nogil:
    """Merge the mean, sum / learners, into the open slot. Returns the squared distance of chunk and mean.

    Returns -1 if the mean is not finite, and then merges nothing."""
    cdef Chunk* c = lease_to_change(m, chunk)
    cdef double square = adpsgd_merge_mean(c.dtype, c.slot[c.open], sum, share, learners, c.count,
                                           not c.full[c.open][0], replace)
    if square >= 0:
        if replace:
            c.full[c.open][0] = REPLACES
        elif not c.full[c.open][0]:
            c.full[c.open][0] = ADDS
        c.left_out = 0
    end_change(m, c)
    return square


# ---- the trainer's side --------------------------------------------------------------------

cdef inline char* after(char* start, int64_t nbytes) noexcept nogil:
    return start + nbytes if start != NULL else NULL


cdef int absorb_chunk(Memory* m, Chunk* c, const Span* spans, int64_t nspans, const uintptr_t* tensors,
                      int published) noexcept nogil:
    """Apply the published slot of one chunk, on a leader refresh the mirror. Returns flags of adpsgd_apply.

    With tensors NULL the mirror already holds the parameters, and the correction is added to the mirror."""
    cdef int kind = c.full[published][0] if published >= 0 else 0
    cdef int narrow = adpsgd_itemsize(c.dtype), wide = adpsgd_slot_itemsize(c.dtype), found = 0
    cdef bint fresh = False
    cdef char* correction = c.slot[published] if kind else NULL
    cdef char* back = NULL
    cdef char* parameter
    cdef char* mirror
    cdef int64_t i
    if tensors == NULL and not kind:
        return 0
    # A mean in the open slot includes all corrections, so also this rounding error.
    if kind and c.mirror != NULL and narrow < wide and c.full[c.open][0] != REPLACES:
        back = c.slot[c.open]
        fresh = not c.full[c.open][0]
    for i in range(nspans):
        mirror = after(c.mirror, spans[i].offset * narrow)
        if tensors == NULL:
            parameter, mirror = mirror, NULL
        else:
            parameter = <char*>tensors[spans[i].tensor] + spans[i].start * narrow
        found |= adpsgd_apply(c.dtype, parameter, after(correction, spans[i].offset * wide), mirror,
                              after(back, spans[i].offset * wide), spans[i].count, kind == REPLACES, fresh,
                              c.stream)
    if fresh and found & ADPSGD_HELD_BACK:
        c.full[c.open][0] = ADDS
    return found


cdef struct Run:            # a part of one pass over the model: whole chunks, for one thread
    Memory* m
    const Span* spans
    int64_t nspans
    const uintptr_t* tensors
    int published
    int64_t step
    int every               # passes from one copy of a chunk without a correction to the mirror to the next
    int checked             # and from one look at it, by all learners of the super learner, to the next
    int64_t turn            # number of the pass
    const uint8_t* wanted   # by chunk, whether it is copied in any case; NULL: none is
    int found               # flags of adpsgd_apply
    bint corrected          # the published slot held something
    bint has_thread
    pthread_t thread


cdef inline bint has_turn(Run* r, int64_t chunk, int every) noexcept nogil:
    return (r.turn + chunk) % every == 0


cdef void* absorb_run(void* argument) noexcept nogil:
    """Apply the published slot to the chunks of a run; copy those to the mirror whose turn it is."""
    cdef Run* r = <Run*>argument
    cdef int64_t i = 0, last, chunk
    cdef Chunk* c
    cdef bint corrected, counts, wanted
    cdef int every
    while i < r.nspans:
        chunk = r.spans[i].chunk
        c = chunk_at(r.m, <int>chunk)
        last = i + 1
        while last < r.nspans and r.spans[last].chunk == chunk:
            last += 1
        corrected = r.published >= 0 and c.full[r.published][0] != 0
        r.corrected |= corrected
        # what is not finite counts where all learners look, so that all find the same
        counts = corrected or c.step < 0 or has_turn(r, chunk, r.checked)
        every = r.every if c.mirror != NULL else r.checked
        wanted = c.mirror != NULL and r.wanted != NULL and r.wanted[chunk]
        if counts or wanted or has_turn(r, chunk, every) or r.step - c.step >= every:
            absorb_one(r, c, i, last - i, counts)
        i = last
    return NULL


cdef void absorb_one(Run* r, Chunk* c, int64_t first, int64_t nspans, bint counts) noexcept nogil:
    """Apply the published slot to a chunk, which `nspans` spans from `first` on make up; on a leader copy it."""
    cdef bint leads = c.mirror != NULL
    cdef int found
    if leads:
        pthread_mutex_lock(&c.lease)
        begin_change(c)
    found = absorb_chunk(r.m, c, r.spans + first, nspans, r.tensors, r.published)
    r.found |= found if counts else 0
    if r.tensors != NULL:           # else the mirror has been filled before, and `note_copied` was called
        c.step = r.step
    if not leads:
        return
    c.absorbed = True
    fence()                         # adpsgd_apply may have written past the caches
    end_change(r.m, c)


cdef void absorb_runs(Run* runs, int count) noexcept nogil:
    """Absorb all runs, each in a thread; the first one, and those that get no thread, in this thread."""
    cdef int i
    for i in range(1, count):
        runs[i].has_thread = pthread_create(&runs[i].thread, NULL, absorb_run, &runs[i]) == 0
    for i in range(count):
        if not runs[i].has_thread:
            absorb_run(&runs[i])
    for i in range(1, count):
        if runs[i].has_thread:
            pthread_join(runs[i].thread, NULL)


cdef void add_pending_span(Memory* m, Chunk* c, const Span* span, char* copy) noexcept nogil:
    """Do Store.add_pending for one span."""
    cdef int wide = adpsgd_slot_dtype(c.dtype)
    cdef int64_t size = adpsgd_slot_itemsize(c.dtype), at = span.offset * size
    cdef Live found = contents(m, c)
    copy += span.start * size
    if found.base != MIRROR:
        memcpy(copy, c.slot[found.base] + at, span.count * size)
    if found.first != NO_SLOT:
        adpsgd_apply(wide, copy, c.slot[found.first] + at, NULL, NULL, span.count, False, False, False)
    if found.second != NO_SLOT:
        adpsgd_apply(wide, copy, c.slot[found.second] + at, NULL, NULL, span.count, False, False, False)


cdef class Store:
    """The chunks of a model, with mirrors and slots in memory that the caller owns and keeps alive.

    Args:
        slots: how many slots of corrections: 3, or 2 for a learner that is alone in its super learner.
    """

    def __cinit__(self, int slots=2):
        if not 2 <= slots <= SLOTS:
            raise ValueError(f"Store: slots={slots}, allowed are 2 to {SLOTS}")
        memset(&self.memory, 0, sizeof(Memory))
        self.memory.nslots = slots

    def __dealloc__(self):
        cdef int i
        for i in range(self.memory.nchunks):
            pthread_mutex_destroy(&chunk_at(&self.memory, i).lease)
            free(chunk_at(&self.memory, i).steps)
        for i in range(BLOCKS):
            free(self.memory.blocks[i])

    def __len__(self):
        return self.memory.nchunks

    def add_chunk(self, uintptr_t mirror, slots, full, int64_t count, int dtype, bint rare=False):
        """Append a chunk.

        Args:
            mirror: address of its mirror; 0: none.
            slots: address of each of its slots.
            full: address of a byte for each slot, in which the store keeps what the slot holds.
            count: elements.
            dtype: element type, a code of kernels.h.
            rare: whether not every exchange of the model moves it.
        """
        cdef Memory* m = &self.memory
        cdef int block = 31 - leading_zeros(m.nchunks // FIRST + 1), i
        cdef Chunk* c
        if m.blocks[block] == NULL:
            m.blocks[block] = <Chunk*>calloc(FIRST << block, sizeof(Chunk))
        if m.blocks[block] == NULL:
            raise MemoryError("no memory for the table of chunks")
        c = chunk_at(m, m.nchunks)
        pthread_mutex_init(&c.lease, NULL)
        c.mirror = <char*>mirror
        for i in range(m.nslots):
            c.slot[i] = <char*><uintptr_t>slots[i]
            c.full[i] = <uint8_t*><uintptr_t>full[i]
        c.open = m.open
        c.absorbed = True
        c.count = count
        c.dtype = dtype
        c.step = -1
        c.rare = rare
        m.nrare += rare
        m.nchunks += 1

    def stream(self, bint past_the_caches):
        """Choose whether the chunks added so far are written past the caches (for large models)."""
        cdef int i
        cdef Chunk* c
        for i in range(self.memory.nchunks):
            c = lease(&self.memory, i)
            c.stream = past_the_caches
            end_lease(c)

    def show(self, uintptr_t lives, uintptr_t area):
        """Let peers on this host read the chunks added so far in place (leader only).

        Args:
            lives: address of live_nbytes zeros in shared memory.
            area: address of shared memory with all mirrors and slots; the distance of two slots is the same
                for every chunk.
        """
        cdef Memory* m = &self.memory
        cdef Chunk* c
        cdef int i
        m.area = <char*>area
        for i in range(m.nchunks):
            c = lease(m, i)
            c.live = <Live*>lives + i
            set_version(&c.live.version, 1)
            end_change(m, c)
        m.shown = m.nchunks

    @staticmethod
    def live_nbytes(int chunks):
        """Return the bytes of the descriptions with which peers read `chunks` chunks."""
        return chunks * sizeof(Live)

    def publish(self):
        """Publish the open slot, and open the next one (leader only).

        Returns the index of the published slot."""
        cdef Memory* m = &self.memory
        cdef Chunk* c
        cdef int i, published = m.open
        cdef int64_t merged = 0, chunks = 0
        with nogil:
            m.open = (published + 1) % m.nslots
            for i in range(m.nchunks):
                c = lease_to_change(m, i)
                c.open = m.open
                if c.rare or m.nrare == 0:
                    merged += c.merged
                    chunks += c.merged > 0
                c.merged = 0
                c.full[c.open][0] = 0
                c.absorbed = False
                end_change(m, c)
        m.arrivals = <double>merged / chunks if chunks else 0.0
        m.covered = <double>chunks / (m.nrare or m.nchunks) if chunks else 0.0
        return published

    def absorb(self, const int64_t[:, ::1] spans, const uintptr_t[::1] tensors, int published,
               int64_t step, starts=(0,), int every=1, int checked=1, int64_t turn=0,
               const uint8_t[::1] wanted=None):
        """Apply the published correction: parameter += correction; mirror = parameter.

        Chunks without a correction take turns: each is copied to the mirror in every `every`th pass, and all
        learners of the super learner look in every `checked`th pass whether it is finite.

        Without `tensors` (leader only): mirror += correction. Then the parameters are on a device, the mirror
        holds a copy of them from before the correction, and the device adds the correction itself.

        Args:
            spans: shape (n, 5): tensor, first element in the tensor, chunk, first element in the chunk,
                elements; sorted by chunk.
            tensors: address of each tensor's first element, or None.
            published: slot to apply, -1 for none.
            step: the trainer's step of the parameters.
            starts: the first span of each run, at most RUNS; a run begins at the beginning of a chunk, and
                gets a thread.
            every: passes from one copy of a chunk without a correction to the next, >= 1; divides `checked`.
            checked: passes from one look at it to the next, equal on all learners of the super learner.
            turn: number of the pass, equal on all learners of the super learner.
            wanted: by chunk, whether it is copied to the mirror in any case; None: none is.

        Returns:
            Whether every parameter that was looked at is finite, and whether the slot held anything; equal on
            all learners. Without `tensors`, only parameters that a correction has changed are checked.
        """
        cdef Run runs[RUNS]
        cdef int64_t n = spans.shape[0]
        cdef int i, count = len(starts), found = 0
        cdef bint corrected = False
        if n == 0:
            return True, False
        if count > RUNS:
            raise ValueError(f"{count} runs, at most {RUNS} are allowed")
        if every < 1 or checked < 1 or checked % every:
            raise ValueError(f"every {every}, checked {checked}: the first must divide the second")
        memset(runs, 0, sizeof(runs))
        for i in range(count):
            runs[i].m = &self.memory
            runs[i].spans = <const Span*>&spans[starts[i], 0]
            runs[i].nspans = (starts[i + 1] if i + 1 < count else n) - starts[i]
            if tensors is not None:
                runs[i].tensors = &tensors[0]
            runs[i].published, runs[i].step = published, step
            runs[i].every, runs[i].checked, runs[i].turn = every, checked, turn
            if wanted is not None:
                runs[i].wanted = &wanted[0]
        with nogil:
            absorb_runs(runs, count)
        for i in range(count):
            found |= runs[i].found
            corrected |= runs[i].corrected
        return not found & ADPSGD_NOT_FINITE, bool(corrected)

    def note_copied(self, int first, int last, int64_t step):
        """Record that the mirror of chunks `first` to `last` (excluded) holds the parameters of `step`."""
        cdef int i
        cdef Chunk* c
        for i in range(first, last):
            c = lease_to_change(&self.memory, i)
            c.step = step
            end_change(&self.memory, c)

    def add_pending(self, const int64_t[:, ::1] spans, const uintptr_t[::1] copies):
        """copy += corrections that the parameters lack, published or not; a mean replaces the copy.

        Leader only. The corrections stay pending: the parameters do not change.

        Args:
            spans: as for `absorb`.
            copies: address of a contiguous copy of each tensor, in the type of corrections.
        """
        cdef Memory* m = &self.memory
        cdef const Span* span
        cdef Chunk* c
        cdef int64_t i
        for i in range(spans.shape[0]):
            span = <const Span*>&spans[i, 0]
            with nogil:
                c = lease(m, <int>span.chunk)
                add_pending_span(m, c, span, <char*>copies[span.tensor])
                end_lease(c)

    def forget(self, const int64_t[:, ::1] spans):
        """Drop the rounding errors in the open slot for spans of 16-bit parameters that have been replaced.

        Args:
            spans: as for `absorb`; no exchange or mean may run, and only rounding errors may be pending.
        """
        cdef int64_t i
        cdef Chunk* c
        for i in range(spans.shape[0]):
            c = lease_to_change(&self.memory, <int>spans[i, 2])
            if adpsgd_itemsize(c.dtype) == 2 and c.mirror != NULL and c.full[c.open][0]:
                memset(c.slot[c.open] + 4 * spans[i, 3], 0, 4 * spans[i, 4])
            end_change(&self.memory, c)

    def left_out(self, int64_t least):
        """Return the chunks that at least `least` consecutive exchanges and means could not average."""
        cdef int i
        cdef Chunk* c
        found = []
        for i in range(self.memory.nchunks):
            c = lease(&self.memory, i)
            if c.left_out >= least:
                found.append(i)
            end_lease(c)
        return found

    @property
    def published(self):
        """The slot that was published last."""
        return published_slot(&self.memory, self.memory.open)

    @property
    def arrivals(self):
        """How many exchanges the published slot holds: the mean of those chunks that have some; 0 if none.

        Where there are rare chunks (windows.pxi), of these only."""
        return self.memory.arrivals

    @property
    def covered(self):
        """Which share of the chunks of `arrivals` has some."""
        return self.memory.covered
