"""The chunks of an exchange are sent, received and merged, LANES chunks in flight, each in a lane of its own.

On one host both sides let the other one read their models (store.pyx), and one side computes the difference for
both; the sides alternate from chunk to chunk:

    awaits                        compares
    ready ------------------->    write half of the difference of the two models into shared memory;
                                  merge it
    merge it     <------------    the place of the difference, and the step of the awaiting side's model

Every other lane of a side compares, and has one buffer for differences. A side is ready for a chunk when its lane is free, so it has merged the
difference that the peer's lane wrote before. A last empty message shows that all chunks are merged. Chunks of
parameters that were added later cannot be read in place: they go over the wire.

In few bits (codes.h) the same over the wire, whose bytes count there:

    offers                        answers
    snapshot in few bits ---->    difference of the two models, in as few; merge it
    merge it     <------------    the difference

If the peer's trainer changes a chunk while this side compares it, the comparison is repeated. Each buffer
begins with a stamp, which names exchange and chunk: a super learner that was stopped, and that its peers took
for failed, finds another stamp there, and stops with an error instead of merging another exchange's chunk.
"""

cdef struct Waits:          # whether an older chunk of the exchange still waits, for each kind of event
    bint receive            # ... for the peer's snapshot, or `ready`
    bint answer             # ... for the Place of a difference
    bint compare            # ... for a comparison
    bint send               # ... for the end of a send


# ---- all lanes ---------------------------------------------------------------------------

cdef bint advance_lanes(Core* e, Exchange* x) noexcept nogil:
    cdef Waits waits = [False, False, False, False]
    cdef Lane* lane
    cdef bint moved = start_lanes(e, x)
    cdef int i, next_one = x.next
    for i in range(LANES):                  # oldest chunk first: chunk `next_one` will take its lane
        lane = &x.lanes[(next_one + i) % LANES]
        if lane.busy and lane.index < next_one and x.phase == RUNNING:
            moved |= advance_lane(e, x, lane, &waits)
        moved |= start_lanes(e, x)          # at once: the peer may wait for these chunks
    return moved


cdef bint start_lanes(Core* e, Exchange* x) noexcept nogil:
    """Begin chunks while lanes are free. Return whether any was begun."""
    cdef bint started = False
    while x.phase == RUNNING and start_lane(e, x):
        started = True
    return started


cdef int64_t oldest_step(Exchange* x) noexcept nogil:
    """Return the step of the oldest snapshot in flight, NO_STEP if there is none."""
    cdef int64_t oldest = NO_STEP
    cdef int i
    for i in range(LANES):
        if x.lanes[i].busy and not x.lanes[i].received:
            oldest = min(oldest, x.lanes[i].step)
    return oldest


# ---- a chunk begins ----------------------------------------------------------------------

cdef bint start_lane(Core* e, Exchange* x) noexcept nogil:
    """Begin the next chunk: post its receive, and send a snapshot or `ready`.

    Return False if no chunk may begin now, or if a transfer could not be posted."""
    cdef Lane* lane = &x.lanes[x.next % LANES]
    cdef int64_t nbytes
    cdef bint good
    if x.next >= x.nchunks or x.next - x.done >= e.pairs.lanes or lane.busy or x.held:
        return False
    lane.index = x.next
    lane.chunk = chunk_of(x, x.next)
    nbytes = memory_nbytes(e.memory, lane.chunk, x.wire_format)
    lane.busy = True
    lane.sent = lane.received = lane.merged = lane.void = False
    lane.nbytes_sent = 0
    lane.way = way_of(e, x, lane)
    if lane.way == OFFERS or lane.way == ANSWERS:
        nbytes = 0                          # known when they are sent
    if not x.parked and not comes_second(lane):
        # Stored before the snapshot is taken: else a trainer in wait_fresh() could see no snapshot in flight
        # and make its next step, which would exceed max_staleness.
        store(&e.mailbox.in_flight_step, min(load(&e.mailbox.in_flight_step), e.mailbox.orders.step))
    if lane.way == SENT:
        good = start_sent(e, x, lane, nbytes)
    elif lane.way == OFFERS:
        good = start_offer(e, x, lane)
    elif lane.way == ANSWERS:
        good = start_answer(e, x, lane)
    else:
        good = start_direct(e, x, lane)
    x.nbytes += 0 if lane.void else nbytes
    x.next += 1
    return good


cdef Way way_of(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Return how a chunk is averaged: the same on both sides, or the two parts of one way."""
    cdef bint first = x.active == (lane.index % 2 == 0)
    if x.set == NOBODY and x.wire_format >= ADPSGD_DTYPES:    # by number too: each side is to offer each chunk now and then
        return OFFERS if first == (x.number % 2 == 0) else ANSWERS
    if x.set == NOBODY or lane.chunk >= e.memory.shown:
        return SENT
    return COMPARES if first else AWAITS


cdef inline bint comes_second(Lane* lane) noexcept nogil:
    """Whether this side sends nothing about a chunk before the peer has."""
    return lane.way == COMPARES or lane.way == ANSWERS


cdef inline bint comes_first(Lane* lane) noexcept nogil:
    """Whether this side waits for the peer's answer about a chunk."""
    return lane.way == AWAITS or lane.way == OFFERS


cdef bint start_sent(Core* e, Exchange* x, Lane* lane, int64_t nbytes) noexcept nogil:
    """Send the snapshot itself over the wire."""
    receive(e.wire, &lane.receiving, lane.inp, <int>nbytes, x.peer, x.channel)
    if not posted(e, x.peer, &lane.receiving):
        return False
    lane.void = memory_snapshot(e.memory, lane.chunk, x.wire_format, e.pairs.offered_only, lane.out, &lane.step)
    lane.nbytes_sent = 0 if lane.void else <int>nbytes
    send(e.wire, &lane.sending, lane.out, lane.nbytes_sent, x.peer, x.channel)
    return posted(e, x.peer, &lane.sending)


cdef bint start_offer(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Send the snapshot in few bits, and wait for the difference."""
    cdef int64_t nbytes
    receive(e.wire, &lane.receiving, lane.inp, <int>e.pairs.room, x.peer, x.answers)
    if not posted(e, x.peer, &lane.receiving):
        return False
    nbytes = memory_offer(e.memory, lane.chunk, x.wire_format, e.pairs.offered_only, lane.out, &lane.step)
    lane.void = nbytes == 0
    x.nbytes += nbytes
    lane.nbytes_sent = <int>nbytes
    send(e.wire, &lane.sending, lane.out, lane.nbytes_sent, x.peer, x.channel)
    return posted(e, x.peer, &lane.sending)


cdef bint start_answer(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Wait for the peer's snapshot in few bits."""
    lane.step = NO_STEP
    receive(e.wire, &lane.receiving, lane.inp, <int>e.pairs.room, x.peer, x.channel)
    return posted(e, x.peer, &lane.receiving)


cdef bint start_direct(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """COMPARES: wait until the peer is ready. AWAITS: send `ready`, and wait for the difference."""
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


cdef char* take_place(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Choose the buffer in our shared memory for a difference, write its stamp, and return the address behind it."""
    lane.here.offset = (x.set * LANES + lane.index % LANES) // 2 * (e.pairs.lane_nbytes + STAMP)
    store(<int64_t*>(e.pairs.shared + lane.here.offset), stamp_of(x, lane.chunk, True))
    fence()         # the stamp before the difference: a late reader of any part of that must find its stamp
    return e.pairs.shared + lane.here.offset + STAMP


cdef int64_t stamp_of(Exchange* x, int chunk, bint ours) noexcept nogil:
    """Return the stamp of a chunk, which differs from that of every other chunk in the same buffer."""
    return (<int64_t>x.number << 32) + 2 * <int64_t>chunk + (x.active == ours)


# ---- a chunk under way -------------------------------------------------------------------

cdef bint advance_lane(Core* e, Exchange* x, Lane* lane, Waits* waits) noexcept nogil:
    """Test the transfers of a chunk once, and merge it if possible. Return whether anything was done.

    Each channel delivers chunks in order, so no chunk behind an incomplete one is tested."""
    cdef bint moved = False
    cdef bint* earlier = &waits.answer if comes_first(lane) else &waits.receive
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
    if lane.received and not lane.merged and not (comes_second(lane) and waits.compare):
        lane.merged = merge_lane(e, x, lane)
        moved |= lane.merged
        if x.phase != RUNNING:
            return True
    if comes_second(lane) and not lane.merged:
        waits.compare = True
    elif not lane.sent and not waits.send:
        status = test_once(e.wire, &lane.sending)
        if status > DONE:
            transfer_failed(e, x.peer, &lane.sending)
            return True
        lane.sent = status == DONE
        waits.send = not lane.sent
        if lane.sent:
            add(&e.mailbox.counters.bytes_sent, lane.nbytes_sent)
        moved |= lane.sent
    if lane.merged and lane.sent:
        lane.busy = False
        x.done += 1
    return moved


cdef void note_received(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Process the peer's message about a chunk: a snapshot, the Place of a difference, or `ready`."""
    if lane.way == AWAITS:
        lane.nbytes = nbytes_at(e, x.peer, lane)
        lane.step = lane.there.step
    elif lane.way != COMPARES:
        lane.nbytes = lane.receiving.nbytes
        add(&e.mailbox.counters.bytes_received, lane.nbytes)


cdef int nbytes_at(Core* e, int peer, Lane* lane) noexcept nogil:
    """Return the bytes of the difference that the peer has written, 0 if its Place is out of bounds."""
    cdef int64_t last = e.pairs.shared_nbytes - e.pairs.lane_nbytes - STAMP
    if lane.there.offset < 0 or lane.there.offset > last or not (
            0 <= lane.there.nbytes <= e.pairs.lane_nbytes):
        latch(&e.mailbox, FAULT_LAYOUT, 0, peer)
        return 0
    return <int>lane.there.nbytes


# ---- merging -----------------------------------------------------------------------------

cdef bint stamped(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Whether shared memory still holds the peer's difference; else the peer has taken this engine for failed."""
    if load(<int64_t*>(mapped(e, x.peer) + lane.there.offset)) == stamp_of(x, lane.chunk, False):
        return True
    latch(&e.mailbox, FAULT_FENCED, 0, x.peer)
    return False


cdef bint merge_lane(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """correction += w (received - sent), unless one of the two snapshots is not finite.

    Return False if the merge must be tried again later."""
    cdef int nbytes = lane.nbytes
    cdef double square, began
    if lane.way == COMPARES:
        return compare(e, x, lane)
    if lane.way == OFFERS or lane.way == ANSWERS:
        merge_in_few_bits(e, x, lane)
        return True
    if nbytes != 0 and nbytes != memory_nbytes(e.memory, lane.chunk, x.wire_format):
        latch(&e.mailbox, FAULT_LAYOUT, 0, x.peer)     # the two models have different chunks
        nbytes = 0
    if lane.void or nbytes == 0 or lane.way == AWAITS and not stamped(e, x, lane):
        x.nbytes -= memory_nbytes(e.memory, lane.chunk, x.wire_format) if lane.way == AWAITS else 0
        leave_out(e, lane)
        return True
    began = now(e)
    if lane.way == AWAITS:
        square = memory_merge_half(e.memory, lane.chunk, x.wire_format, e.pairs.weight,
                                   mapped(e, x.peer) + lane.there.offset + STAMP)
        stamped(e, x, lane)
    else:
        square = memory_merge(e.memory, lane.chunk, x.wire_format, e.pairs.weight, lane.inp, lane.out)
    count_merge(e, x, lane, square, began)
    return True


cdef void merge_in_few_bits(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """OFFERS: merge the peer's answer. ANSWERS: compute the difference, merge it, and send it."""
    cdef double square = 0, began = now(e)
    cdef int64_t nbytes = lane.nbytes
    if nbytes != 0 and not memory_fits(e.memory, lane.chunk, x.wire_format, lane.inp, nbytes):
        latch(&e.mailbox, FAULT_LAYOUT, 0, x.peer)     # the two models have different chunks
        nbytes = 0
    if lane.way == ANSWERS:
        if nbytes != 0:
            nbytes = memory_answer(e.memory, lane.chunk, x.wire_format, e.pairs.offered_only, e.pairs.weight, lane.inp,
                                   nbytes, lane.out, &lane.step, &square)
        x.nbytes += nbytes
    elif nbytes != 0 and not lane.void:
        square = memory_merge_answer(e.memory, lane.chunk, x.wire_format, e.pairs.weight, lane.inp)
    if nbytes != 0 and not lane.void:
        count_merge(e, x, lane, square, began)
    else:
        leave_out(e, lane)
    if lane.way == ANSWERS:
        lane.nbytes_sent = <int>nbytes
        send(e.wire, &lane.sending, lane.out, lane.nbytes_sent, x.peer, x.answers)
        posted(e, x.peer, &lane.sending)


cdef void leave_out(Core* e, Lane* lane) noexcept nogil:
    memory_leave_out(e.memory, lane.chunk)
    note_distance(e, lane.chunk, 0)
    add(&e.mailbox.counters.void_chunks, 1)


cdef bint compare(Core* e, Exchange* x, Lane* lane) noexcept nogil:
    """Compute the difference for both sides, merge it, and send its Place.

    False: the peer's chunk is changing."""
    cdef int64_t nbytes = memory_nbytes(e.memory, lane.chunk, x.wire_format)
    cdef double square, began = now(e)
    cdef Compared found
    cdef char* near = x.buffers + 2 * LANES * e.pairs.room      # of all lanes: it stays in the caches
    found = memory_compare(e.memory, &e.pairs.neighbours[x.peer], lane.chunk, x.wire_format, e.pairs.offered_only,
                           e.pairs.weight, take_place(e, x, lane), near, &lane.step, &lane.here.step, &square)
    if found == CHANGING:
        e.pairs.changing = True
        return False
    lane.here.nbytes = lane.nbytes = <int>(nbytes if found == MERGED else 0)
    if found == MERGED:
        count_merge(e, x, lane, square, began)
    else:
        x.nbytes -= nbytes
        leave_out(e, lane)
    send(e.wire, &lane.sending, &lane.here, sizeof(Place), x.peer, x.answers)
    posted(e, x.peer, &lane.sending)
    return True


cdef void count_merge(Core* e, Exchange* x, Lane* lane, double square, double began) noexcept nogil:
    # the mirror may already be of a later step than the last offer
    cdef int64_t step = e.mailbox.orders.step
    cdef int64_t stale = max(step, lane.step) + 1 - lane.step
    cdef Event event = [EVENT_MERGED, x.peer, lane.chunk, x.number, x.active, square, began, now(e), lane.nbytes, lane.step]
    x.square += square * stands_for(x, lane.index)
    x.elements += memory_elements(e.memory, lane.chunk)
    note_distance(e, lane.chunk, square)
    add(&e.mailbox.counters.chunks, 1)
    if lane.way == COMPARES or lane.way == AWAITS:
        add(&e.mailbox.counters.bytes_shared, lane.nbytes)
    add(&e.mailbox.counters.staleness[max(0, min(stale, HISTOGRAM - 1))], 1)
    record(&e.mailbox, event)
