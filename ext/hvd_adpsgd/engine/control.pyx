# cython: language_level=3
# Why compiled: it runs on the engine's thread, without the GIL.
"""Control messages under way: one receive from anybody, and the sends that are not complete.

Reports travel here, and not on a channel of their own: the same receive takes them. Those that are under way to or from
an engine that leaves may be lost."""

from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from hvd_adpsgd.engine.core cimport *
from hvd_adpsgd.engine.membership cimport LEFT, departed_nbytes
from hvd_adpsgd.engine.mailbox cimport FAULT_MEMORY, FAULT_MPI, add, latch, load, store
from hvd_adpsgd.engine.reports cimport choose_listener, gather_reports, note_report
from hvd_adpsgd.engine.wire cimport CONTROL, DONE, NOBODY, PENDING, TOO_LONG, WIRE_DOWN, Status, receive, send, test_once


cdef int longest_message(int size) noexcept nogil:
    """Bytes: of all departures, or of as many reports as one message holds."""
    return max(<int>sizeof(Message) + departed_nbytes(size), <int>sizeof(Parcel))


cdef bint open_control(Control* c, int size) noexcept:
    cdef int nbytes = longest_message(size)
    c.inbox = <Message*>calloc(1, nbytes)
    c.taken = <Message*>calloc(1, nbytes)
    return c.inbox != NULL and c.taken != NULL


cdef void close_control(Control* c) noexcept:
    """The wire may still use the inbox if it has not given the receive back."""
    if not c.listening.in_use:
        free(c.inbox)
    free(c.taken)


cdef void listen(Core* e) noexcept nogil:
    cdef Control* c = &e.control
    if receive(e.wire, &c.listening, c.inbox, longest_message(e.wire.size), NOBODY, CONTROL) == WIRE_DOWN:
        latch(&e.mailbox, FAULT_MPI, c.listening.code, NOBODY)


cdef Message* take_message(Core* e, int* peer) noexcept nogil:
    """The next message that has arrived, until the next call; NULL if there is none.

    Reports are kept on the way to it, and what no engine sends is ignored. Neither counts as work, so an idle engine keeps
    its long sleep."""
    cdef Message* message = next_message(e, peer)
    while message != NULL and (message.kind == REPORT or message.kind == NONE):
        message = next_message(e, peer)
    return message


cdef Message* next_message(Core* e, int* peer) noexcept nogil:
    cdef Control* c = &e.control
    cdef Status status
    if e.mailbox.fault == FAULT_MPI:
        return NULL
    if not c.listening.in_use:              # the wire has given the receive back with a peer's failure
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
    """Whether an engine sends such a message: fields of others would lead out of the memory of the model."""
    cdef int64_t behind = nbytes - <int64_t>sizeof(Message)
    if behind < 0 or not 0 <= m.weight <= 1 or m.exchange < 0 or m.nchunks < 0 or m.first < 0 or m.generation < 0:
        return False
    if m.kind == REPORT:
        return 0 < m.nchunks <= REPORTS and behind == m.nchunks * <int64_t>sizeof(Report)
    if m.kind == BYE or m.kind == NEWS:
        return behind == departed_nbytes(e.wire.size) and m.exchange <= e.wire.size
    if m.kind == BYE_SEEN and m.exchange > e.wire.size or m.kind == YES and m.nchunks > generation(e).nchunks:
        return False
    return ASK <= m.kind <= CUT_SEEN and behind == 0


cdef void note_malformed(Core* e, int peer) noexcept nogil:
    """It is ignored; the trainer is told."""
    store(&e.mailbox.counters.malformed_from, peer)
    add(&e.mailbox.counters.malformed, 1)


cdef void take_reports(Core* e) noexcept nogil:
    """Keep the reports of the message that has arrived."""
    cdef Parcel* parcel = <Parcel*>e.control.taken
    cdef int i
    for i in range(parcel.message.nchunks):
        if note_report(&e.reports, &e.mailbox, &parcel.reports[i], now(e)) and e.wire.lives != NULL:
            e.wire.lives(e.wire, parcel.reports[i].rank)


cdef Message* written(Core* e, Message* message, Kind kind, int exchange, int nchunks) noexcept nogil:
    cdef int64_t newest = load(&e.ngenerations) - 1     # once: the trainer may add a generation before the next line
    message.kind = kind
    message.exchange = exchange
    message.nchunks = nchunks
    message.first = 0
    message.generation = <int>newest
    message.fingerprint = e.generations[newest].fingerprint
    message.weight = e.pairs.weight
    message.round = e.mailbox.orders.round
    return message


cdef void send_control(Core* e, int peer, Kind kind, int exchange, int nchunks) noexcept nogil:
    """A peer that has failed gets nothing; the wire reports it (next_failed)."""
    cdef Letter* letter = new_letter(e, peer, sizeof(Message))
    if letter == NULL:
        return
    written(e, <Message*>(letter + 1), kind, exchange, nchunks)
    post(e, letter, sizeof(Message), peer)


cdef void send_ask(Core* e, int peer, int exchange, int first) noexcept nogil:
    """With all chunks of the model, of which the exchange moves some."""
    cdef Letter* letter = new_letter(e, peer, sizeof(Message))
    if letter == NULL:
        return
    written(e, <Message*>(letter + 1), ASK, exchange, generation(e).nchunks).first = first
    post(e, letter, sizeof(Message), peer)


cdef void send_departures(Core* e, int peer, Kind kind) noexcept nogil:
    """BYE or NEWS, with all departures that this engine knows of."""
    cdef int nbytes = departed_nbytes(e.wire.size)
    cdef Letter* letter = new_letter(e, peer, sizeof(Message) + nbytes)
    cdef Message* message
    if letter == NULL:
        return
    message = written(e, <Message*>(letter + 1), kind, e.membership.known, 0)
    memcpy(message + 1, e.membership.departed, nbytes)
    post(e, letter, <int>sizeof(Message) + nbytes, peer)


cdef void tell_reports(Core* e) noexcept nogil:
    """Send what is known to a peer, if it is time. One that cannot be reached keeps one message on its way, and delays none to others."""
    cdef Reports* r = &e.reports
    cdef int peer
    if r.known == NULL or e.mailbox.orders.leaving or now(e) < r.next_at:
        return
    r.next_at = now(e) + r.every_s
    peer = choose_listener(r, &e.membership)
    if peer != NOBODY and not is_written_to(e, peer):
        send_reports(e, peer)


cdef bint is_written_to(Core* e, int peer) noexcept nogil:
    """Whether a control message is on its way to a peer."""
    cdef Letter* letter = e.control.outgoing
    while letter != NULL and letter.transfer.peer != peer:
        letter = letter.next_one
    return letter != NULL


cdef void send_reports(Core* e, int peer) noexcept nogil:
    """REPORT, once the trainer has made a report."""
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
    """A letter with room for a message of so many bytes behind it; NULL without memory."""
    cdef Letter* letter = <Letter*>calloc(1, sizeof(Letter) + nbytes)
    if letter == NULL:
        latch(&e.mailbox, FAULT_MEMORY, 0, peer)
    return letter


cdef void post(Core* e, Letter* letter, int nbytes, int peer) noexcept nogil:
    """Send what is behind the letter, which is the list's from then on."""
    cdef Status status = send(e.wire, &letter.transfer, letter + 1, nbytes, peer, CONTROL)
    if status != PENDING:
        if status == WIRE_DOWN:
            latch(&e.mailbox, FAULT_MPI, letter.transfer.code, peer)
        free(letter)
        return
    letter.next_one = e.control.outgoing
    e.control.outgoing = letter


cdef bint owes_answers(Core* e) noexcept nogil:
    """Whether messages about exchanges are not yet sent to peers that may wait for them.

    Those about departures may be lost with this engine: it ends when another one has its departure. So may reports."""
    cdef Letter* letter = e.control.outgoing
    cdef int kind
    while letter != NULL:
        kind = (<Message*>(letter + 1)).kind
        if (kind != BYE and kind != NEWS and kind != BYE_SEEN and kind != REPORT
                and e.membership.states[letter.transfer.peer] < LEFT):
            return True
        letter = letter.next_one
    return False


cdef bint reap(Core* e, Letter** link) noexcept nogil:
    """Free the messages of a list that are sent. True if there were any."""
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
