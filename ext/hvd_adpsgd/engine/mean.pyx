# cython: language_level=3
# Why compiled: it runs on the engine's thread, without the GIL.
"""The exact mean of all models: one sum per chunk (butterfly.pyx), LANES sums in flight.

Each chunk carries two more numbers: how many super learners contribute (a model that is not finite does
not), and the sum of a number derived from the layout, which shows whether all average the same tensors.

Where failures are reported, the engines agree (agreement.pyx) at the end of a mean that each of them has all of it.
A super learner that left or failed meanwhile makes its peers vote no: the mean is repeated from its first chunk among
the others, as the decision names them, over their current models; a chunk that some of them had merged already is
averaged once more. Sums of the given-up attempt have channels of their own (the epoch), and buffers that are kept until
the wire no longer uses them.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from hvd_adpsgd.engine.agreement cimport (agreement_failed, agreement_free, agreement_message_size, agreement_new,
                                          agreement_receive, agreement_take, agreement_vote)
from hvd_adpsgd.engine.butterfly cimport network_open, sum_nbytes_sent, sum_post, sum_test
from hvd_adpsgd.engine.control cimport note_malformed, reap
from hvd_adpsgd.engine.core cimport *
from hvd_adpsgd.engine.membership cimport LEFT, is_gone
from hvd_adpsgd.engine.pairs cimport transfer_failed
from hvd_adpsgd.engine.mailbox cimport (EVENT_MEAN, EVENT_MERGED, FAULT_FENCED, FAULT_GONE, FAULT_LAYOUT, FAULT_MEMORY,
                                     FAULT_NONE, NO_PEER, Event, EventKind, add, add_double, latch, load, record,
                                     store, store_double)
from hvd_adpsgd.engine.store cimport memory_leave_out, memory_merge_mean, memory_share, memory_sum_nbytes
from hvd_adpsgd.engine.wire cimport (AGREEMENT, DONE, NOBODY, PEER_DOWN, PENDING, TOO_LONG, Status, Transfer,
                                     receive, send, test_once)


# ---- set-up --------------------------------------------------------------------------------

cdef bint open_mean(Core* e, bint survives, bint butterfly) noexcept:
    """Take part in means of all. False without memory."""
    cdef Mean* m = &e.mean
    cdef int i, n = e.wire.size
    m.survives = survives
    m.network.wire = e.wire
    m.network.butterfly = butterfly or survives or e.wire.sum == NULL
    m.network.members = <int*>malloc(n * sizeof(int))
    m.agreement = agreement_new(n, e.wire.rank, False)
    m.inbox = <char*>malloc(agreement_message_size(n))
    if m.network.members == NULL or m.agreement == NULL or m.inbox == NULL:
        return False
    m.network.size = n
    m.network.rank = e.wire.rank
    for i in range(n):
        m.network.members[i] = i
    network_open(&m.network)
    m.enabled = True
    return True


cdef void close_mean(Core* e) noexcept:
    """Free all but what the wire may still use."""
    cdef Mean* m = &e.mean
    free(m.network.members)
    agreement_free(m.agreement)
    if not m.listening.in_use:
        free(m.inbox)
    if not m.running:
        free(m.sums)


cdef void listen_mean(Core* e) noexcept nogil:
    """Receive the next message of the agreement."""
    cdef Mean* m = &e.mean
    if m.survives:
        receive(e.wire, &m.listening, m.inbox, <int>agreement_message_size(e.wire.size), NOBODY, AGREEMENT)


cdef bint mean_released(Core* e) noexcept nogil:
    """Whether the wire uses nothing of it any more."""
    cdef Mean* m = &e.mean
    return (not m.running and m.letters == NULL and m.abandoned == NULL
            and e.wire.release(e.wire, &m.listening))


# ---- sums ----------------------------------------------------------------------------------

cdef bint reserve_sums(Core* e) noexcept nogil:
    """Allocate LANES chunks: each three times in the type of sums."""
    cdef Mean* m = &e.mean
    cdef Share* share
    cdef char* buffers
    cdef int i
    cdef int64_t sums = 2 * e.pairs.lane_nbytes + 16        # a 16-bit chunk doubles
    cdef int64_t nbytes = 3 * sums
    if m.sums != NULL:
        return True
    m.sums = <Sums*>malloc(sizeof(Sums) + LANES * nbytes)
    if m.sums == NULL:
        return False
    memset(m.sums, 0, sizeof(Sums))
    buffers = <char*>(m.sums + 1)
    for i in range(LANES):
        share = &m.sums.shares[i]
        share.mine = buffers + i * nbytes
        share.sum.total = share.mine + sums
        share.sum.incoming = share.sum.total + sums
    return True


cdef bint begin_mean(Core* e) noexcept nogil:
    cdef Mean* m = &e.mean
    if not m.enabled or m.running or m.finished >= load(&m.wanted) or e.mailbox.fault != FAULT_NONE:
        return False
    if not reserve_sums(e):
        latch(&e.mailbox, FAULT_MEMORY, 0, NOBODY)
        return False
    m.running = True
    m.nchunks = generation(e).nchunks
    m.began = now(e)
    m.nbytes = 0
    begin_sums(e)
    return True


cdef void begin_sums(Core* e) noexcept nogil:
    cdef Mean* m = &e.mean
    m.stage = SUMMING
    m.next = 0
    m.done = 0
    m.square = 0
    m.moved = now(e)
    if m.survives and find_gone(e, False) != NOBODY:
        give_up_sums(e)


cdef enum:
    FLOAT32_EXACT = 1 << 24     # whole numbers up to here


cpdef double layout_mark(uint64_t fingerprint, int chunk, int n) noexcept nogil:
    """A whole number from 1 to 4093, or so small that its sum over n super learners is exact in float32."""
    cdef uint64_t modulus = max(1, min(4093, FLOAT32_EXACT // n))
    return 1.0 + <double>((fingerprint + <uint64_t>chunk * 31) % modulus)


cdef double mark_of(Core* e, int chunk) noexcept nogil:
    """The same on all members, also while one of them has learned of fewer failures."""
    return layout_mark(generation(e).fingerprint, chunk, e.wire.size)


cdef void put_number(Share* s, char* where, int i, double value) noexcept nogil:
    if s.itemsize == 8:
        (<double*>where)[s.count + i] = value
    else:
        (<float*>where)[s.count + i] = <float>value


cdef double get_number(Share* s, char* where, int i) noexcept nogil:
    return (<double*>where)[s.count + i] if s.itemsize == 8 else (<float*>where)[s.count + i]


cdef bint start_share(Core* e) noexcept nogil:
    """Contribute the next chunk."""
    cdef Mean* m = &e.mean
    cdef Share* s = &m.sums.shares[m.next % LANES]
    cdef Status status
    if m.next >= m.nchunks or s.busy:
        return False
    m.nbytes += memory_sum_nbytes(e.memory, m.next, &s.count, &s.itemsize)
    s.void = memory_share(e.memory, m.next, e.pairs.offered_only, s.mine, &s.step)
    put_number(s, s.mine, 0, 0 if s.void else 1)
    put_number(s, s.mine, 1, mark_of(e, m.next))
    s.busy = True
    m.next += 1
    s.summing = True
    status = sum_post(&m.network, &s.sum, s.mine, <int>s.count + 2, s.itemsize == 8, m.next)
    if status != PENDING:
        break_mean(e, s, status)
        return False
    return True


cdef bint advance_share(Core* e, int lane) noexcept nogil:
    """Merge the chunk of a lane if its sum has arrived."""
    cdef Mean* m = &e.mean
    cdef Share* s = &m.sums.shares[lane]
    cdef int chunk = m.done                 # sums are merged in order
    cdef bint arrived = False
    cdef double square, learners, began = now(e)
    cdef Status status
    if not s.busy:
        return False
    if s.summing:                           # also out of order: a wire may progress only what is tested
        status = sum_test(&m.network, &s.sum)
        if status > DONE:
            break_mean(e, s, status)
            return True
        arrived = status == DONE
        s.summing = not arrived
    if s.summing or chunk % LANES != lane:
        return arrived
    learners = get_number(s, s.sum.total, 0)
    square = -1.0
    if get_number(s, s.sum.total, 1) != m.network.size * mark_of(e, chunk):
        latch(&e.mailbox, FAULT_LAYOUT, 0, NOBODY)
    elif not s.void and learners > 0:
        square = memory_merge_mean(e.memory, chunk, load(&m.replace) != 0, learners, s.sum.total, s.mine)
    if square >= 0:
        m.square += square
        add(&e.mailbox.counters.chunks, 1)
        record_mean(e, EVENT_MERGED, chunk, began, s.count * s.itemsize, s.step)
    else:
        memory_leave_out(e.memory, chunk)
        add(&e.mailbox.counters.void_chunks, 1)
    s.busy = False
    m.done += 1
    return True


cdef bint advance_mean(Core* e) noexcept nogil:
    """Do what can be done now for the mean of all. True if anything was."""
    cdef Mean* m = &e.mean
    cdef bint moved = False
    if not m.enabled:
        return False
    if m.survives:
        moved = advance_agreement(e)
    moved |= begin_mean(e)
    if not m.running or e.mailbox.fault != FAULT_NONE:
        return moved
    if m.stage == SUMMING:
        moved |= advance_sums(e)
    if moved:
        m.moved = now(e)
    elif m.running:
        require_everybody(e)
    return moved


cdef bint advance_sums(Core* e) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef bint moved = False
    cdef int i
    for i in range(LANES):
        if e.mailbox.fault == FAULT_NONE and m.stage == SUMMING:
            moved |= advance_share(e, i)
    while e.mailbox.fault == FAULT_NONE and m.stage == SUMMING and start_share(e):
        moved = True
    if e.mailbox.fault == FAULT_NONE and m.stage == SUMMING and m.done == m.nchunks:
        if m.survives:
            vote(e, True)
        else:
            finish_mean(e)
        return True
    return moved


cdef void break_mean(Core* e, Share* s, Status status) noexcept nogil:
    """A sum has failed here."""
    cdef Transfer* t = &s.sum.arriving if s.sum.arriving.status == status else &s.sum.outgoing
    if status == PEER_DOWN and e.mean.survives:
        transfer_failed(e, t.peer, t)
        give_up_sums(e)
    elif status == PEER_DOWN:               # a mean cannot exclude the failed one
        transfer_failed(e, t.peer, t)
        latch(&e.mailbox, FAULT_GONE, t.code, find_gone(e, True))
    else:
        transfer_failed(e, t.peer, t)


cdef void give_up_sums(Core* e) noexcept nogil:
    """Abandon this attempt with its buffers, which the wire may still use, and vote no."""
    cdef Mean* m = &e.mean
    m.sums.next_one = m.abandoned
    m.abandoned = m.sums
    m.sums = NULL
    vote(e, False)


cdef bint retire_sums(Core* e) noexcept nogil:
    """Free abandoned buffers that the wire no longer uses. True if there were any."""
    cdef Sums** link = &e.mean.abandoned
    cdef Sums* left
    cdef bint done, moved = False
    cdef int i
    while link[0] != NULL:
        left = link[0]
        done = True
        for i in range(LANES):
            done &= e.wire.release(e.wire, &left.shares[i].sum.outgoing)
            done &= e.wire.release(e.wire, &left.shares[i].sum.arriving)
        if done:
            link[0] = left.next_one
            free(left)
            moved = True
        else:
            link = &left.next_one
    return moved


# ---- agreement -----------------------------------------------------------------------------

cdef void vote(Core* e, bint complete) noexcept nogil:
    cdef Mean* m = &e.mean
    m.stage = AGREEING
    m.vote = m.agreement.number
    agreement_vote(m.agreement, complete, generation(e).fingerprint)


cdef bint advance_agreement(Core* e) noexcept nogil:
    """Take and send messages of the agreement; act on a decision. True if anything happened."""
    cdef Mean* m = &e.mean
    cdef bint moved = retire_sums(e) | reap(e, &e.mean.letters)
    if m.seen != load(&e.mailbox.peer_events):
        m.seen = load(&e.mailbox.peer_events)
        m.moved = now(e)        # the mean may have waited long for a slow one that leaves now: its process has yet to end
        tell_gone(e)
    moved |= read_letter(e)
    send_letters(e)
    if m.agreement.excluded and not e.membership.departing:
        latch(&e.mailbox, FAULT_FENCED, 0, NOBODY)
    elif m.running and m.stage == AGREEING and m.agreement.number > m.vote:
        conclude(e)
        moved = True
    return moved


cdef void tell_gone(Core* e) noexcept nogil:
    """Somebody's state has changed: one that left or failed takes no part in decisions, and ends the attempt."""
    cdef Mean* m = &e.mean
    cdef int i
    cdef bint ended = False
    for i in range(m.network.size):
        if is_gone(&e.membership, m.network.members[i]):
            agreement_failed(m.agreement, m.network.members[i])
            send_letters(e)
            ended = True
    if ended and m.running and m.stage == SUMMING:
        give_up_sums(e)


cdef void conclude(Core* e) noexcept nogil:
    """The same on all: the mean is over, or is repeated among those that the decision leaves."""
    cdef Mean* m = &e.mean
    cdef Network* n = &m.network
    cdef int i, kept = 0
    for i in range(n.size):
        if not m.agreement.last.failed[n.members[i]]:
            if n.members[i] == e.wire.rank:
                n.rank = kept
            n.members[kept] = n.members[i]
            kept += 1
    # Sums that were given up may have messages on their way, so the next ones take other channels. Not after a
    # mean that is complete: epochs are few, and would come round to the channels of sums given up long ago.
    if kept < n.size or not m.agreement.last.outcome & 1:
        n.epoch += 1
    if kept < n.size:
        n.size = kept
        network_open(n)
    if not m.agreement.last.equal:
        latch(&e.mailbox, FAULT_LAYOUT, 0, NOBODY)
    elif m.agreement.last.outcome & 1:
        finish_mean(e)
    elif not reserve_sums(e):
        latch(&e.mailbox, FAULT_MEMORY, 0, NOBODY)
    else:
        begin_sums(e)


cdef bint read_letter(Core* e) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef Status status = test_once(e.wire, &m.listening)
    if status == PENDING:
        return False
    if status == TOO_LONG or (status == DONE and agreement_receive(
            m.agreement, m.listening.peer, m.inbox, m.listening.nbytes) != 0):
        note_malformed(e, m.listening.peer)
    elif status != DONE and status != PEER_DOWN:
        transfer_failed(e, NOBODY, &m.listening)
        return False
    listen_mean(e)
    return True


cdef void send_letters(Core* e) noexcept nogil:
    """Send what the agreement has to say; it must be asked after each input."""
    cdef Mean* m = &e.mean
    cdef Letter* letter
    cdef int peer
    cdef size_t nbytes
    while True:
        letter = <Letter*>calloc(1, sizeof(Letter) + agreement_message_size(e.wire.size))
        if letter == NULL:
            latch(&e.mailbox, FAULT_MEMORY, 0, NOBODY)
            return
        nbytes = agreement_take(m.agreement, &peer, letter + 1)
        if nbytes == 0 or send(e.wire, &letter.transfer, letter + 1, <int>nbytes, peer, AGREEMENT) != PENDING:
            free(letter)                    # a peer that has failed gets nothing
            if nbytes == 0:
                return
            continue
        letter.next_one = m.letters
        m.letters = letter


# ---- the end of a mean ---------------------------------------------------------------------

cdef void finish_mean(Core* e) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef double ended = now(e)
    m.running = False
    add(&e.mailbox.counters.means, 1)
    add_double(&e.mailbox.counters.mean_s, ended - m.began)
    store_double(&e.mailbox.counters.mean_square, m.square)
    add(&e.mailbox.counters.bytes_sent, sum_nbytes_sent(&m.network, m.nbytes))
    add(&e.mailbox.counters.bytes_received, sum_nbytes_sent(&m.network, m.nbytes))
    record_mean(e, EVENT_MEAN, -1, m.began, m.nbytes, e.mailbox.orders.step)
    store(&m.finished, m.finished + 1)


cdef void record_mean(Core* e, EventKind kind, int chunk, double began, int64_t nbytes, int64_t step) noexcept nogil:
    cdef Event event = [kind, NO_PEER, chunk, 0, False, 0, began, now(e), nbytes, step]
    record(&e.mailbox, event)


cdef void require_everybody(Core* e) noexcept nogil:
    """A mean waits for slow super learners without bound, but not for one that has left.

    Where failures are reported, it continues without one that has left once its process has ended. One that is gone
    for certain does not count there: the agreement leaves it out, however long it waits for the votes of slow ones."""
    cdef Mean* m = &e.mean
    cdef int peer
    cdef double patience = e.pairs.deadline_s               # its last messages may still arrive
    if m.survives:
        patience += 2 * e.leave_deadline_s
    if now(e) - m.moved <= patience or m.searched == load(&e.mailbox.peer_events) + 1:
        return
    m.searched = load(&e.mailbox.peer_events) + 1              # until the next change there is nobody
    peer = find_leaving(e) if m.survives else find_gone(e, True)
    if peer != NOBODY:
        latch(&e.mailbox, FAULT_GONE, 0, peer)


cdef int find_leaving(Core* e) noexcept nogil:
    """A member that has left and whose process has not ended; NOBODY if there is none."""
    cdef Network* n = &e.mean.network
    cdef int i, peer
    for i in range(n.size):
        peer = n.members[i]
        if e.membership.states[peer] == LEFT and not is_gone(&e.membership, peer):
            return peer
    return NOBODY


cdef int find_gone(Core* e, bint left) noexcept nogil:
    """A member that is gone, or (`left`) has left; NOBODY if there is none."""
    cdef Network* n = &e.mean.network
    cdef int i, peer
    for i in range(n.size):
        peer = n.members[i]
        if is_gone(&e.membership, peer) or (left and e.membership.states[peer] >= LEFT):
            return peer
    return NOBODY
