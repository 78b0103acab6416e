"""The exact mean of all models: one sum per chunk (butterfly.pxi), LANES sums in flight.

Each sum has two more numbers: how many super learners contribute (one whose chunk is not finite does not),
and the sum of a number derived from the layout, which shows whether all super learners average the same
tensors.

The engines agree (agreement.pyx) at the end of a mean that each of them has merged all of its chunks. If a super learner left or failed meanwhile, its peers vote no: the mean is repeated
from its first chunk, over the current models of the super learners that the decision leaves; a chunk that
some of them had already merged is averaged once more. The sums of each attempt have channels of their own
(the epoch); buffers of an attempt that was given up are kept until the wire no longer uses them.
"""

# ---- set-up --------------------------------------------------------------------------------

cdef bint open_mean(Core* e) noexcept:
    """Take part in means of all models. Return False if memory is exhausted."""
    cdef Mean* m = &e.mean
    cdef int i, n = e.wire.size
    m.network.wire = e.wire
    m.network.members = <int*>malloc(n * sizeof(int))
    m.agreement = agreement_new(n, e.wire.rank)
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
    """Free all memory of the mean except buffers that the wire may still use."""
    cdef Mean* m = &e.mean
    free(m.network.members)
    agreement_free(m.agreement)
    if not m.listening.in_use:
        free(m.inbox)
    if not m.running:
        free(m.sums)


cdef void listen_mean(Core* e) noexcept nogil:
    """Post the receive of the next message of the agreement."""
    cdef Mean* m = &e.mean
    if m.enabled:
        receive(e.wire, &m.listening, m.inbox, <int>agreement_message_size(e.wire.size), NOBODY, AGREEMENT)


cdef bint release_mean(Core* e) noexcept nogil:
    """Give up the mean and its messages, when the thread has ended. Return whether the wire uses none of their buffers."""
    cdef Mean* m = &e.mean
    if m.running and m.sums != NULL:
        m.sums.next_one = m.abandoned
        m.abandoned = m.sums
        m.sums = NULL
    m.running = False
    retire_sums(e)
    reap(e, &m.letters)
    return m.letters == NULL and m.abandoned == NULL and e.wire.release(e.wire, &m.listening)


# ---- sums ----------------------------------------------------------------------------------

cdef bint reserve_sums(Core* e) noexcept nogil:
    """Allocate three buffers for each of LANES chunks: our chunk, the total, and a peer's numbers."""
    cdef Mean* m = &e.mean
    cdef Share* share
    cdef char* buffers
    cdef int i
    cdef int64_t sums = 2 * e.pairs.lane_nbytes + 16        # 16-bit chunks need twice their bytes
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
    if is_any_gone(e):
        give_up_sums(e)


cdef enum:
    FLOAT32_EXACT = 1 << 24     # float32 represents all whole numbers up to this one


cpdef double layout_mark(uint64_t fingerprint, int chunk, int n) noexcept nogil:
    """Return a number that depends on the layout and the chunk, for a check that all layouts are the same.

    A whole number from 1 to 4093, or less, so that its sum over n super learners is exact in float32."""
    cdef uint64_t modulus = max(1, min(4093, FLOAT32_EXACT // n))
    return 1.0 + <double>((fingerprint + <uint64_t>chunk * 31) % modulus)


cdef double mark_of(Core* e, int chunk) noexcept nogil:
    """Return the layout_mark of a chunk, the same on members that know of different failures."""
    return layout_mark(generation(e).fingerprint, chunk, e.wire.size)


cdef void put_number(Share* s, char* where, int i, double value) noexcept nogil:
    if s.itemsize == 8:
        (<double*>where)[s.count + i] = value
    else:
        (<float*>where)[s.count + i] = <float>value


cdef double get_number(Share* s, char* where, int i) noexcept nogil:
    return (<double*>where)[s.count + i] if s.itemsize == 8 else (<float*>where)[s.count + i]


cdef bint start_share(Core* e) noexcept nogil:
    """Begin the sum of the next chunk. Return False if none can begin now."""
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
    """Test the sum of a lane, and merge its chunk if the sum is complete.

    Return whether anything was done."""
    cdef Mean* m = &e.mean
    cdef Share* s = &m.sums.shares[lane]
    cdef int chunk = m.done                 # sums are merged in order
    cdef bint arrived = False
    cdef double square, learners, began = now(e)
    cdef Status status
    if not s.busy:
        return False
    if s.summing:                           # also out of order: some wires progress only tested transfers
        status = sum_test(&m.network, &s.sum)
        if status > DONE:
            break_mean(e, s, status)
            return True
        arrived = status == DONE
        s.summing = not arrived
        if arrived:                         # as many are received
            add(&e.mailbox.counters.bytes_sent, sum_nbytes_sent(&m.network, s.count * s.itemsize))
            add(&e.mailbox.counters.bytes_received, sum_nbytes_sent(&m.network, s.count * s.itemsize))
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
    """Advance the mean of all models as far as possible without waiting. Return whether anything was done."""
    cdef Mean* m = &e.mean
    cdef bint moved = False
    if not m.enabled:
        return False
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
        vote(e, True)
        return True
    return moved


cdef void break_mean(Core* e, Share* s, Status status) noexcept nogil:
    """Process the failure of a sum: give up the attempt if a peer has failed, else latch a fault."""
    cdef Transfer* t = &s.sum.arriving if s.sum.arriving.status == status else &s.sum.outgoing
    transfer_failed(e, t.peer, t)
    if status == PEER_DOWN:
        give_up_sums(e)


cdef void give_up_sums(Core* e) noexcept nogil:
    """Give up this attempt at a mean and vote no; its buffers are kept, as the wire may still use them."""
    cdef Mean* m = &e.mean
    m.sums.next_one = m.abandoned
    m.abandoned = m.sums
    m.sums = NULL
    vote(e, False)


cdef bint retire_sums(Core* e) noexcept nogil:
    """Free the buffers of attempts given up that the wire no longer uses. Return whether there were any."""
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
    """Receive and send messages of the agreement, and act on a decision. Return whether anything was done."""
    cdef Mean* m = &e.mean
    cdef bint moved = retire_sums(e) | reap(e, &e.mean.letters)
    if m.seen != load(&e.mailbox.peer_events):
        m.seen = load(&e.mailbox.peer_events)
        m.moved = now(e)        # restart the patience: a super learner that has just left has yet to end
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
    """Exclude members that are gone from decisions, and give up an attempt that needs their chunks."""
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
    """Act on a decision, as all members do: end the mean, or repeat it among the remaining members."""
    cdef Mean* m = &e.mean
    cdef Network* n = &m.network
    cdef int i, kept = 0
    for i in range(n.size):
        if not m.agreement.last.failed[n.members[i]]:
            if n.members[i] == e.wire.rank:
                n.rank = kept
            n.members[kept] = n.members[i]
            kept += 1
    # Not after a complete mean: only EPOCHS epochs have channels, and must not return early to those of sums given
    # up before.
    if kept < n.size or not m.agreement.last.outcome & 1:
        next_epoch(n)
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
    """Send all outgoing messages of the agreement; must be called after each input to it."""
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
            free(letter)                    # nothing is sent to a peer that has failed
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
    record_mean(e, EVENT_MEAN, -1, m.began, m.nbytes, e.mailbox.orders.step)
    store(&m.finished, m.finished + 1)


cdef void record_mean(Core* e, EventKind kind, int chunk, double began, int64_t nbytes, int64_t step) noexcept nogil:
    cdef Event event = [kind, NO_PEER, chunk, 0, False, 0, began, now(e), nbytes, step]
    record(&e.mailbox, event)


cdef void require_everybody(Core* e) noexcept nogil:
    """Latch FAULT_GONE if the mean waits for a super learner that has left; wait for slow ones without bound.

    The agreement excludes a super learner that has failed, or that has left and whose process has ended; only
    one that has left and whose process does not end for long is a fault."""
    cdef Mean* m = &e.mean
    cdef int peer
    cdef double patience = e.pairs.deadline_s + 2 * e.leave_deadline_s      # messages of a peer that left may arrive
    if now(e) - m.moved <= patience or m.searched == load(&e.mailbox.peer_events) + 1:
        return
    m.searched = load(&e.mailbox.peer_events) + 1              # search again only after the next change
    peer = find_leaving(e)
    if peer != NOBODY:
        latch(&e.mailbox, FAULT_GONE, 0, peer)


cdef int find_leaving(Core* e) noexcept nogil:
    """Return a member that has left and whose process has not ended; NOBODY if there is none."""
    cdef Network* n = &e.mean.network
    cdef int i, peer
    for i in range(n.size):
        peer = n.members[i]
        if e.membership.states[peer] == LEFT and not is_gone(&e.membership, peer):
            return peer
    return NOBODY


cdef bint is_any_gone(Core* e) noexcept nogil:
    """Whether a member is gone (is_gone)."""
    cdef int i
    for i in range(e.mean.network.size):
        if is_gone(&e.membership, e.mean.network.members[i]):
            return True
    return False
