"""The sum of numbers over all members, by a butterfly of pairwise exchanges (recursive doubling):

    rank       0     1     2     3
    stage 1    0+1   0+1   2+3   2+3        peer: rank XOR 1
    stage 2    all   all   all   all        peer: rank XOR 2

The butterfly has log2 n stages for n a power of two. Otherwise n - p ranks, p the largest power of two up to
n, first send their numbers to a neighbour and receive the sum from it in the end: two stages more. Both peers
add the same two numbers, and floating-point addition commutes, so all ranks have the same bits.

Source: Su and Chen, arXiv:1507.01239 (the butterfly); Thakur, Rabenseifner and Gropp, IJHPCA 2005
    (recursive doubling, and folding for other n).
"""

cdef enum:
    STAGES = 64             # channels of one sum, one for each stage
    NUMBERS = 32            # sums of an epoch with channels of their own; more than are in flight at once
    EPOCHS = 128            # epochs with channels of their own

cdef struct Step:           # what a member does in a stage
    int peer                # rank among the members; NOBODY: this member skips the stage
    bint sends
    bint receives
    bint adds               # what is received is added to the sum; else it is the sum


cdef void network_open(Network* n) noexcept nogil:
    """Compute `stages` and `folded` from `size`."""
    cdef int power = 1
    n.stages = 2
    while 2 * power <= n.size:
        power *= 2
        n.stages += 1
    n.folded = n.size - power


cdef int epoch_channel(Network* n) noexcept nogil:
    """Return the first channel of the epoch's sums."""
    return SUMS + (n.epoch % EPOCHS) * NUMBERS * STAGES


cdef void next_epoch(Network* n) noexcept nogil:
    """Let the next sums take other channels, because messages of sums that were given up may still arrive.

    Those that have arrived are freed: EPOCHS epochs later they would be taken for new ones. A peer that is ahead has
    already sent some of the new epoch."""
    n.epoch += 1
    if n.wire.drop_sums != NULL:
        n.wire.drop_sums(n.wire, epoch_channel(n), epoch_channel(n) + NUMBERS * STAGES)


cdef Step step_of(Network* n, int stage) noexcept nogil:
    """Return what this rank does in a stage: 0 folds, the last unfolds, those between are the butterfly.

    Of the first 2 * folded ranks every even one folds into the next."""
    cdef Step step
    cdef bint paired = n.rank < 2 * n.folded, gives = n.rank % 2 == 0
    cdef bint last = stage == n.stages - 1
    cdef int place
    step.peer = NOBODY
    if stage == 0 or last:
        if paired:
            step.peer = n.rank + 1 if gives else n.rank - 1
        step.sends = gives != last
        step.receives = not step.sends
        step.adds = not last
        return step
    step.sends = step.receives = step.adds = True
    if not (paired and gives):
        place = n.rank // 2 if paired else n.rank - n.folded
        place ^= 1 << (stage - 1)
        step.peer = 2 * place + 1 if place < n.folded else place + n.folded
    return step


cdef Status sum_post(Network* n, Sum* s, const void* mine, int count, bint double_precision,
                     int number) noexcept nogil:
    """Begin a sum: s.total = the sum of all members' `mine`. All members post their sums in the same order.

    s.total and s.incoming have room for `count` numbers. If a peer's sum has another length, the last
    number becomes NaN on all ranks. Return PENDING, or why the sum could not be posted."""
    s.outgoing.in_use = s.arriving.in_use = False
    s.count = count
    s.double_precision = double_precision
    s.channel = epoch_channel(n) + number % NUMBERS * STAGES
    s.stage = -1
    s.torn = False
    memcpy(s.total, mine, nbytes(s))
    return enter_next(n, s)


cdef Status sum_test(Network* n, Sum* s) noexcept nogil:
    """Test the messages of a sum once, and post those of the next stages.

    Return DONE when s.total is complete."""
    cdef Status status
    while s.stage < n.stages:
        status = stage_over(n, s)
        if status == DONE:
            combine(n, s)
            status = enter_next(n, s)
            if status == PENDING:
                continue
        return status
    return DONE


cdef int64_t sum_nbytes_sent(Network* n, int64_t nbytes) noexcept nogil:
    """Return the bytes that this rank sends for a sum of `nbytes`."""
    cdef int stage
    cdef int64_t sent = 0
    cdef Step step
    for stage in range(n.stages):
        step = step_of(n, stage)
        if step.peer != NOBODY and step.sends:
            sent += nbytes
    return sent


# ---- a stage -------------------------------------------------------------------------------

cdef Status enter_next(Network* n, Sum* s) noexcept nogil:
    """Post the messages of the next stage in which this rank takes part.

    PENDING if there is no such stage."""
    cdef Step step
    s.stage += 1
    while s.stage < n.stages:
        step = step_of(n, s.stage)
        if step.peer != NOBODY:
            return post_step(n, s, step)
        s.stage += 1
    return PENDING


cdef Status post_step(Network* n, Sum* s, Step step) noexcept nogil:
    cdef int peer = n.members[step.peer]
    cdef Status status = PENDING
    s.arriving.status = s.outgoing.status = DONE
    if step.receives:
        status = receive(n.wire, &s.arriving, s.incoming, nbytes(s), peer, s.channel + s.stage)
    if step.sends and status == PENDING:
        status = send(n.wire, &s.outgoing, s.total, nbytes(s), peer, s.channel + s.stage)
    return status


cdef Status stage_over(Network* n, Sum* s) noexcept nogil:
    """Return DONE if both messages of the stage are complete.

    Before that `total` must not change: the wire reads it until the send is complete."""
    cdef Status received = test_once(n.wire, &s.arriving), sent
    if received == TOO_LONG or (received == DONE and step_of(n, s.stage).receives
                                and s.arriving.nbytes != nbytes(s)):
        s.torn = True
        received = DONE
    if received != DONE:
        return received
    sent = test_once(n.wire, &s.outgoing)
    return sent


cdef void combine(Network* n, Sum* s) noexcept nogil:
    """Add the received numbers to `total`; in the last stage they replace it."""
    cdef Step step = step_of(n, s.stage)
    if step.receives and not step.adds:
        memcpy(s.total, s.incoming, nbytes(s))
    elif step.receives and s.double_precision:
        add_doubles(<double*>s.total, <const double*>s.incoming, s.count)
    elif step.receives:
        add_floats(<float*>s.total, <const float*>s.incoming, s.count)
    if s.torn and s.double_precision:
        (<double*>s.total)[s.count - 1] = NAN
    elif s.torn:
        (<float*>s.total)[s.count - 1] = NAN


cdef void add_doubles(double* total, const double* more, int count) noexcept nogil:
    cdef int i
    for i in range(count):
        total[i] += more[i]


cdef void add_floats(float* total, const float* more, int count) noexcept nogil:
    cdef int i
    for i in range(count):
        total[i] += more[i]


cdef int nbytes(Sum* s) noexcept nogil:
    return s.count * (8 if s.double_precision else 4)
