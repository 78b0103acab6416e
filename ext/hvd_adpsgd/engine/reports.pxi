"""Status reports of super learners, spread by gossip: each engine learns those of all, a little late.

    trainer    --report-->    own     --every_s-->    a random peer: own and the REPORTS - 1 received last

A report is a text of at most REPORT_NBYTES that the engine does not interpret, with a version: of two reports
of one super learner the newer stays. The mailbox's `gate` protects each text and version; only the engine's
thread uses the list. With n super learners a report reaches all after about log2 n messages, and n / REPORTS
seconds if the reports do not fit in one message.
"""

cdef enum:
    DRAWS = 8               # random draws, at most, to find a peer that is alive


cdef bint open_reports(Reports* r, int own, int size, double every_s) noexcept:
    """Send and store reports, with a message every `every_s` seconds. Return False if memory is exhausted."""
    cdef int i
    r.known = <Known*>calloc(size, sizeof(Known))
    if r.known == NULL:
        return False
    r.own, r.size, r.every_s = own, size, every_s
    r.chance = <uint64_t>own + 1
    for i in range(size):
        r.known[i].report.rank = i
    return True


cdef void close_reports(Reports* r) noexcept:
    free(r.known)
    r.known = NULL


cdef bint note_report(Reports* r, Mailbox* p, Report* told, double heard) noexcept nogil:
    """Store a report that a peer has sent if it is newer than the known one. Return whether it is."""
    cdef Known* k
    if r.known == NULL or not (0 <= told.rank < r.size and 0 <= told.nbytes <= REPORT_NBYTES) or told.rank == r.own:
        return False
    k = &r.known[told.rank]
    if told.version <= k.report.version:
        return False
    pthread_mutex_lock(&p.gate)
    k.report = told[0]
    k.heard = heard
    pthread_mutex_unlock(&p.gate)
    to_the_front(r, k)
    return True


cdef void to_the_front(Reports* r, Known* k) noexcept nogil:
    if r.newest == k:
        return
    if k.newer != NULL:
        k.newer.older = k.older
    if k.older != NULL:
        k.older.newer = k.newer
    k.newer = NULL
    k.older = r.newest
    if r.newest != NULL:
        r.newest.newer = k
    r.newest = k


cdef int gather_reports(Reports* r, Mailbox* p, Report* into) noexcept nogil:
    """Write reports to a message, and return how many; 0 before the trainer's first report."""
    cdef Known* k = r.newest
    cdef int count = 1
    pthread_mutex_lock(&p.gate)
    into[0] = r.known[r.own].report
    pthread_mutex_unlock(&p.gate)
    if into[0].version == 0:
        return 0
    while k != NULL and count < REPORTS:
        into[count] = k.report
        count += 1
        k = k.older
    return count


cdef int choose_listener(Reports* r, Membership* m) noexcept nogil:
    """Return a random peer that is alive; NOBODY if DRAWS draws find none."""
    cdef int peer, tries
    for tries in range(DRAWS if r.size > 1 else 0):
        r.chance = r.chance * <uint64_t>6364136223846793005 + <uint64_t>1442695040888963407
        peer = <int>((r.chance >> 33) % <uint64_t>r.size)
        if peer != r.own and m.states[peer] == ALIVE:
            return peer
    return NOBODY
