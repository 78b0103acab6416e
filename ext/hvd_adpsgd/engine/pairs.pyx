# cython: language_level=3
# Why compiled: it runs on the engine's thread, without the GIL.
"""The exchanges there are: their states, their buffers, and what a failed peer leaves of them.

An exchange is taken from a pool, and goes back IDLE when it is over (exchange.pyx). Until then its buffers are its own;
one whose peer has failed is BROKEN, and keeps them as long as the wire may use them.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from hvd_adpsgd.engine.core cimport *
from hvd_adpsgd.engine.membership cimport LEFT, note_end
from hvd_adpsgd.engine.mailbox cimport FAULT_LAYOUT, FAULT_MEMORY, FAULT_MPI, FAULT_STATE, add, latch
from hvd_adpsgd.engine.wire cimport NOBODY, PEER_DOWN, PENDING, TOO_LONG, WIRE_DOWN, Transfer

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t, size_t)

RETRY_FIRST_S = 50e-6               # pause after a NO, doubled up to the last of exchange.pyx


# ---- states ------------------------------------------------------------------------------

cdef bint allowed(Phase before, Phase after) noexcept nogil:
    """The transitions of an exchange."""
    if before == IDLE:
        return after == ASKED or after == RUNNING               # we ask; we serve
    if before == ASKED:
        return after == RUNNING or after == IDLE                # YES; NO, the peer is gone, or we serve it
    if before == RUNNING:
        return after == CLOSING or after == BROKEN              # all chunks merged; the peer has failed
    if before == CLOSING:
        return after == IDLE or after == BROKEN                 # the peer has read ours; it has failed
    return after == IDLE                                        # the wire has given the buffers back


cdef void become(Core* e, Exchange* x, Phase phase) noexcept nogil:
    if not allowed(x.phase, phase):
        latch(&e.mailbox, FAULT_STATE, 8 * x.phase + phase, x.peer)
    x.phase = phase


cdef Exchange* find(Core* e, int peer) noexcept nogil:
    """The exchange with a peer, NULL if there is none."""
    cdef Exchange* x = e.pairs.running
    while x != NULL:
        if x.peer == peer and x.phase != IDLE:
            return x
        x = x.next_one
    return NULL


cdef Exchange* enlist(Core* e, int peer) noexcept nogil:
    """A new exchange from the pool, IDLE; NULL without memory."""
    cdef Pairs* p = &e.pairs
    cdef Exchange* x = p.pool
    if x != NULL:
        p.pool = x.next_one
    else:
        x = <Exchange*>calloc(1, sizeof(Exchange))
        if x == NULL:
            latch(&e.mailbox, FAULT_MEMORY, 0, peer)
            return NULL
    x.peer = peer
    x.phase = IDLE
    x.parked = x.active = False
    x.buffers = NULL
    x.set = NOBODY
    x.began = x.moved = now(e)
    x.next_one = p.running
    p.running = x
    return x


cdef void sweep(Pairs* p) noexcept nogil:
    """Give the exchanges that are over back to the pool."""
    cdef Exchange** link = &p.running
    cdef Exchange* x
    while link[0] != NULL:
        x = link[0]
        if x.phase == IDLE:
            link[0] = x.next_one
            x.next_one = p.pool
            p.pool = x
        else:
            link = &x.next_one


cdef void release_side(Core* e, int peer) noexcept nogil:
    if e.pairs.asking == peer:
        e.pairs.asking = NOBODY
    if e.pairs.serving == peer:
        e.pairs.serving = NOBODY


# ---- all of them -------------------------------------------------------------------------

cdef bint open_pairs(Pairs* p, const int* schedule, int64_t length) noexcept:
    p.asking = p.serving = NOBODY
    p.retry_s = RETRY_FIRST_S
    p.lanes = LANES
    p.share = 1.0
    p.schedule_length = length
    p.schedule = <int*>calloc(max(1, length), sizeof(int))
    if p.schedule == NULL:
        return False
    if length:
        memcpy(p.schedule, schedule, length * sizeof(int))
    return True


cdef void close_pairs(Pairs* p) noexcept:
    """Free all but the exchanges whose buffers the wire may still use."""
    cdef Exchange* x
    cdef int i
    free(p.schedule)
    free(p.neighbours)
    for i in range(SPARES):
        free(p.spares[i])
    while p.pool != NULL:
        x = p.pool
        p.pool = x.next_one
        free(x)


# ---- buffers -----------------------------------------------------------------------------

cdef char* mapped(Core* e, int peer) noexcept nogil:
    """The peer's outbox; NULL: chunks go over the wire."""
    return e.pairs.neighbours[peer].outbox if e.pairs.neighbours != NULL else NULL


cdef char* take_buffers(Pairs* p) noexcept nogil:
    """Of an exchange. They begin with a line, for they are copied past the caches (Block in kernels.c)."""
    cdef int i
    cdef char* buffers
    for i in range(SPARES):
        if p.spares[i] != NULL:
            buffers = p.spares[i]
            p.spares[i] = NULL
            return buffers
    return <char*>aligned_alloc(64, 2 * LANES * p.lane_nbytes)


cdef void return_buffers(Pairs* p, Exchange* x) noexcept nogil:
    cdef int i
    cdef char* buffers = x.buffers
    x.buffers = NULL
    if x.set != NOBODY:
        p.taken[x.set] = False
        x.set = NOBODY
    for i in range(SPARES):
        if p.spares[i] == NULL:
            p.spares[i] = buffers
            return
    free(buffers)


cdef bint has_room(Core* e, int peer) noexcept nogil:
    """Whether there are buffers for an exchange with `peer`, and for one more on our other side.

    An unanswered ASK counts as an exchange, for a silent peer may still answer YES."""
    cdef Exchange* x = e.pairs.running
    cdef int i, room = 0
    if mapped(e, peer) == NULL:
        return True
    for i in range(SETS):
        room += not e.pairs.taken[i]
    while x != NULL:
        room -= x.peer != peer and x.phase == ASKED and mapped(e, x.peer) != NULL
        x = x.next_one
    return room >= 2


cdef bint allocate(Core* e, Exchange* x) noexcept nogil:
    """Give an exchange its buffers."""
    cdef Pairs* p = &e.pairs
    cdef int i
    x.set = NOBODY
    x.buffers = take_buffers(p)
    if x.buffers == NULL:
        return False
    for i in range(LANES):
        x.lanes[i].keep = x.lanes[i].out = x.buffers + 2 * i * p.lane_nbytes
        x.lanes[i].inp = x.lanes[i].out + p.lane_nbytes
        x.lanes[i].sending.in_use = x.lanes[i].receiving.in_use = False
    x.last_sending.in_use = x.last_receiving.in_use = False
    if mapped(e, x.peer) == NULL:
        return True
    for i in range(SETS):
        if not p.taken[i]:
            p.taken[i] = True
            x.set = i
            return True
    return False


# ---- failures ----------------------------------------------------------------------------

cdef bint posted(Core* e, int peer, Transfer* t) noexcept nogil:
    """Whether a transfer could be posted; else the failure is handled."""
    if t.status == PENDING:
        return True
    transfer_failed(e, peer, t)
    return False


cdef void transfer_failed(Core* e, int peer, Transfer* t) noexcept nogil:
    """A failed peer ends its exchange, any other error is a fault."""
    if t.status == PEER_DOWN:
        peer_failed(e, peer)
    elif t.status == TOO_LONG:
        latch(&e.mailbox, FAULT_LAYOUT, t.code, peer)
    elif t.status == WIRE_DOWN:
        latch(&e.mailbox, FAULT_MPI, t.code, peer)


cdef void peer_failed(Core* e, int peer) noexcept nogil:
    """The peer's process has failed. Its exchange keeps its buffers as long as the wire may write to them."""
    cdef Exchange* x = find(e, peer)
    note_end(&e.membership, peer)
    release_side(e, peer)
    if x == NULL or x.phase == BROKEN:
        return
    if x.phase == ASKED:
        become(e, x, IDLE)
        return
    add(&e.mailbox.counters.broken, 1)
    become(e, x, BROKEN)
    if x.set != NOBODY:
        e.pairs.taken[x.set] = False    # the wire never had these addresses; a late reader finds another stamp
        x.set = NOBODY


cdef bint retire(Core* e, Exchange* x) noexcept nogil:
    """Free the buffers of a broken exchange once the wire no longer uses them. True if freed."""
    cdef bint done = e.wire.release(e.wire, &x.last_sending) and e.wire.release(e.wire, &x.last_receiving)
    cdef int i
    for i in range(LANES):
        done &= (e.wire.release(e.wire, &x.lanes[i].sending)
                 and e.wire.release(e.wire, &x.lanes[i].receiving))
        x.lanes[i].busy = False
    if not done:
        return False
    return_buffers(&e.pairs, x)
    become(e, x, IDLE)
    return True


cdef void take_failures(Core* e, bint look) noexcept nogil:
    """Take what the wire reports; `look`: let it search thoroughly."""
    cdef int peer = e.wire.next_failed(e.wire, look)
    while peer != NOBODY:
        if e.membership.states[peer] == LEFT:
            note_end(&e.membership, peer)       # its last chunks may be here, not merged: transfers that fail tell
        else:
            peer_failed(e, peer)
        peer = e.wire.next_failed(e.wire, False)
