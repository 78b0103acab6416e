# cython: language_level=3
# Why compiled: it runs on the engine's thread, without the GIL.
"""The chunks of an exchange: eight at a time, each in a lane of its own, sent, received and merged.

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
"""

from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport *
from hvd_adpsgd.engine.pairs cimport mapped, posted, transfer_failed
from hvd_adpsgd.engine.mailbox cimport (EVENT_MERGED, FAULT_FENCED, FAULT_LAYOUT, HISTOGRAM, NO_STEP, Event, add, latch, load,
                                     record, store)
from hvd_adpsgd.engine.store cimport (CHANGING, MERGED, Compared, fence, memory_compare, memory_elements, memory_leave_out,
                                      memory_merge, memory_merge_half, memory_nbytes, memory_snapshot)
from hvd_adpsgd.engine.wire cimport DONE, NOBODY, PENDING, Status, receive, send, test_once

cdef struct Waits:          # whether an older chunk of an exchange is not received, not compared, or not sent
    bint receive
    bint answer             # ... where the difference is not received
    bint compare
    bint send


# ---- all lanes ---------------------------------------------------------------------------

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


cdef int64_t oldest_step(Exchange* x) noexcept nogil:
    """Step of the oldest snapshot that is on its way."""
    cdef int64_t oldest = NO_STEP
    cdef int i
    for i in range(LANES):
        if x.lanes[i].busy and not x.lanes[i].received:
            oldest = min(oldest, x.lanes[i].step)
    return oldest


# ---- a chunk begins ----------------------------------------------------------------------

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
    if not x.parked and lane.way != COMPARES:
        # Before the snapshot: taken after it, a trainer in wait_fresh() could see no snapshot in flight
        # and make its next step, and max_staleness would be exceeded.
        store(&e.mailbox.in_flight_step, min(load(&e.mailbox.in_flight_step), e.mailbox.orders.step))
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
    if e.pairs.neighbours[x.peer].lives == NULL or lane.chunk >= e.memory.shown:
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


cdef bint start_direct(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Wait until the peer is ready; or be, and wait for the difference."""
    lane.step = NO_STEP if lane.way == COMPARES else e.mailbox.orders.step
    receive(e.wire, &lane.receiving, &lane.there, sizeof(Place), x.peer, x.channel if lane.way == COMPARES else x.answers)
    if not posted(e, x.peer, &lane.receiving):
        return False
    if lane.way == COMPARES:
        return True
    lane.here.offset = lane.here.nbytes = 0
    lane.here.step = NO_STEP
    send(e.wire, &lane.sending, &lane.here, sizeof(Place), x.peer, x.channel)
    return posted(e, x.peer, &lane.sending)


cdef void take_place(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Where in our shared memory the chunk goes, stamped."""
    cdef int turn = (lane.index // LANES) % 2
    lane.here.offset = (2 * (x.set * LANES + lane.index % LANES) + turn) * (e.pairs.lane_nbytes + STAMP)
    lane.out = e.pairs.shared + lane.here.offset
    store(<int64_t*>lane.out, stamp_of(x, lane.chunk, True))
    fence()         # before the chunk, past the caches: a late reader that finds part of it must find its stamp


cdef int64_t stamp_of(Exchange* x, int chunk, bint ours) noexcept nogil:
    """Tells one chunk of one exchange from every other in the same buffer."""
    return (<int64_t>x.number << 32) + 2 * <int64_t>chunk + (x.active == ours)


# ---- a chunk under way -------------------------------------------------------------------

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
    add(&e.mailbox.counters.bytes_received, lane.nbytes)


cdef int open_place(Core* e, int peer, Lane* lane) noexcept nogil:
    """Find the peer's chunk in its shared memory. Returns its size, 0 if it is out of bounds."""
    cdef int64_t last = e.pairs.shared_nbytes - e.pairs.lane_nbytes - STAMP
    if lane.there.offset < 0 or lane.there.offset > last or not (
            0 <= lane.there.nbytes <= e.pairs.lane_nbytes):
        latch(&e.mailbox, FAULT_LAYOUT, 0, peer)
        return 0
    lane.inp = mapped(e, peer) + lane.there.offset + STAMP
    return <int>lane.there.nbytes


# ---- merging -----------------------------------------------------------------------------

cdef bint stamped(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Whether shared memory still holds the peer's chunk; else the peer took us for failed."""
    if x.set == NOBODY or load(<int64_t*>(lane.inp - STAMP)) == stamp_of(x, lane.chunk, False):
        return True
    latch(&e.mailbox, FAULT_FENCED, 0, x.peer)
    return False


cdef bint merge_lane(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """correction += w (received - sent), unless one of the two snapshots is void. False if it cannot be done yet."""
    cdef int nbytes = lane.nbytes
    cdef double square, began
    if lane.way == COMPARES:
        return compare(e, x, lane)
    if nbytes != 0 and nbytes != memory_nbytes(e.memory, lane.chunk, e.pairs.wire_type):
        latch(&e.mailbox, FAULT_LAYOUT, 0, x.peer)     # the two models have different chunks
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
    add(&e.mailbox.counters.void_chunks, 1)


cdef bint compare(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Compute the difference for both sides, merge it, and send its place. False if the peer's chunk is changing."""
    cdef int64_t nbytes = memory_nbytes(e.memory, lane.chunk, e.pairs.wire_type)
    cdef double square, began = now(e)
    cdef Compared found
    take_place(e, x, lane)
    found = memory_compare(e.memory, &e.pairs.neighbours[x.peer], lane.chunk, e.pairs.wire_type, e.pairs.offered_only,
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
    add(&e.mailbox.counters.bytes_received, lane.nbytes)
    send(e.wire, &lane.sending, &lane.here, sizeof(Place), x.peer, x.answers)
    posted(e, x.peer, &lane.sending)
    return True


cdef void count_merge(Core* e, Exchange* x, Lane* lane, double square, double began) noexcept nogil:
    # the mirror may be ahead of the offer
    cdef int64_t step = e.mailbox.orders.step
    cdef int64_t stale = max(step, lane.step) + 1 - lane.step
    cdef Event event = [EVENT_MERGED, x.peer, lane.chunk, x.number, x.active, square, began, now(e), lane.nbytes, lane.step]
    x.square += square
    x.elements += memory_elements(e.memory, lane.chunk)
    add(&e.mailbox.counters.chunks, 1)
    add(&e.mailbox.counters.staleness[max(0, min(stale, HISTOGRAM - 1))], 1)
    record(&e.mailbox, event)
