"""Pairwise exchanges: how an engine asks a peer, answers an ASK, and runs an exchange to its end.

    active side                   passive side
    ASK   ------------------->    (is its side free, its model finite, and does it stay?)
          <-------------------    YES, or NO: ask another peer
    chunk 0 <-> chunk 0           both send a snapshot and merge half of the difference (lanes.pxi)
    ...                           (weight w: w times the difference)

Every engine answers while it waits, so a cycle of ASKs cannot deadlock. A super learner is the active
side of at most one exchange and the passive side of at most one; two peers have at most one exchange
between them. If two peers ask each other, the lower rank's ASK stands.

An exchange whose peer is silent for `deadline_s` (or as long as a large chunk takes on a slow link) is
parked: it keeps its buffers and is finished when the peer answers, but another exchange may take its side.

With rounds the trainer chooses the peer to ask; an engine answers NO to an ASK of another round.
"""

cdef enum:
    EXCHANGE_NUMBERS = 4096 # exchange numbers with channels of their own: a quarter of DATA_CHANNELS

cdef double RETRY_LAST_S = 2e-3     # longest pause after a NO
cdef double SLOWEST_LINK = 1.25e6   # bytes/s (10 Mb/s), assumed for the longest time that a chunk takes


# ---- control messages --------------------------------------------------------------------

cdef void handle_control(Core* e, int peer, Message* m) noexcept nogil:
    """Act on a control message.

    A message that a peer sent before it failed needs no check of its own: an ASK gets a NO, other messages
    find no exchange with that peer, and the peer stays FAILED."""
    answers_again(e, peer)
    if m.kind == ASK:
        handle_ask(e, peer, m)
    elif m.kind == YES:
        handle_yes(e, peer, m)
    elif m.kind == NO:
        handle_no(e, peer, m)
    elif m.kind == BYE:
        handle_bye(e, peer, m)
    elif m.kind == BYE_SEEN:
        e.membership.answered[peer] = True
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


cdef void handle_bye(Core* e, int peer, Message* m) noexcept nogil:
    note_departure(&e.membership, peer, m.exchange)
    dismiss(e, peer)
    send_control(e, peer, BYE_SEEN, 0, 0)


cdef void dismiss(Core* e, int peer) noexcept nogil:
    """End or park the exchange with a peer that has left: its earlier messages may still arrive."""
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
    """Ask the peer for an early end of an exchange, because this engine leaves soon."""
    if x.phase == RUNNING and not x.cut:
        x.cut = x.held = True
        send_control(e, x.peer, CUT, x.number, x.next)


cdef void handle_cut(Core* e, int peer, Message* m) noexcept nogil:
    """Answer CUT with the number of chunks to which the exchange is shortened.

    If this side has finished the exchange, it has merged all chunks of which it knew: the peer's number
    stands."""
    cdef Exchange* x = shorten(e, peer, m)
    send_control(e, peer, CUT_SEEN, m.exchange, m.nchunks if x == NULL else x.nchunks)


cdef Exchange* shorten(Core* e, int peer, Message* m) noexcept nogil:
    """Shorten an exchange to the chunks that either side has begun, so that no merge is one-sided.

    If both sides send CUT, both compute the same number; a side that has finished keeps all chunks.
    Return the exchange, NULL if it is over."""
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
        latch(&e.mailbox, FAULT_WEIGHT, 0, peer)
        return False
    if not same_layout(e, m):
        latch(&e.mailbox, FAULT_LAYOUT, 0, peer)
        return False
    return True


cdef bint serves(Core* e, int peer, Exchange* x, Message* m) noexcept nogil:
    """Whether this side answers YES to an ASK; x: its exchange with that peer, or NULL."""
    cdef bint crossed = x != NULL and x.phase == ASKED and e.wire.rank > peer
    return (can_exchange(e, &e.mailbox.orders) and e.membership.states[peer] < LEFT
            and m.round == e.mailbox.orders.round and e.pairs.serving == NOBODY
            and (x == NULL or crossed) and has_room(e, peer) and same_model(e, peer, m))


cdef inline int fewer_bits(int wire_format, int other) noexcept nogil:
    """Return of two sides' formats the one of fewer bits."""
    if other == ADPSGD_OWN or wire_format != ADPSGD_OWN and adpsgd_codes_bits(wire_format) <= adpsgd_codes_bits(other):
        return wire_format
    return other


cdef void handle_ask(Core* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = find(e, peer)
    cdef int total = min(m.nchunks, generation(e).nchunks), window
    if not serves(e, peer, x, m):
        add(&e.mailbox.counters.declined, 1)
        send_no(e, peer, m)
        return
    if x != NULL and e.pairs.asking == peer:
        e.pairs.asking = NOBODY     # the peer will answer our own ASK with NO
    if x == NULL:
        x = enlist(e, peer)
    if x == NULL:
        return
    e.pairs.serving = peer
    x.number, x.first, x.aimed = m.exchange, m.first, m.aimed
    x.wire_format = fewer_bits(m.wire_format, e.mailbox.orders.wire_format)
    window = min(m.window, window_of(e, total))
    send_window(e, peer, YES, x, total, window, m.generation)
    begin(e, x, m.exchange, total, window, False)


cdef void handle_yes(Core* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = find(e, peer)
    if x == NULL or x.phase != ASKED or x.number != m.exchange:
        return
    if not same_model(e, peer, m):  # the peer lacked the layout of our ASK; without chunks of ours it merges none
        give_up_ask(e, x)
        send_no(e, peer, m)
        return
    e.pairs.retry_s = RETRY_FIRST_S
    move_on(e, m.nchunks, x, m.window)
    x.wire_format = m.wire_format
    begin(e, x, m.exchange, m.nchunks, m.window, True)


cdef void handle_no(Core* e, int peer, Message* m) noexcept nogil:
    cdef Exchange* x = find(e, peer)
    cdef Pairs* p = &e.pairs
    cdef bint same = same_model(e, peer, m)     # a peer with another model answers NO, also to our YES
    if x == NULL or x.phase != ASKED or x.number != m.exchange:
        return
    add(&e.mailbox.counters.refused, 1)
    if give_up_ask(e, x):
        p.ask_after = now(e) + p.retry_s
        p.retry_s = min(2 * p.retry_s, RETRY_LAST_S)
    if not same:
        send_no(e, peer, m)


cdef bint give_up_ask(Core* e, Exchange* x) noexcept nogil:
    """End an exchange that has not begun. Return whether its ASK was the last one of this side."""
    cdef bint last = e.pairs.asking == x.peer
    become(e, x, IDLE)
    if last:
        e.pairs.asking = NOBODY
    return last


# ---- an exchange -------------------------------------------------------------------------

cdef bint can_exchange(Core* e, Orders* orders) noexcept nogil:
    """Whether this super learner may take part in a new exchange."""
    return (orders.step >= 0 and orders.fit and not orders.paused and not orders.leaving
            and e.mailbox.fault == FAULT_NONE)


cdef int channel_of(int number, bint upper_asks) noexcept nogil:
    """Return the channel for the chunks of one exchange.

    Of two peers at most one asks at a time, so the asker's exchange number, and which of the two ranks asked,
    name an exchange."""
    return DATA + 4 * (number % EXCHANGE_NUMBERS) + (1 if upper_asks else 0)


cdef void begin(Core* e, Exchange* x, int number, int total, int window, bint active) noexcept nogil:
    cdef int i
    if not allocate(e, x):
        latch(&e.mailbox, FAULT_MEMORY, 0, x.peer)
        return
    become(e, x, RUNNING)
    for i in range(LANES):
        x.lanes[i].busy = False
    x.cut = x.held = False
    x.active = active
    x.parked = active and e.pairs.asking != x.peer
    x.number = number
    open_window(e, x, total, window)
    x.next = 0
    x.done = 0
    x.channel = channel_of(number, active == (e.wire.rank > x.peer))
    x.answers = x.channel + 2
    x.began = now(e)
    x.moved = x.began
    x.square = 0
    x.elements = 0
    x.nbytes = 0
    spend_credit(&e.mailbox, x.peer if active else NOBODY)


cdef bint advance_pairs(Core* e) noexcept nogil:
    """Advance all exchanges as far as possible without waiting. Return whether anything was done.

    Also publishes the step of the oldest snapshot in flight, for the trainer."""
    cdef Exchange* x = e.pairs.running
    cdef bint moved = False, busy = False
    cdef int64_t oldest = NO_STEP
    e.pairs.changing = False
    while x != NULL:
        if x.phase == BROKEN:
            moved |= retire(e, x)
        elif x.phase != IDLE and not rests(e, x):
            moved |= advance(e, x)
        if x.phase == RUNNING and not x.parked:
            oldest = min(oldest, oldest_step(x))
            busy = True
        x = x.next_one
    sweep(&e.pairs)
    keep_busy(e, busy)
    store(&e.mailbox.in_flight_step, oldest)
    return moved


cdef void keep_busy(Core* e, bint busy) noexcept nogil:
    """Count the time in which exchanges run; that of a long one as it passes, for the trainer."""
    cdef double t
    if busy or e.pairs.busy_from > 0:
        t = now(e)
        if e.pairs.busy_from > 0:
            add_double(&e.mailbox.counters.busy_s, t - e.pairs.busy_from)
        e.pairs.busy_from = t if busy else 0


cdef bint advance(Core* e, Exchange* x) noexcept nogil:
    """Advance one exchange as far as possible without waiting. Return whether anything was done."""
    cdef bint over, moved
    x.heard = False
    moved = advance_lanes(e, x) if x.phase == RUNNING else False
    if x.phase == RUNNING and x.done == x.nchunks:
        close(e, x)
    over = x.phase == CLOSING and closed(e, x)
    if moved or over:
        x.moved = now(e)
    if x.heard or over:         # only received messages prove that the peer lives, except at the end of the
        answers_again(e, x.peer)    # exchange: then the peer need not send anything more
    elif e.membership.states[x.peer] == ALIVE and now(e) - x.moved > patience(e):
        park(e, x)                          # also if it was parked before, and the peer answered since
    if over:
        finish(e, x)
    return moved or over


cdef inline double patience(Core* e) noexcept nogil:
    """Return for how many seconds a peer may be silent before its exchange is parked.

    At least as long as one chunk takes on a slow link, because a chunk counts only when all of it has
    arrived."""
    return max(e.pairs.deadline_s, e.pairs.lane_nbytes / SLOWEST_LINK)


cdef bint under_way(Core* e, Exchange* x) noexcept nogil:
    """Whether this side waits for the answer to an ASK, or for an exchange to end.

    A peer that left has sent all of its chunks, unless this side was silent at that time: wait while they
    arrive."""
    cdef int state = e.membership.states[x.peer]
    if x.phase == IDLE or x.phase == BROKEN:
        return False
    return state < LEFT or state == LEFT and now(e) - x.moved <= patience(e)


cdef bint rests(Core* e, Exchange* x) noexcept nogil:
    """Whether a pause suspends this exchange: the pause began without waiting for it, and is not over.

    Else a late chunk could be merged after this side's contribution to a mean and before that mean replaces
    the model."""
    return e.mailbox.orders.paused and not e.mailbox.orders.leaving and not under_way(e, x)


cdef bint any_under_way(Core* e) noexcept nogil:
    cdef Exchange* x = e.pairs.running
    while x != NULL:
        if under_way(e, x):
            return True
        x = x.next_one
    return False


cdef void close(Core* e, Exchange* x) noexcept nogil:
    """Enter CLOSING: this side has merged all chunks.

    With shared memory, wait until the peer has read ours."""
    become(e, x, CLOSING)
    if x.set == NOBODY:
        return
    receive(e.wire, &x.last_receiving, NULL, 0, x.peer, x.channel)
    if posted(e, x.peer, &x.last_receiving):
        send(e.wire, &x.last_sending, NULL, 0, x.peer, x.channel)
        posted(e, x.peer, &x.last_sending)


cdef bint closed(Core* e, Exchange* x) noexcept nogil:
    """Whether the exchange may end; with shared memory, whether the peer has read all of our snapshots."""
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
    """Park an exchange with a silent peer: it keeps its buffers, but another exchange may take its side."""
    cdef Event event = [EVENT_PARKED, x.peer, -1, x.number, x.active, 0, x.began, now(e), x.nbytes,
                        e.mailbox.orders.step]
    x.parked = True
    release_side(e, x.peer)
    add(&e.mailbox.counters.parked, 1)
    set_peer(&e.membership, x.peer, SUSPECT)
    record(&e.mailbox, event)


cdef double of_whole_model(Core* e, Exchange* x) noexcept nogil:
    """Return the elements of a whole exchange divided by those of this one; 1 if it was to be whole."""
    return 1.0 if x.whole else turn_elements(e, x) / x.elements


cdef void note_pace(Core* e, Exchange* x, double seconds) noexcept nogil:
    """Count what an exchange has used of our link, and how fast its peer is.

    A peer behind a slow link lengthens an exchange as a slow link of ours does. But ours lengthens all of them:
    an exchange counts at most twice as much per byte as the one before over the link. An exchange through shared
    memory uses no link, and does not count."""
    cdef Pairs* p = &e.pairs
    cdef double each
    if x.nbytes == 0 or x.set != NOBODY:
        return
    each = seconds / x.nbytes
    p.pace = min(each, 2 * p.pace) if p.pace > 0 else each
    add_double(&e.mailbox.counters.link_s, p.pace * x.nbytes)
    note_speed(e, x.peer, each)


cdef void finish(Core* e, Exchange* x) noexcept nogil:
    cdef double square, ended = now(e)
    cdef Event event = [EVENT_ASKED if x.active else EVENT_SERVED, x.peer, -1, x.number, x.active, 0, x.began,
                        ended, x.nbytes, e.mailbox.orders.step]
    release_side(e, x.peer)
    if x.active:
        add(&e.mailbox.counters.exchanges_active, 1)
    else:
        add(&e.mailbox.counters.exchanges_passive, 1)
    add_double(&e.mailbox.counters.exchange_s, ended - x.began)
    note_pace(e, x, ended - x.began)
    if x.elements and not x.aimed:
        add(&e.mailbox.counters.compared, 1)
        square = x.square * of_whole_model(e, x)
        add_double(&e.mailbox.counters.square, square)
        add(&e.mailbox.counters.square_elements, x.elements)
        store_double(&e.mailbox.counters.last_square, square)
    add(count_of(&e.mailbox, MET, x.peer), 1)
    record(&e.mailbox, event)
    return_buffers(&e.pairs, x)
    become(e, x, IDLE)
    store(&e.mailbox.finished, e.mailbox.finished + 1)


# ---- asking ------------------------------------------------------------------------------

cdef bint due(Core* e, Orders* orders) noexcept nogil:
    """Whether to ask a peer now."""
    return wants_to_ask(e, orders) and now(e) >= e.pairs.ask_after


cdef bint wants_to_ask(Core* e, Orders* orders) noexcept nogil:
    """Whether to ask a peer as soon as `ask_after` is over: the credit suffices, or the trainer has named a peer."""
    if e.pairs.asking != NOBODY or not can_exchange(e, orders):
        return False
    if orders.wanted != NOBODY:
        return eligible(e, orders.wanted)
    return orders.credit >= 1.0 - 1e-9 and e.pairs.schedule_length > 0


cdef bint ask_if_due(Core* e) noexcept nogil:
    cdef Exchange* x
    cdef Pairs* p = &e.pairs
    cdef int peer = e.mailbox.orders.wanted, total
    if not due(e, &e.mailbox.orders):
        return False
    peer = peer if peer != NOBODY else choose(e)
    x = enlist(e, peer) if peer != NOBODY else NULL
    p.nobody = x == NULL
    if x == NULL:
        p.ask_after = now(e) + RETRY_LAST_S
        return False
    p.number = (p.number + 1) & 0x3FFFFFFF
    total = generation(e).nchunks
    x.first, x.aimed = next_first(e, total), e.pairs.aimed > 0
    x.wire_format = e.mailbox.orders.wire_format
    become(e, x, ASKED)
    x.active = True
    x.number = p.number
    p.asking = peer
    send_window(e, peer, ASK, x, total, window_of(e, total), NEWEST)
    return True
