# cython: language_level=3
# Why compiled: it runs on the engine's thread, without the GIL.
"""Pairwise exchanges: asking a peer, sending and merging chunks, and what happens when the peer goes.

    active side                   passive side
    ASK   ------------------->    (free, finite and not leaving?)
          <-------------------    YES, or NO: ask another peer
    chunk 0 <-> chunk 0           both send a snapshot and merge half of the difference
    ...                           (weight w: w times the difference)

Every engine answers while it waits, so a cycle of ASKs cannot deadlock. A super learner is the active
side of at most one exchange and the passive side of at most one; two peers have at most one exchange
between them. If two peers ask each other, the lower rank's ASK stands.

On one host the wire does not carry chunks: the snapshot is written into memory that the peer has mapped, and the
message says where. A lane alternates between two such buffers: while chunk c + LANES is written to one, the
peer may still read chunk c from the other. Its message about chunk c + LANES shows that it has merged chunk
c, so chunk c + 2 LANES may overwrite it. A last empty message shows that all chunks are merged.

Where both show their models (store.pyx), one of the two computes the difference for both, each for every second chunk:

    awaits                        compares
    ready ------------------->    half of the difference to the peer's model, where that lies, into shared memory;
                                  merge it
    merge it     <------------    its place, and of which step the model was

A chunk that the peer's trainer is changing is tried again. Each buffer
begins with a stamp, its exchange and chunk: a super learner that was stopped, and that its peers took for failed,
finds another stamp there, and stops with an error instead of merging another exchange's chunk.

An exchange whose peer is silent for `deadline_s` is parked: it keeps its buffers and is finished when
the peer answers, but another exchange may take its side.

In rounds the trainer says which peer to ask; an engine answers NO to an ASK of another round.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.math cimport ceil
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from hvd_adpsgd.engine.control cimport send_ask, send_control
from hvd_adpsgd.engine.core cimport *
from hvd_adpsgd.engine.goodbye cimport answer, departed_in, note_answer
from hvd_adpsgd.engine.membership cimport (ALIVE, FAILED, LEFT, SUSPECT, left_as_broken, next_departed, note_departure,
                                           note_end, set_peer)
from hvd_adpsgd.engine.port cimport (EVENT_ASKED, EVENT_MERGED, EVENT_PARKED, EVENT_SERVED, FAULT_FENCED,
                                     FAULT_LAYOUT, FAULT_MEMORY, FAULT_MPI, FAULT_NONE, FAULT_STATE,
                                     FAULT_WEIGHT, HISTOGRAM, NO_STEP, Event, Orders, add, add_double, latch, load, record,
                                     spend_credit, store, store_count, store_double)
from hvd_adpsgd.engine.store cimport (CHANGING, Compared, MERGED, memory_compare, memory_elements, memory_leave_out,
                                      memory_merge, memory_merge_half, memory_nbytes, memory_snapshot)
from hvd_adpsgd.engine.wire cimport (DATA, DONE, NOBODY, PEER_DOWN, PENDING, TOO_LONG, WIRE_DOWN, Status, Transfer,
                                     receive, send, test_once)

cdef enum:
    NUMBERS = 4096          # exchange numbers with channels of their own: a quarter of DATA_CHANNELS

cdef struct Waits:          # whether an older chunk of an exchange is not received, not compared, or not sent
    bint receive
    bint answer             # ... where the difference is not received
    bint compare
    bint send

RETRY_FIRST_S = 50e-6               # pause after a NO, doubled up to the last
cdef double RETRY_LAST_S = 2e-3


# ---- states --------------------------------------------------------------------------------

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
        latch(&e.port, FAULT_STATE, 8 * x.phase + phase, x.peer)
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
            latch(&e.port, FAULT_MEMORY, 0, peer)
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
    free(p.mapped)
    free(p.doorbells)
    free(p.shown)
    for i in range(SPARES):
        free(p.spares[i])
    while p.pool != NULL:
        x = p.pool
        p.pool = x.next_one
        free(x)


# ---- control messages ----------------------------------------------------------------------

cdef void handle_control(Core* e, int peer, Message* m) noexcept nogil:
    if e.membership.states[peer] == FAILED:
        return                      # sent before it failed
    e.membership.mute[peer] = False
    answers_again(e, peer)
    if m.kind == ASK:
        handle_ask(e, peer, m)
    elif m.kind == YES:
        handle_yes(e, peer, m)
    elif m.kind == NO:
        handle_no(e, peer, m)
    elif m.kind == BYE or m.kind == NEWS:
        handle_departures(e, peer, m)
    elif m.kind == BYE_SEEN:
        note_answer(e, peer, m)
    elif m.kind == CUT:
        handle_cut(e, peer, m)
    elif m.kind == CUT_SEEN:
        shorten(e, peer, m)


cdef void answers_again(Core* e, int peer) noexcept nogil:
    cdef Exchange* x
    if e.membership.states[peer] != SUSPECT:
        return
    x = find(e, peer)
    set_peer(&e.membership, peer, ALIVE)
    if x != NULL:
        x.moved = now(e)


cdef void handle_departures(Core* e, int peer, Message* m) noexcept nogil:
    """Peers have left: the sender, or others of which it has learned."""
    cdef const unsigned char* departed = departed_in(m)
    cdef int gone = next_departed(&e.membership, departed, 0)
    while gone != NOBODY:
        note_departure(&e.membership, gone, left_as_broken(departed, gone))
        dismiss(e, gone)
        gone = next_departed(&e.membership, departed, gone + 1)
    answer(e, peer, m)


cdef void dismiss(Core* e, int peer) noexcept nogil:
    """A peer that left answers nothing more; what it sent before may still arrive."""
    cdef Exchange* x = find(e, peer)
    release_side(e, peer)
    if x == NULL:
        return
    if x.phase == ASKED:
        become(e, x, IDLE)
    elif x.phase != BROKEN:
        x.parked = True
        x.moved = now(e)


cdef void cut(Core* e, Exchange* x) noexcept nogil:
    """Request an early end of an exchange, for which there is no time."""
    if x.phase == RUNNING and not x.cut:
        x.cut = x.held = True
        send_control(e, x.peer, CUT, x.number, x.next)


cdef void handle_cut(Core* e, int peer, Message* m) noexcept nogil:
    """Answer with the number of chunks; a side that has finished has merged all it knew of."""
    cdef Exchange* x = shorten(e, peer, m)
    send_control(e, peer, CUT_SEEN, m.exchange, m.nchunks if x == NULL else x.nchunks)


cdef Exchange* shorten(Core* e, int peer, Message* m) noexcept nogil:
    """End after the chunks that either side has begun: each is merged on both sides, or on neither.

    If both sides request it, both come to the same number; a side that has finished keeps all chunks.
    NULL if that exchange does not run any more."""
    cdef Exchange* x = find(e, peer)
    if x == NULL or x.number != m.exchange or x.phase == ASKED or x.phase == BROKEN:
        return NULL
    if x.phase == RUNNING:
        x.nchunks = min(x.nchunks, max(m.nchunks, x.next))
        x.held = False
    return x


cdef bint same_model(Core* e, int peer, Message* m) noexcept nogil:
    """Whether both sides average the same tensors, with the same weight."""
    if m.weight != e.pairs.weight:
        latch(&e.port, FAULT_WEIGHT, 0, peer)
        return False
    if m.generation < load(&e.ngenerations) and e.generations[m.generation].fingerprint != m.fingerprint:
        latch(&e.port, FAULT_LAYOUT, 0, peer)
        return False
    return True


cdef bint serves(Core* e, int peer, Exchange* x, Message* m) noexcept nogil:
    """Whether this side says YES to an ASK; x: its exchange with that peer, or NULL."""
    cdef bint crossed = x != NULL and x.phase == ASKED and e.wire.rank > peer
    return (can_exchange(e, &e.port.orders) and e.membership.states[peer] < LEFT and m.round == e.port.orders.round and e.pairs.serving == NOBODY
            and (x == NULL or crossed) and has_room(e, peer) and same_model(e, peer, m))


cdef void handle_ask(Core* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = find(e, peer)
    cdef int total = min(m.nchunks, generation(e).nchunks)
    if not serves(e, peer, x, m):
        add(&e.port.counters.declined, 1)
        send_control(e, peer, NO, m.exchange, 0)
        return
    if x != NULL and e.pairs.asking == peer:
        e.pairs.asking = NOBODY     # our own ASK will be answered with NO
    if x == NULL:
        x = enlist(e, peer)
    if x == NULL:
        return
    e.pairs.serving = peer
    x.first = m.first
    send_control(e, peer, YES, m.exchange, total)
    begin(e, x, m.exchange, total, False)


cdef void handle_yes(Core* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = find(e, peer)
    if x == NULL or x.phase != ASKED or x.number != m.exchange:
        return
    same_model(e, peer, m)
    e.pairs.retry_s = RETRY_FIRST_S
    e.pairs.windows += 1
    begin(e, x, m.exchange, m.nchunks, True)


cdef void handle_no(Core* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = find(e, peer)
    cdef Pairs* p = &e.pairs
    if x == NULL or x.phase != ASKED or x.number != m.exchange:
        return
    become(e, x, IDLE)
    add(&e.port.counters.refused, 1)
    same_model(e, peer, m)          # a peer with another model always answers NO
    if p.asking == peer:
        p.asking = NOBODY
        p.ask_after = now(e) + p.retry_s
        p.retry_s = min(2 * p.retry_s, RETRY_LAST_S)


# ---- buffers -------------------------------------------------------------------------------

cdef inline char* mapped(Core* e, int peer) noexcept nogil:
    """The peer's shared memory; NULL: chunks go over the wire."""
    return e.pairs.mapped[peer] if e.pairs.mapped != NULL else NULL


cdef char* take_buffers(Pairs* p) noexcept nogil:
    cdef int i
    cdef char* buffers
    for i in range(SPARES):
        if p.spares[i] != NULL:
            buffers = p.spares[i]
            p.spares[i] = NULL
            return buffers
    return <char*>malloc(2 * LANES * p.lane_nbytes)


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


# ---- chunks --------------------------------------------------------------------------------

cdef bint can_exchange(Core* e, Orders* orders) noexcept nogil:
    """Whether this super learner may take part in a new exchange."""
    return (orders.step >= 0 and orders.fit and not orders.paused and not orders.leaving
            and e.port.fault == FAULT_NONE)


cdef int channel_of(int number, bint upper_asks) noexcept nogil:
    """The channel of one exchange's chunks. Of two peers at most one asks at a time, so it needs
    the asker's own exchange number and which of the two ranks asked."""
    return DATA + 4 * (number % NUMBERS) + (1 if upper_asks else 0)


cdef int share_of(Pairs* p, int total) noexcept nogil:
    """Chunks of one exchange: at least one."""
    return min(total, max(1, <int>ceil(p.share * total - 1e-9)))


cdef int next_window(Pairs* p, int total) noexcept nogil:
    """The first chunk of our next exchange: one window further, so that each chunk has its turn.

    One more after each round of the schedule: else a peer could always get the same chunks."""
    cdef int64_t turns = p.windows + p.windows // max(1, p.schedule_length)
    return <int>(turns * share_of(p, total) % max(1, total))


cdef void begin(Core* e, Exchange* x, int number, int total, bint active) noexcept nogil:
    cdef int i
    if not allocate(e, x):
        latch(&e.port, FAULT_MEMORY, 0, x.peer)
        return
    become(e, x, RUNNING)
    for i in range(LANES):
        x.lanes[i].busy = False
    x.cut = x.held = False
    x.active = active
    x.parked = active and e.pairs.asking != x.peer
    x.number = number
    x.total = total
    x.first %= max(1, total)
    x.nchunks = share_of(&e.pairs, total)
    x.next = 0
    x.done = 0
    x.channel = channel_of(number, active == (e.wire.rank > x.peer))
    x.answers = x.channel + 2
    x.began = now(e)
    x.moved = x.began
    x.square = 0
    x.elements = 0
    x.nbytes = 0
    spend_credit(&e.port, x.peer if active else NOBODY)


cdef bint posted(Core* e, int peer, Transfer* t) noexcept nogil:
    """Whether a transfer could be posted; else the failure is handled."""
    if t.status == PENDING:
        return True
    transfer_failed(e, peer, t)
    return False


cdef bint start_lane(Core* e, Exchange* x) noexcept nogil:
    """Send the snapshot of the next chunk and post the receive of the peer's."""
    cdef Lane* lane = &x.lanes[x.next % LANES]
    cdef int64_t nbytes
    cdef bint good
    if x.next >= x.nchunks or x.next - x.done >= e.pairs.lanes or lane.busy or x.held:
        return False
    lane.index = x.next
    lane.chunk = (x.first + x.next) % x.total
    nbytes = memory_nbytes(e.memory, lane.chunk, e.pairs.wire_type)
    lane.busy = True
    lane.sent = lane.received = lane.merged = lane.void = False
    lane.way = way_of(e, x, lane)
    lane.began = now(e)
    if not x.parked and lane.way != COMPARES:
        # Before the snapshot: taken after it, a trainer in wait_fresh() could see no snapshot in flight
        # and go on, and max_staleness would be exceeded.
        store(&e.port.in_flight_step, min(load(&e.port.in_flight_step), e.port.orders.step))
    if lane.way == SENT:
        good = start_sent(e, x, lane, nbytes)
    elif lane.way == WRITTEN:
        good = start_written(e, x, lane, nbytes)
    else:
        good = start_direct(e, x, lane)
    x.nbytes += 0 if lane.void else nbytes
    x.next += 1
    return good


cdef Way way_of(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Both sides come to the same, or to the two halves of it."""
    if x.set == NOBODY:
        return SENT
    if e.pairs.shown == NULL or e.pairs.shown[x.peer].lives == NULL or lane.chunk >= e.memory.shown:
        return WRITTEN
    return COMPARES if x.active == (lane.index % 2 == 0) else AWAITS


cdef bint start_sent(Core* e, Exchange* x, Lane* lane, int64_t nbytes) noexcept nogil:
    """Send the chunk itself."""
    receive(e.wire, &lane.receiving, lane.inp, <int>nbytes, x.peer, x.channel)
    if not posted(e, x.peer, &lane.receiving):
        return False
    lane.void = memory_snapshot(e.memory, lane.chunk, e.pairs.wire_type, e.pairs.offered_only, False, lane.out,
                                NULL, &lane.step)       # in the caches, for the wire and for the merge
    send(e.wire, &lane.sending, lane.out, 0 if lane.void else <int>nbytes, x.peer, x.channel)
    return posted(e, x.peer, &lane.sending)


cdef int64_t stamp_of(Exchange* x, int chunk, bint ours) noexcept nogil:
    """Tells one chunk of one exchange from every other in the same buffer."""
    return (<int64_t>x.number << 32) + 2 * <int64_t>chunk + (x.active == ours)


cdef bint start_written(Core* e, Exchange* x, Lane* lane, int64_t nbytes) noexcept nogil:
    """Write the snapshot to shared memory and send its place."""
    receive(e.wire, &lane.receiving, &lane.there, sizeof(Place), x.peer, x.channel)
    if not posted(e, x.peer, &lane.receiving):
        return False
    take_place(e, x, lane)
    lane.void = memory_snapshot(e.memory, lane.chunk, e.pairs.wire_type, e.pairs.offered_only, True,
                                lane.out + STAMP, lane.keep, &lane.step)
    lane.here.nbytes = 0 if lane.void else nbytes
    send(e.wire, &lane.sending, &lane.here, sizeof(Place), x.peer, x.channel)
    return posted(e, x.peer, &lane.sending)


cdef void take_place(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Where in our shared memory the chunk goes, stamped."""
    cdef int turn = (lane.index // LANES) % 2
    lane.here.offset = (2 * (x.set * LANES + lane.index % LANES) + turn) * (e.pairs.lane_nbytes + STAMP)
    lane.out = e.pairs.shared + lane.here.offset
    store(<int64_t*>lane.out, stamp_of(x, lane.chunk, True))


cdef bint start_direct(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Wait until the peer is ready; or be, and wait for the difference."""
    lane.step = NO_STEP if lane.way == COMPARES else e.port.orders.step
    receive(e.wire, &lane.receiving, &lane.there, sizeof(Place), x.peer, x.channel if lane.way == COMPARES else x.answers)
    if not posted(e, x.peer, &lane.receiving):
        return False
    if lane.way == COMPARES:
        return True
    lane.here.offset = lane.here.nbytes = 0
    lane.here.step = NO_STEP
    send(e.wire, &lane.sending, &lane.here, sizeof(Place), x.peer, x.channel)
    return posted(e, x.peer, &lane.sending)


cdef int open_place(Core* e, int peer, Lane* lane) noexcept nogil:
    """Find the peer's chunk in its shared memory. Returns its size, 0 if it is out of bounds."""
    cdef int64_t last = e.pairs.shared_nbytes - e.pairs.lane_nbytes - STAMP
    if lane.there.offset < 0 or lane.there.offset > last or not (
            0 <= lane.there.nbytes <= e.pairs.lane_nbytes):
        latch(&e.port, FAULT_LAYOUT, 0, peer)
        return 0
    lane.inp = mapped(e, peer) + lane.there.offset + STAMP
    return <int>lane.there.nbytes


cdef bint advance_lane(Core* e, Exchange* x, Lane* lane, Waits* waits) noexcept nogil:
    """Test a chunk once. On each channel chunks are received in order: none behind an incomplete one is tested."""
    cdef bint moved = False
    cdef bint* earlier = &waits.answer if lane.way == AWAITS else &waits.receive
    cdef Status status
    if not lane.received and not earlier[0]:
        status = test_once(e.wire, &lane.receiving)
        if status > DONE:
            transfer_failed(e, x.peer, &lane.receiving)
            return True
        if status == DONE:
            lane.received = x.heard = True
            moved = True
            note_received(e, x, lane)
        earlier[0] = status == PENDING
    if lane.received and not lane.merged and not (lane.way == COMPARES and waits.compare):
        lane.merged = merge_lane(e, x, lane)
        moved |= lane.merged
        if x.phase != RUNNING:
            return True
    if lane.way == COMPARES and not lane.merged:
        waits.compare = True
    elif not lane.sent and not waits.send:
        status = test_once(e.wire, &lane.sending)
        if status > DONE:
            transfer_failed(e, x.peer, &lane.sending)
            return True
        lane.sent = status == DONE
        waits.send = not lane.sent
        moved |= lane.sent
    if lane.merged and lane.sent:
        lane.busy = False
        x.done += 1
    return moved


cdef void note_received(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """The peer's message: its snapshot, where that or the difference is, or that it is ready."""
    if lane.way == COMPARES:
        return
    lane.nbytes = lane.receiving.nbytes if lane.way == SENT else open_place(e, x.peer, lane)
    if lane.way == AWAITS:
        lane.step = lane.there.step
    add(&e.port.counters.bytes_received, lane.nbytes)


cdef bint stamped(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Whether shared memory still holds the peer's chunk; else the peer took us for failed."""
    if x.set == NOBODY or load(<int64_t*>(lane.inp - STAMP)) == stamp_of(x, lane.chunk, False):
        return True
    latch(&e.port, FAULT_FENCED, 0, x.peer)
    return False


cdef bint merge_lane(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """correction += w (received - sent), unless one of the two snapshots is void. False if it cannot be done yet."""
    cdef int nbytes = lane.nbytes
    cdef double square, began
    if lane.way == COMPARES:
        return compare(e, x, lane)
    if nbytes != 0 and nbytes != memory_nbytes(e.memory, lane.chunk, e.pairs.wire_type):
        latch(&e.port, FAULT_LAYOUT, 0, x.peer)     # the two models have different chunks
        nbytes = 0
    if lane.void or nbytes == 0 or not stamped(e, x, lane):
        x.nbytes -= memory_nbytes(e.memory, lane.chunk, e.pairs.wire_type) if lane.way == AWAITS else 0
        leave_out(e, lane)
        return True
    began = now(e)
    if lane.way == AWAITS:
        square = memory_merge_half(e.memory, lane.chunk, e.pairs.wire_type, e.pairs.weight, lane.inp)
    else:
        square = memory_merge(e.memory, lane.chunk, e.pairs.wire_type, e.pairs.weight, lane.inp, lane.keep)
    stamped(e, x, lane)
    count_merge(e, x, lane, square, began)
    return True


cdef void leave_out(Core* e, Lane* lane) noexcept nogil:
    memory_leave_out(e.memory, lane.chunk)
    add(&e.port.counters.void_chunks, 1)


cdef bint compare(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Compute the difference for both sides, merge it, and send its place. False if the peer's chunk is changing."""
    cdef int64_t nbytes = memory_nbytes(e.memory, lane.chunk, e.pairs.wire_type)
    cdef double square, began = now(e)
    cdef Compared found
    take_place(e, x, lane)
    found = memory_compare(e.memory, &e.pairs.shown[x.peer], lane.chunk, e.pairs.wire_type, e.pairs.offered_only,
                           e.pairs.weight, lane.out + STAMP, x.buffers + e.pairs.lane_nbytes, &lane.step,
                           &lane.here.step, &square)
    if found == CHANGING:
        e.pairs.changing = True
        return False
    lane.here.nbytes = lane.nbytes = <int>(nbytes if found == MERGED else 0)
    if found == MERGED:
        count_merge(e, x, lane, square, began)
    else:
        x.nbytes -= nbytes
        leave_out(e, lane)
    add(&e.port.counters.bytes_received, lane.nbytes)
    send(e.wire, &lane.sending, &lane.here, sizeof(Place), x.peer, x.answers)
    posted(e, x.peer, &lane.sending)
    return True


cdef void count_merge(Core* e, Exchange* x, Lane* lane, double square, double began) noexcept nogil:
    # the mirror may be ahead of the offer
    cdef int64_t step = e.port.orders.step
    cdef int64_t stale = max(step, lane.step) + 1 - lane.step
    cdef Event event = [EVENT_MERGED, x.peer, lane.chunk, x.number, x.active, square, began, now(e), lane.nbytes, lane.step]
    x.square += square
    x.elements += memory_elements(e.memory, lane.chunk)
    add(&e.port.counters.chunks, 1)
    add(&e.port.counters.staleness[max(0, min(stale, HISTOGRAM - 1))], 1)
    record(&e.port, event)


# ---- exchanges -----------------------------------------------------------------------------

cdef bint advance_pairs(Core* e) noexcept nogil:
    """Do what can be done now for all exchanges. True if anything was. Tells the trainer the oldest snapshot."""
    cdef Exchange* x = e.pairs.running
    cdef bint moved = False
    cdef int64_t oldest = NO_STEP
    e.pairs.changing = False
    while x != NULL:
        if x.phase == BROKEN:
            moved |= retire(e, x)
        elif x.phase != IDLE and not rests(e, x):
            moved |= advance(e, x)
        if x.phase == RUNNING and not x.parked:
            oldest = min(oldest, oldest_step(x))
        x = x.next_one
    sweep(&e.pairs)
    store(&e.port.in_flight_step, oldest)
    return moved


cdef int64_t oldest_step(Exchange* x) noexcept nogil:
    """Step of the oldest snapshot that is on its way."""
    cdef int64_t oldest = NO_STEP
    cdef int i
    for i in range(LANES):
        if x.lanes[i].busy and not x.lanes[i].received:
            oldest = min(oldest, x.lanes[i].step)
    return oldest


cdef bint advance(Core* e, Exchange* x) noexcept nogil:
    """Do what can be done now for one exchange. True if anything was."""
    cdef bint over, moved
    x.heard = False
    moved = advance_lanes(e, x) if x.phase == RUNNING else False
    if x.phase == RUNNING and x.done == x.nchunks:
        close(e, x)
    over = x.phase == CLOSING and closed(e, x)
    if moved or over:
        x.moved = now(e)
    if x.heard or over:         # a chunk that the wire has taken says nothing of the peer, unless it ends the
        answers_again(e, x.peer)    # exchange: nothing else may come from the peer then, nor be asked of it
    elif e.membership.states[x.peer] == ALIVE and now(e) - x.moved > e.pairs.deadline_s:
        park(e, x)                          # again, if it was parked and answered in between
    if over:
        finish(e, x)
    return moved or over


cdef bint advance_lanes(Core* e, Exchange* x) noexcept nogil:
    cdef Waits waits = [False, False, False, False]
    cdef Lane* lane
    cdef bint moved = start_lanes(e, x)
    cdef int i, next_one = x.next
    for i in range(LANES):                  # oldest chunk first: its lane is the one next_one will take
        lane = &x.lanes[(next_one + i) % LANES]
        if lane.busy and lane.index < next_one and x.phase == RUNNING:
            moved |= advance_lane(e, x, lane, &waits)
        moved |= start_lanes(e, x)          # at once: the peer may be waiting for them
    return moved


cdef bint start_lanes(Core* e, Exchange* x) noexcept nogil:
    """Begin the chunks for which there are lanes. True if there were any."""
    cdef bint started = False
    while x.phase == RUNNING and start_lane(e, x):
        started = True
    return started


cdef bint under_way(Core* e, Exchange* x) noexcept nogil:
    """Whether an ASK or an exchange is waited for.

    A peer that left has sent all of its chunks, unless this side was silent then: wait while they arrive."""
    cdef int state = e.membership.states[x.peer]
    if x.phase == IDLE or x.phase == BROKEN:
        return False
    return state < LEFT or state == LEFT and now(e) - x.moved <= e.pairs.deadline_s


cdef bint rests(Core* e, Exchange* x) noexcept nogil:
    """Whether the exchange is left alone until the pause is over, which did not wait for it.

    A chunk that comes so late would be merged between the share in a mean and the mean that replaces the model."""
    return e.port.orders.paused and not e.port.orders.leaving and not under_way(e, x)


cdef bint any_under_way(Core* e) noexcept nogil:
    cdef Exchange* x = e.pairs.running
    while x != NULL:
        if under_way(e, x):
            return True
        x = x.next_one
    return False


cdef void close(Core* e, Exchange* x) noexcept nogil:
    """All chunks are merged here. On a shared host, wait until the peer has read ours."""
    become(e, x, CLOSING)
    if x.set == NOBODY:
        return
    receive(e.wire, &x.last_receiving, NULL, 0, x.peer, x.channel)
    if posted(e, x.peer, &x.last_receiving):
        send(e.wire, &x.last_sending, NULL, 0, x.peer, x.channel)
        posted(e, x.peer, &x.last_sending)


cdef bint closed(Core* e, Exchange* x) noexcept nogil:
    """On a shared host: whether the peer has read all of our snapshots."""
    cdef Status received, sent
    if x.set == NOBODY:
        return True
    received = test_once(e.wire, &x.last_receiving)
    sent = test_once(e.wire, &x.last_sending)
    if received > DONE:
        transfer_failed(e, x.peer, &x.last_receiving)
    elif sent > DONE:
        transfer_failed(e, x.peer, &x.last_sending)
    return received == DONE and sent == DONE


cdef void park(Core* e, Exchange* x) noexcept nogil:
    """The exchange with a silent peer keeps its buffers and releases its side."""
    cdef Event event = [EVENT_PARKED, x.peer, -1, x.number, x.active, 0, x.began, now(e), x.nbytes,
                        e.port.orders.step]
    x.parked = True
    release_side(e, x.peer)
    add(&e.port.counters.parked, 1)
    set_peer(&e.membership, x.peer, SUSPECT)
    record(&e.port, event)


cdef void release_side(Core* e, int peer) noexcept nogil:
    if e.pairs.asking == peer:
        e.pairs.asking = NOBODY
    if e.pairs.serving == peer:
        e.pairs.serving = NOBODY


cdef double of_whole_model(Core* e, Exchange* x) noexcept nogil:
    """How many times as many elements the model has as this exchange, where it was to move a share of them."""
    cdef int64_t elements = 0
    cdef int c
    if share_of(&e.pairs, x.total) == x.total:
        return 1.0
    for c in range(x.total):
        elements += memory_elements(e.memory, c)
    return <double>elements / x.elements


cdef void finish(Core* e, Exchange* x) noexcept nogil:
    cdef double square, ended = now(e)
    cdef Event event = [EVENT_ASKED if x.active else EVENT_SERVED, x.peer, -1, x.number, x.active, 0, x.began,
                        ended, x.nbytes, e.port.orders.step]
    release_side(e, x.peer)
    if x.active:
        add(&e.port.counters.exchanges_active, 1)
    else:
        add(&e.port.counters.exchanges_passive, 1)
    add(&e.port.counters.bytes_sent, x.nbytes)
    add_double(&e.port.counters.exchange_s, ended - x.began)
    if x.elements:
        add(&e.port.counters.compared, 1)
        square = x.square * of_whole_model(e, x)
        add_double(&e.port.counters.square, square)
        add(&e.port.counters.square_elements, x.elements)
        store_double(&e.port.counters.last_square, square)
    store_count(&e.port.met[x.peer], e.port.met[x.peer] + 1)
    record(&e.port, event)
    return_buffers(&e.pairs, x)
    become(e, x, IDLE)
    store(&e.port.finished, e.port.finished + 1)


# ---- asking --------------------------------------------------------------------------------

cdef bint eligible(Core* e, int peer) noexcept nogil:
    return (peer >= 0 and peer != e.wire.rank and e.membership.states[peer] == ALIVE
            and find(e, peer) == NULL and has_room(e, peer))


cdef int choose(Core* e) noexcept nogil:
    """The next peer of the schedule that can be asked, or NOBODY."""
    cdef Pairs* p = &e.pairs
    cdef int64_t tries = min(p.schedule_length, 64)
    cdef int peer
    while tries > 0:
        peer = p.schedule[p.cursor % p.schedule_length]
        p.cursor += 1
        tries -= 1
        if eligible(e, peer):
            return peer
    return NOBODY


cdef bint due(Core* e, Orders* orders) noexcept nogil:
    """Is it time to ask? A peer that the trainer wants needs no credit."""
    if e.pairs.asking != NOBODY or not can_exchange(e, orders) or now(e) < e.pairs.ask_after:
        return False
    if orders.wanted != NOBODY:
        return eligible(e, orders.wanted)
    return orders.credit >= 1.0 - 1e-9 and e.pairs.schedule_length > 0


cdef bint ask_if_due(Core* e) noexcept nogil:
    cdef Exchange* x
    cdef Pairs* p = &e.pairs
    cdef int peer = e.port.orders.wanted
    if not due(e, &e.port.orders):
        return False
    peer = peer if peer != NOBODY else choose(e)
    x = enlist(e, peer) if peer != NOBODY else NULL
    if x == NULL:
        p.ask_after = now(e) + RETRY_LAST_S
        return False
    p.number = (p.number + 1) & 0x3FFFFFFF
    x.first = next_window(p, generation(e).nchunks)
    become(e, x, ASKED)
    x.active = True
    x.number = p.number
    p.asking = peer
    send_ask(e, peer, x.number, x.first)
    return True


# ---- failures ------------------------------------------------------------------------------

cdef void transfer_failed(Core* e, int peer, Transfer* t) noexcept nogil:
    """A failed peer ends its exchange, any other error is a fault."""
    if t.status == PEER_DOWN:
        peer_failed(e, peer)
    elif t.status == TOO_LONG:
        latch(&e.port, FAULT_LAYOUT, t.code, peer)
    elif t.status == WIRE_DOWN:
        latch(&e.port, FAULT_MPI, t.code, peer)


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
    add(&e.port.counters.broken, 1)
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
