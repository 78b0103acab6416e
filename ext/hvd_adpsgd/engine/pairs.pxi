"""The list of exchanges of an engine: their phases, their buffers, and failures of their peers.

An exchange is taken from a pool, and returns to it as IDLE when it is over (exchange.pxi). Until then its
buffers are its own; an exchange whose peer has failed is BROKEN, and keeps its buffers as long as the wire
may use them.
"""

cdef double RETRY_FIRST_S = 50e-6   # pause after a NO; each further NO doubles it, up to RETRY_LAST_S


# ---- states ------------------------------------------------------------------------------

cdef bint allowed(Phase before, Phase after) noexcept nogil:
    """Whether an exchange may change from phase `before` to `after`."""
    if before == IDLE:
        return after == ASKED or after == RUNNING               # this side asks; it serves the peer
    if before == ASKED:
        return after == RUNNING or after == IDLE                # YES or we serve it; NO or the peer is gone
    if before == RUNNING:
        return after == CLOSING or after == BROKEN              # all chunks merged; the peer has failed
    if before == CLOSING:
        return after == IDLE or after == BROKEN                 # the peer has read our chunks; it has failed
    return after == IDLE                                        # the wire has released the buffers


cdef void become(Core* e, Exchange* x, Phase phase) noexcept nogil:
    if not allowed(x.phase, phase):
        latch(&e.mailbox, FAULT_STATE, 8 * x.phase + phase, x.peer)
    x.phase = phase


cdef Exchange* find(Core* e, int peer) noexcept nogil:
    """Return the exchange with a peer, NULL if there is none."""
    cdef Exchange* x = e.pairs.running
    while x != NULL:
        if x.peer == peer and x.phase != IDLE:
            return x
        x = x.next_one
    return NULL


cdef Exchange* enlist(Core* e, int peer) noexcept nogil:
    """Return a new exchange with a peer, IDLE, from the pool; NULL if memory is exhausted."""
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
    """Return the exchanges that are over to the pool."""
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


# ---- all exchanges -----------------------------------------------------------------------

cdef bint open_pairs(Pairs* p, const int* schedule, int64_t length) noexcept:
    p.asking = p.serving = NOBODY
    p.retry_s = RETRY_FIRST_S
    p.lanes = LANES
    p.schedule_length = length
    p.schedule = <int*>calloc(max(1, length), sizeof(int))
    if p.schedule == NULL:
        return False
    if length:
        memcpy(p.schedule, schedule, length * sizeof(int))
    return True


cdef void close_pairs(Pairs* p) noexcept:
    """Free all memory except exchanges whose buffers the wire may still use."""
    cdef Exchange* x
    cdef int i
    free(p.schedule)
    free(p.seconds_of)
    free(p.neighbours)
    for i in range(SPARES):
        free(p.spares[i])
    while p.pool != NULL:
        x = p.pool
        p.pool = x.next_one
        free(x)


# ---- buffers -----------------------------------------------------------------------------

cdef char* mapped(Core* e, int peer) noexcept nogil:
    """Return the peer's shared memory as mapped here; NULL if chunks go over the wire."""
    return e.pairs.neighbours[peer].outbox if e.pairs.neighbours != NULL else NULL


cdef char* take_buffers(Pairs* p) noexcept nogil:
    """Return private buffers for an exchange, two for each lane and one for all, aligned to cache lines for stores past the caches."""
    cdef int i
    cdef char* buffers
    for i in range(SPARES):
        if p.spares[i] != NULL:
            buffers = p.spares[i]
            p.spares[i] = NULL
            return buffers
    return <char*>aligned_alloc(64, (2 * LANES + 1) * p.room)


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
    """Whether there are buffers for an exchange with `peer`, and for one more on this engine's other side.

    An unanswered ASK counts as an exchange, because a silent peer may still answer YES."""
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
    """Reserve buffers for an exchange. Return False if there are none."""
    cdef Pairs* p = &e.pairs
    cdef int i
    x.set = NOBODY
    x.buffers = take_buffers(p)
    if x.buffers == NULL:
        return False
    for i in range(LANES):
        x.lanes[i].out = x.buffers + 2 * i * p.room
        x.lanes[i].inp = x.lanes[i].out + p.room
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
    """Whether a transfer was posted; if not, process the failure."""
    if t.status == PENDING:
        return True
    transfer_failed(e, peer, t)
    return False


cdef void transfer_failed(Core* e, int peer, Transfer* t) noexcept nogil:
    """Process a failed transfer: the failure of a peer ends its exchange, any other error is a fault."""
    if t.status == PEER_DOWN:
        peer_failed(e, peer)
    elif t.status == TOO_LONG:
        latch(&e.mailbox, FAULT_LAYOUT, t.code, peer)
    elif t.status == WIRE_DOWN:
        latch(&e.mailbox, FAULT_MPI, t.code, peer)


cdef void peer_failed(Core* e, int peer) noexcept nogil:
    """Process the failure of a peer: its exchange becomes BROKEN, and keeps buffers that the wire may use."""
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
        e.pairs.taken[x.set] = False    # not used by the wire; a late reader finds another stamp
        x.set = NOBODY


cdef bint retire(Core* e, Exchange* x) noexcept nogil:
    """Free the buffers of a broken exchange if the wire no longer uses them. Return whether it did."""
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


cdef bint release_pairs(Core* e) noexcept nogil:
    """Give up all exchanges, when the thread has ended. Return whether the wire uses none of their buffers."""
    cdef Exchange* x = e.pairs.running
    while x != NULL:
        if x.phase == ASKED:
            become(e, x, IDLE)
        elif x.phase == RUNNING or x.phase == CLOSING:
            become(e, x, BROKEN)
        if x.phase == BROKEN:
            retire(e, x)
        x = x.next_one
    sweep(&e.pairs)
    return e.pairs.running == NULL


cdef void take_failures(Core* e, bint look) noexcept nogil:
    """Process all failures of peers that the wire reports; `look`: let the wire search thoroughly."""
    cdef int peer = e.wire.next_failed(e.wire, look)
    while peer != NOBODY:
        if e.membership.states[peer] == LEFT:
            note_end(&e.membership, peer)       # its exchange goes on: its last chunks may have arrived
        else:
            peer_failed(e, peer)
        peer = e.wire.next_failed(e.wire, False)
