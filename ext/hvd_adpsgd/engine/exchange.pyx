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

On one host MPI does not copy chunks: the snapshot is written into memory that the peer has mapped, and the
message says where. A lane alternates between two such buffers: while chunk c + LANES is written to one, the
peer may still read chunk c from the other. Its message about chunk c + LANES shows that it has merged chunk
c, so chunk c + 2 LANES may overwrite it. A last empty message shows that all chunks are merged.

An exchange whose peer is silent for `deadline_s` is parked: it keeps its buffers and is finished when
the peer answers, but another exchange may take its side.

In rounds the trainer says which peer to ask; an engine answers NO to an ASK of another round.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from mpi4py cimport libmpi as mpi

from hvd_adpsgd.engine.store cimport memory_merge, memory_nbytes, memory_snapshot
from hvd_adpsgd.engine.state cimport *
from hvd_adpsgd.engine.transport cimport (FAILURE_FATAL, FAILURE_LAYOUT, FAILURE_PEER, FAILURE_PENDING, TAG_CONTROL,
                                    Arrival, Failure, acknowledge_failures, classify, data_tag, let_go,
                                    post_receive, post_send, test)

cdef double CHECK_S = 1.0           # between queries for failed peers, also if no request reports one
RETRY_FIRST_S = 50e-6               # pause after a NO, doubled up to the last
cdef double RETRY_LAST_S = 2e-3


# ---- control messages ----------------------------------------------------------------------

cdef void listen(State* e) noexcept nogil:
    cdef int code = post_receive(&e.transport, &e.inbox, sizeof(Message), NOBODY, TAG_CONTROL,
                                 &e.inbox_request)
    if code != mpi.MPI_SUCCESS:
        handle_failure(e, code, NOBODY)


cdef void send_control(State* e, int peer, Kind kind, int exchange, int nchunks) noexcept nogil:
    cdef Outgoing* out = <Outgoing*>calloc(1, sizeof(Outgoing))
    cdef Generation* generation = &e.generations[e.ngenerations - 1]
    cdef int code
    if out == NULL:
        latch(e, FAULT_MEMORY, 0, peer)
        return
    out.message.kind = kind
    out.message.exchange = exchange
    out.message.nchunks = nchunks
    out.message.generation = e.ngenerations - 1
    out.message.fingerprint = generation.fingerprint
    out.message.weight = e.weight
    out.message.round = e.round
    code = post_send(&e.transport, &out.message, sizeof(Message), peer, TAG_CONTROL, &out.request)
    if code != mpi.MPI_SUCCESS:
        free(out)
        handle_failure(e, code, peer)
        return
    out.next = e.outgoing
    e.outgoing = out


cdef bint reap_outgoing(State* e) noexcept nogil:
    cdef Outgoing** link = &e.outgoing
    cdef Outgoing* out
    cdef bint done = False, moved = False
    while link[0] != NULL:
        out = link[0]
        test(&out.request, &done, NULL)
        if done:
            link[0] = out.next
            free(out)
            moved = True
        else:
            link = &out.next
    return moved


cdef bint read_inbox(State* e) noexcept nogil:
    cdef Arrival arrival
    cdef Message message
    cdef bint done = False
    cdef int code = test(&e.inbox_request, &done, &arrival)
    if code != mpi.MPI_SUCCESS:
        handle_failure(e, code, NOBODY)
        if e.inbox_request == mpi.MPI_REQUEST_NULL and e.fault != FAULT_MPI:
            listen(e)
        return True
    if not done:
        return False
    message = e.inbox
    listen(e)
    handle_control(e, arrival.source, &message)
    return True


cdef void handle_control(State* e, int peer, Message* m) noexcept nogil:
    if e.peers[peer] == FAILED:
        return                      # sent before it failed
    if e.peers[peer] == SUSPECT:
        set_peer(e, peer, ALIVE)
        e.exchanges[peer].moved = now()
    if m.kind == ASK:
        handle_ask(e, peer, m)
    elif m.kind == YES:
        handle_yes(e, peer, m)
    elif m.kind == NO:
        handle_no(e, peer, m)
    elif m.kind == BYE:
        e.left_broken[peer] = m.nchunks     # before set_peer tells the trainer: it reads both
        set_peer(e, peer, LEFT)
        e.farewells[peer] = 0
        send_control(e, peer, BYE_SEEN, 0, 0)
        dismiss(e, peer)
    elif m.kind == BYE_SEEN:
        e.farewells[peer] = 0
    elif m.kind == CUT:
        send_control(e, peer, CUT_SEEN, m.exchange, shorten(e, peer, m))
    elif m.kind == CUT_SEEN:
        shorten(e, peer, m)


cdef void dismiss(State* e, int peer) noexcept nogil:
    """A peer that left answers nothing more; what it sent before may still arrive."""
    cdef Exchange* x = &e.exchanges[peer]
    release_side(e, peer)
    if x.phase == ASKED:
        x.phase = IDLE
    elif x.phase == RUNNING:
        x.parked = True
        x.moved = now()


cdef void cut(State* e, int peer) noexcept nogil:
    """Request an early end of an exchange, for which there is no time."""
    cdef Exchange* x = &e.exchanges[peer]
    if x.phase == RUNNING and not x.cut:
        x.cut = x.held = True
        send_control(e, peer, CUT, x.number, x.next)


cdef int shorten(State* e, int peer, Message* m) noexcept nogil:
    """End after the chunks that either side has begun: each is merged on both sides, or on neither.

    If both sides request it, both come to the same number; a side that has finished keeps all chunks."""
    cdef Exchange* x = &e.exchanges[peer]
    if x.phase == RUNNING and x.number == m.exchange:
        x.nchunks = min(x.nchunks, max(m.nchunks, x.next))
        x.held = False
    return x.nchunks


cdef bint same_model(State* e, int peer, Message* m) noexcept nogil:
    """Whether both sides average the same tensors, with the same weight."""
    if m.weight != e.weight:
        latch(e, FAULT_WEIGHT, 0, peer)
        return False
    if m.generation < e.ngenerations and e.generations[m.generation].fingerprint != m.fingerprint:
        latch(e, FAULT_LAYOUT, 0, peer)
        return False
    return True


cdef void handle_ask(State* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = &e.exchanges[peer]
    cdef int mine = e.generations[e.ngenerations - 1].nchunks
    cdef bint crossed = x.phase == ASKED and e.transport.rank > peer
    if (not can_exchange(e) or m.round != e.round or e.serving != NOBODY
            or not (x.phase == IDLE or crossed)
            or not has_room(e, peer)
            or not same_model(e, peer, m)):
        e.counters.declined += 1
        send_control(e, peer, NO, m.exchange, 0)
        return
    if crossed and e.asking == peer:
        e.asking = NOBODY           # our own ASK will be answered with NO
    e.serving = peer
    send_control(e, peer, YES, m.exchange, min(m.nchunks, mine))
    if e.peers[peer] != FAILED:
        begin(e, peer, m.exchange, min(m.nchunks, mine), False)


cdef void handle_yes(State* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = &e.exchanges[peer]
    if x.phase != ASKED or x.number != m.exchange:
        return
    same_model(e, peer, m)
    e.retry_s = RETRY_FIRST_S
    begin(e, peer, m.exchange, m.nchunks, True)


cdef void handle_no(State* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = &e.exchanges[peer]
    if x.phase != ASKED or x.number != m.exchange:
        return
    x.phase = IDLE
    e.counters.refused += 1
    same_model(e, peer, m)          # a peer with another model always answers NO
    if e.asking == peer:
        e.asking = NOBODY
        e.ask_after = now() + e.retry_s
        e.retry_s = min(2 * e.retry_s, RETRY_LAST_S)


# ---- exchanges -----------------------------------------------------------------------------

cdef bint can_exchange(State* e) noexcept nogil:
    """Whether this super learner may take part in a new exchange."""
    return e.step >= 0 and e.fit and not e.paused and not e.leaving and e.fault == FAULT_NONE


cdef char* take_buffers(State* e) noexcept nogil:
    cdef int i
    cdef char* buffers
    for i in range(SPARES):
        if e.spares[i] != NULL:
            buffers = e.spares[i]
            e.spares[i] = NULL
            return buffers
    return <char*>malloc(3 * LANES * e.lane_nbytes)


cdef void return_buffers(State* e, Exchange* x) noexcept nogil:
    cdef int i
    cdef char* buffers = x.buffers
    x.buffers = NULL
    if x.set != NOBODY:
        e.taken[x.set] = False
        x.set = NOBODY
    for i in range(SPARES):
        if e.spares[i] == NULL:
            e.spares[i] = buffers
            return
    free(buffers)


cdef bint has_room(State* e, int peer) noexcept nogil:
    """Whether there are buffers for an exchange with `peer`, and for one more on our other side.

    An unanswered ASK counts as an exchange, for a silent peer may still answer YES."""
    cdef int i, room = 0
    if e.mapped[peer] == NULL:
        return True
    for i in range(SETS):
        room += not e.taken[i]
    for i in range(e.transport.size):
        room -= i != peer and e.exchanges[i].phase == ASKED and e.mapped[i] != NULL
    return room >= 2


cdef bint allocate(State* e, int peer) noexcept nogil:
    """Give an exchange its buffers."""
    cdef Exchange* x = &e.exchanges[peer]
    cdef int i
    x.set = NOBODY
    x.buffers = take_buffers(e)
    if x.buffers == NULL:
        return False
    for i in range(LANES):
        x.lanes[i].out = x.buffers + 3 * i * e.lane_nbytes
        x.lanes[i].inp = x.lanes[i].out + e.lane_nbytes
        x.lanes[i].keep = x.lanes[i].inp + e.lane_nbytes
        x.lanes[i].send_request = mpi.MPI_REQUEST_NULL
        x.lanes[i].receive_request = mpi.MPI_REQUEST_NULL
    x.last_send = mpi.MPI_REQUEST_NULL
    x.last_receive = mpi.MPI_REQUEST_NULL
    if e.mapped[peer] == NULL:
        return True
    for i in range(SETS):
        if not e.taken[i]:
            e.taken[i] = True
            x.set = i
            return True
    return False


cdef void begin(State* e, int peer, int number, int nchunks, bint active) noexcept nogil:
    cdef Exchange* x = &e.exchanges[peer]
    cdef int i
    if not allocate(e, peer):
        latch(e, FAULT_MEMORY, 0, peer)
        return
    for i in range(LANES):
        x.lanes[i].busy = False
    x.closing = x.cut = x.held = False
    x.phase = RUNNING
    x.active = active
    x.parked = active and e.asking != peer
    x.number = number
    x.nchunks = nchunks
    x.next = 0
    x.done = 0
    x.tag = data_tag(number, active == (e.transport.rank > peer))
    x.began = now()
    x.moved = x.began
    x.square = 0
    x.elements = 0
    x.nbytes = 0
    pthread_mutex_lock(&e.gate)
    e.credit = max(e.credit - 1.0, -2.0 * max(e.rate, 1.0))
    if active and e.wanted == peer:
        e.wanted = NOBODY
    pthread_mutex_unlock(&e.gate)


cdef bint start_lane(State* e, int peer) noexcept nogil:
    """Send the snapshot of the next chunk and post the receive of the peer's."""
    cdef Exchange* x = &e.exchanges[peer]
    cdef Lane* lane = &x.lanes[x.next % LANES]
    cdef int64_t nbytes
    cdef int code
    if x.next >= x.nchunks or lane.busy or x.held:
        return False
    nbytes = memory_nbytes(e.memory, x.next, e.wire)
    lane.chunk = x.next
    lane.busy = True
    lane.sent = False
    lane.received = False
    lane.merged = False
    lane.began = now()
    if not x.parked:
        # Before the snapshot: taken after it, a trainer in wait_fresh() could see no snapshot in flight
        # and go on, and max_staleness would be exceeded.
        store(&e.in_flight_step, min(load(&e.in_flight_step), e.step))
    if x.set != NOBODY:
        code = start_shared(e, x, lane, peer, nbytes)
    else:
        code = start_sent(e, x, lane, peer, nbytes)
    x.nbytes += 0 if lane.void else nbytes
    x.next += 1
    if code != mpi.MPI_SUCCESS:
        handle_failure(e, code, peer)
        return False
    return True


cdef int start_sent(State* e, Exchange* x, Lane* lane, int peer, int64_t nbytes) noexcept nogil:
    """Send the chunk itself."""
    cdef int code = post_receive(&e.transport, lane.inp, <int>nbytes, peer, x.tag,
                                 &lane.receive_request)
    if code != mpi.MPI_SUCCESS:
        return code
    lane.void = memory_snapshot(e.memory, lane.chunk, e.wire, e.offered_only, True, lane.out,
                                lane.keep, &lane.step)
    return post_send(&e.transport, lane.out, 0 if lane.void else <int>nbytes, peer, x.tag,
                     &lane.send_request)


cdef int start_shared(State* e, Exchange* x, Lane* lane, int peer,
                      int64_t nbytes) noexcept nogil:
    """Write the chunk to shared memory and send its place."""
    cdef int turn = (lane.chunk // LANES) % 2
    cdef int code = post_receive(&e.transport, &lane.there, sizeof(Place), peer, x.tag,
                                 &lane.receive_request)
    if code != mpi.MPI_SUCCESS:
        return code
    lane.here.offset = (2 * (x.set * LANES + lane.chunk % LANES) + turn) * e.lane_nbytes
    lane.out = e.shared + lane.here.offset
    lane.void = memory_snapshot(e.memory, lane.chunk, e.wire, e.offered_only, True, lane.out,
                                lane.keep, &lane.step)
    lane.here.nbytes = 0 if lane.void else nbytes
    return post_send(&e.transport, &lane.here, sizeof(Place), peer, x.tag, &lane.send_request)


cdef int open_place(State* e, int peer, Lane* lane) noexcept nogil:
    """Find the peer's chunk in its shared memory. Returns its size, 0 if it is out of bounds."""
    cdef int64_t last = e.shared_nbytes - e.lane_nbytes
    if lane.there.offset < 0 or lane.there.offset > last or not (
            0 <= lane.there.nbytes <= e.lane_nbytes):
        latch(e, FAULT_LAYOUT, 0, peer)
        return 0
    lane.inp = e.mapped[peer] + lane.there.offset
    return <int>lane.there.nbytes


cdef bint advance_lane(State* e, int peer, Lane* lane, Waits* waits) noexcept nogil:
    """Test a chunk once. Chunks are received and sent in order: none behind an incomplete one is tested."""
    cdef Exchange* x = &e.exchanges[peer]
    cdef Arrival arrival
    cdef bint done = False, moved = False
    cdef int code
    if not lane.received and not waits.receive:
        code = test(&lane.receive_request, &done, &arrival)
        if code != mpi.MPI_SUCCESS:
            handle_failure(e, code, peer)
            return True
        if done:
            lane.received = True
            moved = True
            if x.set != NOBODY:
                arrival.nbytes = open_place(e, peer, lane)
            e.counters.bytes_received += arrival.nbytes
            lane.nbytes = arrival.nbytes
        waits.receive = not done
    if lane.received and not lane.merged:
        lane.merged = merge_lane(e, peer, lane, lane.nbytes)
        x.moved = now()             # a held slot (store.pyx) is our delay, not the peer's silence
        moved |= lane.merged
    if not lane.sent and not waits.send:
        code = test(&lane.send_request, &lane.sent, NULL)
        if code != mpi.MPI_SUCCESS:
            handle_failure(e, code, peer)
            return True
        waits.send = not lane.sent
        moved |= lane.sent
    if lane.merged and lane.sent:
        lane.busy = False
        x.done += 1
    return moved


cdef bint merge_lane(State* e, int peer, Lane* lane, int nbytes) noexcept nogil:
    """correction += w (received - sent), unless one of the two snapshots is void.

    False if the open slot is held: try again later."""
    cdef Exchange* x = &e.exchanges[peer]
    cdef int64_t stale = max(e.step, lane.step) + 1 - lane.step  # the mirror may be ahead of the offer
    cdef double began, square
    if nbytes != 0 and nbytes != memory_nbytes(e.memory, lane.chunk, e.wire):
        latch(e, FAULT_LAYOUT, 0, peer)  # the two models have different chunks
        nbytes = 0
    if lane.void or nbytes == 0:
        e.counters.void_chunks += 1
        return True
    began = now()
    square = memory_merge(e.memory, lane.chunk, e.wire, e.weight, lane.inp, lane.keep)
    if square < 0:
        return False
    x.square += square
    pthread_mutex_lock(&e.memory.lock)      # the trainer may be adding chunks
    x.elements += e.memory.chunks[lane.chunk].count
    pthread_mutex_unlock(&e.memory.lock)
    e.counters.chunks += 1
    e.counters.staleness[max(0, min(stale, HISTOGRAM - 1))] += 1
    record(e, 2, peer, began, now(), nbytes, lane.step)
    return True


cdef bint advance(State* e, int peer) noexcept nogil:
    """Do what can be done now for the exchange with `peer`. True if anything was."""
    cdef Exchange* x = &e.exchanges[peer]
    cdef Waits waits = [False, False]
    cdef Lane* lane
    cdef bint moved = False
    cdef int i
    if x.phase == RUNNING:
        for i in range(LANES):              # oldest chunk first: its lane is the one x.next will take
            lane = &x.lanes[(x.next + i) % LANES]
            if lane.busy and x.phase == RUNNING:
                moved |= advance_lane(e, peer, lane, &waits)
        while x.phase == RUNNING and start_lane(e, peer):
            moved = True
        if x.phase == RUNNING and x.done == x.nchunks and closed(e, peer):
            finish(e, peer)
            return True
    if moved:
        x.moved = now()
        if e.peers[peer] == SUSPECT:
            set_peer(e, peer, ALIVE)
    elif e.peers[peer] == ALIVE and now() - x.moved > e.deadline_s:
        park(e, peer)                       # again, if it was parked and answered in between
    return moved


cdef bint under_way(State* e, int peer) noexcept nogil:
    """Whether there is an ASK or an exchange to wait for.

    A peer that left has sent all of its chunks, unless this side was silent then: wait while they arrive."""
    cdef Exchange* x = &e.exchanges[peer]
    if x.phase != ASKED and x.phase != RUNNING:
        return False
    return e.peers[peer] < LEFT or e.peers[peer] == LEFT and now() - x.moved <= e.deadline_s


cdef bint closed(State* e, int peer) noexcept nogil:
    """On a shared host: whether the peer has read all of our snapshots."""
    cdef Exchange* x = &e.exchanges[peer]
    cdef bint sent = False, received = False
    cdef int code
    if x.set == NOBODY:
        return True
    if not x.closing:
        x.closing = True
        code = post_receive(&e.transport, NULL, 0, peer, x.tag, &x.last_receive)
        if code == mpi.MPI_SUCCESS:
            code = post_send(&e.transport, NULL, 0, peer, x.tag, &x.last_send)
        if code != mpi.MPI_SUCCESS:
            handle_failure(e, code, peer)
            return False
    code = test(&x.last_receive, &received, NULL)
    if code == mpi.MPI_SUCCESS:
        code = test(&x.last_send, &sent, NULL)
    if code != mpi.MPI_SUCCESS:
        handle_failure(e, code, peer)
        return False
    return received and sent


cdef void park(State* e, int peer) noexcept nogil:
    """The exchange with a silent peer keeps its buffers and releases its side."""
    cdef Exchange* x = &e.exchanges[peer]
    x.parked = True
    release_side(e, peer)
    e.counters.parked += 1
    set_peer(e, peer, SUSPECT)
    record(e, 3, peer, x.began, now(), x.nbytes, e.step)


cdef void release_side(State* e, int peer) noexcept nogil:
    if e.asking == peer:
        e.asking = NOBODY
    if e.serving == peer:
        e.serving = NOBODY


cdef void finish(State* e, int peer) noexcept nogil:
    cdef Exchange* x = &e.exchanges[peer]
    cdef double ended = now()
    release_side(e, peer)
    if x.active:
        e.counters.exchanges_active += 1
    else:
        e.counters.exchanges_passive += 1
    e.counters.bytes_sent += x.nbytes
    e.counters.exchange_s += ended - x.began
    if x.elements:
        e.counters.compared += 1
        e.counters.square += x.square
        e.counters.square_elements += x.elements
        e.counters.last_square = x.square
    store(&e.met[peer], e.met[peer] + 1)
    record(e, 0 if x.active else 1, peer, x.began, ended, x.nbytes, e.step)
    return_buffers(e, x)
    x.phase = IDLE
    x.parked = False
    store(&e.finished, e.finished + 1)


cdef bint eligible(State* e, int peer) noexcept nogil:
    return (peer >= 0 and peer != e.transport.rank and e.peers[peer] == ALIVE
            and e.exchanges[peer].phase == IDLE and has_room(e, peer))


cdef int choose(State* e) noexcept nogil:
    """The next peer of the schedule that can be asked, or NOBODY."""
    cdef int64_t tries = min(e.schedule_length, 64)
    cdef int peer
    while tries > 0:
        peer = e.schedule[e.cursor % e.schedule_length]
        e.cursor += 1
        tries -= 1
        if eligible(e, peer):
            return peer
    return NOBODY


cdef bint due(State* e) noexcept nogil:
    """Is it time to ask? An explicit spec needs no credit."""
    if e.asking != NOBODY or not can_exchange(e) or now() < e.ask_after:
        return False
    if e.wanted != NOBODY:
        return eligible(e, e.wanted)
    return e.credit >= 1.0 - 1e-9 and e.schedule_length > 0


cdef bint ask_if_due(State* e) noexcept nogil:
    cdef Exchange* x
    cdef int peer
    if not due(e):
        return False
    peer = e.wanted if e.wanted != NOBODY else choose(e)
    if peer == NOBODY:
        e.ask_after = now() + RETRY_LAST_S
        return False
    x = &e.exchanges[peer]
    e.number = (e.number + 1) & 0x3FFFFFFF
    x.phase = ASKED
    x.parked = False
    x.active = True
    x.number = e.number
    x.began = now()
    x.moved = x.began
    e.asking = peer
    send_control(e, peer, ASK, e.number, e.generations[e.ngenerations - 1].nchunks)
    return True


# ---- failures ------------------------------------------------------------------------------

cdef void handle_failure(State* e, int code, int peer) noexcept nogil:
    """Classify an MPI error: a failed peer ends its exchange, any other error is a fault."""
    cdef Failure failure = classify(code)
    if failure == FAILURE_PEER or failure == FAILURE_PENDING:
        if peer != NOBODY and failure == FAILURE_PEER:
            mark_failed(e, peer)
        mark_failed_peers(e)
    elif failure == FAILURE_LAYOUT:
        latch(e, FAULT_LAYOUT, code, peer)
    elif failure == FAILURE_FATAL:
        latch(e, FAULT_MPI, code, peer)


cdef void mark_failed_peers(State* e) noexcept nogil:
    cdef int peer
    cdef char* failed = <char*>calloc(e.transport.size, 1)
    if failed == NULL:
        latch(e, FAULT_MEMORY, 0, NOBODY)
        return
    acknowledge_failures(&e.transport, failed)
    for peer in range(e.transport.size):
        if failed[peer]:
            mark_failed(e, peer)
    free(failed)


cdef void check_failures(State* e) noexcept nogil:
    """Ask MPI for failed peers once per second: waiting for an answer alone may raise no error."""
    cdef double t = now()
    if t > e.checked_at + CHECK_S:
        e.checked_at = t
        mark_failed_peers(e)


cdef void mark_failed(State* e, int peer) noexcept nogil:
    """The peer's process has failed. Its exchange keeps its buffers as long as MPI may write to them."""
    cdef Exchange* x = &e.exchanges[peer]
    cdef int i
    if e.peers[peer] == FAILED:
        return
    set_peer(e, peer, FAILED)
    e.farewells[peer] = 0
    release_side(e, peer)
    if x.phase == RUNNING:
        for i in range(LANES):
            if x.lanes[i].receive_request != mpi.MPI_REQUEST_NULL:
                mpi.MPI_Cancel(&x.lanes[i].receive_request)
        if x.last_receive != mpi.MPI_REQUEST_NULL:
            mpi.MPI_Cancel(&x.last_receive)
        e.counters.broken += 1
        x.phase = BROKEN
    elif x.phase == ASKED:
        x.phase = IDLE
    if x.phase == BROKEN and x.set != NOBODY:
        e.taken[x.set] = False      # MPI never had these addresses, and their reader has failed
        x.set = NOBODY


cdef bint retire(State* e, int peer) noexcept nogil:
    """Free the buffers of a broken exchange once MPI no longer uses them. True if freed."""
    cdef Exchange* x = &e.exchanges[peer]
    cdef bint free = let_go(&x.last_send) and let_go(&x.last_receive)
    cdef int i
    for i in range(LANES):
        free &= let_go(&x.lanes[i].send_request) and let_go(&x.lanes[i].receive_request)
        x.lanes[i].busy = False
    if not free:
        return False
    return_buffers(e, x)
    x.phase = IDLE
    x.parked = False
    return True
