"""Control messages of an engine: one posted receive from any peer, and the sends that are not complete.

Reports share the channel of control messages, so that the same receive takes them. A report that an engine is
sending or receiving while it leaves may be lost."""

cdef enum:
    NEWEST = 0x7FFFFFFF     # a message names our newest layout


cdef bint open_control(Control* c) noexcept:
    c.inbox = <Message*>calloc(1, sizeof(Parcel))
    c.taken = <Message*>calloc(1, sizeof(Parcel))
    return c.inbox != NULL and c.taken != NULL


cdef void close_control(Control* c) noexcept:
    """Free the buffers; not the inbox while the wire still uses it for the posted receive."""
    if not c.listening.in_use:
        free(c.inbox)
    free(c.taken)


cdef void listen(Core* e) noexcept nogil:
    cdef Control* c = &e.control
    if receive(e.wire, &c.listening, c.inbox, sizeof(Parcel), NOBODY, CONTROL) == WIRE_DOWN:
        latch(&e.mailbox, FAULT_MPI, c.listening.code, NOBODY)


cdef Message* take_message(Core* e, int* peer) noexcept nogil:
    """Return the next message about exchanges or departures, valid until the next call; NULL if none.

    Reports that arrived before it are stored, and malformed messages are ignored. Neither counts as work, so
    an idle engine keeps its long sleep."""
    cdef Message* message = next_message(e, peer)
    while message != NULL and (message.kind == REPORT or message.kind == NONE):
        message = next_message(e, peer)
    return message


cdef Message* next_message(Core* e, int* peer) noexcept nogil:
    cdef Control* c = &e.control
    cdef Status status
    if e.mailbox.fault == FAULT_MPI:
        return NULL
    if not c.listening.in_use:              # a peer's failure has ended the receive
        listen(e)
    status = test_once(e.wire, &c.listening)
    if status == PENDING:
        return NULL
    if status == WIRE_DOWN:
        latch(&e.mailbox, FAULT_MPI, c.listening.code, NOBODY)
    if status != DONE and status != TOO_LONG:
        return NULL
    peer[0] = c.listening.peer
    if status == DONE and is_sound(e, c.inbox, c.listening.nbytes):
        memcpy(c.taken, c.inbox, c.listening.nbytes)
    else:
        c.taken.kind = NONE
        note_malformed(e, peer[0])
    if c.taken.kind == REPORT:
        take_reports(e)
    listen(e)
    return c.taken


cdef bint is_sound(Core* e, const Message* m, int64_t nbytes) noexcept nogil:
    """Whether a message is one that engines send: other fields could address memory outside of the model."""
    cdef int64_t behind = nbytes - <int64_t>sizeof(Message)
    if behind < 0 or not 0 <= m.weight <= 1 or m.exchange < 0 or m.nchunks < 0 or m.first < 0 or m.generation < 0:
        return False
    if not 0 <= m.window <= m.nchunks or not 0 <= m.aimed <= 1:
        return False
    if (m.kind == ASK or m.kind == YES) and not may_have(&e.pairs, m.wire_format):
        return False
    if m.kind == REPORT:
        return 0 < m.nchunks <= REPORTS and behind == m.nchunks * <int64_t>sizeof(Report)
    if m.kind == BYE and m.exchange > 1:
        return False
    if m.kind == YES and same_layout(e, m) and (
            m.nchunks > generation(e).nchunks or m.window > layout_of(e, m.nchunks).turn):
        return False
    return ASK <= m.kind <= CUT_SEEN and behind == 0


cdef bint may_have(Pairs* p, int wire_format) noexcept nogil:
    """Whether exchanges of this engine may have a format."""
    if not p.chooses_format:
        return wire_format == p.wire_format
    return wire_format == ADPSGD_OWN or wire_format != ADPSGD_INT16 and adpsgd_codes_bits(wire_format) != 0


cdef void note_malformed(Core* e, int peer) noexcept nogil:
    """Count a malformed message of a peer, for the trainer; the message itself is ignored."""
    store(&e.mailbox.counters.malformed_from, peer)
    add(&e.mailbox.counters.malformed, 1)


cdef void take_reports(Core* e) noexcept nogil:
    """Store the reports of the REPORT that has arrived.

    A newer report proves to the wire that its peer lives."""
    cdef Parcel* parcel = <Parcel*>e.control.taken
    cdef int i
    for i in range(parcel.message.nchunks):
        if note_report(&e.reports, &e.mailbox, &parcel.reports[i], now(e)) and e.wire.lives != NULL:
            e.wire.lives(e.wire, parcel.reports[i].rank)


cdef bint same_layout(Core* e, const Message* m) noexcept nogil:
    """Whether the layout that a message names is ours, too; also if this side has no layout of that generation."""
    return m.generation >= load(&e.ngenerations) or e.generations[m.generation].fingerprint == m.fingerprint


cdef Message* written(Core* e, Message* message, Kind kind, int exchange, int nchunks,
                      int64_t generation=NEWEST) noexcept nogil:
    """Write a message that names our layout of that generation, or the newest one before it.

    ASK names the newest one, and YES and NO one that the receiver has, too: so it can always compare."""
    cdef int64_t named = min(generation, load(&e.ngenerations) - 1)
    message.kind = kind
    message.exchange = exchange
    message.nchunks = nchunks
    message.first = 0
    message.window = message.aimed = 0
    message.wire_format = ADPSGD_OWN
    message.generation = <int>named
    message.fingerprint = e.generations[named].fingerprint
    message.weight = e.pairs.weight
    message.round = e.mailbox.orders.round
    return message


cdef void send_control(Core* e, int peer, Kind kind, int exchange, int nchunks) noexcept nogil:
    """Send a control message.

    To a peer that has failed nothing is sent; the wire reports it (next_failed)."""
    cdef Letter* letter = new_letter(e, peer, sizeof(Message))
    if letter == NULL:
        return
    written(e, <Message*>(letter + 1), kind, exchange, nchunks)
    post(e, letter, sizeof(Message), peer)


cdef void send_no(Core* e, int peer, const Message* m) noexcept nogil:
    """Send NO to an ASK, or to an answer that names another layout than ours.

    It names a layout that the peer has, so that the peer compares: the newest one of ours may be none of its."""
    cdef Letter* letter = new_letter(e, peer, sizeof(Message))
    if letter == NULL:
        return
    written(e, <Message*>(letter + 1), NO, m.exchange, 0, m.generation)
    post(e, letter, sizeof(Message), peer)


cdef void send_window(Core* e, int peer, Kind kind, Exchange* x, int nchunks, int window, int64_t generation) noexcept nogil:
    """Send ASK or YES: of the model's `nchunks` chunks, those of a window of `window` chunks from x.first on.

    The message names a layout as in `written`."""
    cdef Letter* letter = new_letter(e, peer, sizeof(Message))
    cdef Message* message
    if letter == NULL:
        return
    message = written(e, <Message*>(letter + 1), kind, x.number, nchunks, generation)
    message.first, message.window, message.aimed, message.wire_format = x.first, window, x.aimed, x.wire_format
    post(e, letter, sizeof(Message), peer)


cdef void tell_reports(Core* e) noexcept nogil:
    """Send the newest reports to a random peer, every `every_s` seconds.

    A peer to which a control message is still being sent is skipped, so an unreachable one holds one message
    only."""
    cdef Reports* r = &e.reports
    cdef int peer
    if r.known == NULL or e.mailbox.orders.leaving or now(e) < r.next_at:
        return
    r.next_at = now(e) + r.every_s
    peer = choose_listener(r, &e.membership)
    if peer != NOBODY and not is_written_to(e, peer):
        send_reports(e, peer)


cdef bint is_written_to(Core* e, int peer) noexcept nogil:
    """Whether a control message is still being sent to a peer."""
    cdef Letter* letter = e.control.outgoing
    while letter != NULL and letter.transfer.peer != peer:
        letter = letter.next_one
    return letter != NULL


cdef void send_reports(Core* e, int peer) noexcept nogil:
    """Send REPORT to a peer; nothing before the trainer's first report."""
    cdef Letter* letter = new_letter(e, peer, sizeof(Parcel))
    cdef Parcel* parcel = <Parcel*>(letter + 1)
    cdef int count
    if letter == NULL:
        return
    count = gather_reports(&e.reports, &e.mailbox, parcel.reports)
    if count == 0:
        free(letter)
        return
    written(e, &parcel.message, REPORT, 0, count)
    post(e, letter, <int>(sizeof(Message) + count * sizeof(Report)), peer)


cdef Letter* new_letter(Core* e, int peer, size_t nbytes) noexcept nogil:
    """Return a letter followed by room for a message of `nbytes`; NULL if memory is exhausted."""
    cdef Letter* letter = <Letter*>calloc(1, sizeof(Letter) + nbytes)
    if letter == NULL:
        latch(&e.mailbox, FAULT_MEMORY, 0, peer)
    return letter


cdef void post(Core* e, Letter* letter, int nbytes, int peer) noexcept nogil:
    """Send the message behind the letter, and append the letter to `outgoing`, which owns it."""
    cdef Status status = send(e.wire, &letter.transfer, letter + 1, nbytes, peer, CONTROL)
    if status != PENDING:
        if status == WIRE_DOWN:
            latch(&e.mailbox, FAULT_MPI, letter.transfer.code, peer)
        free(letter)
        return
    letter.next_one = e.control.outgoing
    e.control.outgoing = letter


cdef bint owes_answers(Core* e) noexcept nogil:
    """Whether messages about exchanges are still being sent to peers that may be waiting for them.

    Departures do not count, as this engine ends only once its peers have answered; nor do reports, which may be
    lost."""
    cdef Letter* letter = e.control.outgoing
    cdef int kind
    while letter != NULL:
        kind = (<Message*>(letter + 1)).kind
        if (kind != BYE and kind != BYE_SEEN and kind != REPORT and e.membership.states[letter.transfer.peer] < LEFT):
            return True
        letter = letter.next_one
    return False


cdef bint reap(Core* e, Letter** link) noexcept nogil:
    """Free the letters of a list whose sends are complete. Return whether there were any."""
    cdef Letter* letter
    cdef bint moved = False
    while link[0] != NULL:
        letter = link[0]
        if test_once(e.wire, &letter.transfer) != PENDING and e.wire.release(e.wire, &letter.transfer):
            link[0] = letter.next_one
            free(letter)
            moved = True
        else:
            link = &letter.next_one
    return moved
