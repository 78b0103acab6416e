"""Copies of the state of the engine's thread, for Python.

Before each turn the thread checks whether the trainer wants a copy (an inspection), and makes it:

    trainer                                 thread
    inspection_wanted = k
                                            between two turns: inspection = copy, inspection_made = k
    takes the copy                          next turn
"""

cdef double LOOK_S = 1.0            # longest wait for the end of the thread's turn


# ---- the thread's side -----------------------------------------------------------------------

cdef struct ExchangeLook:   # copy of an exchange, without transfers and buffers: the wire may write those
    int peer
    Phase phase
    bint active
    bint parked
    int number
    int nchunks
    int next
    int done
    double began
    double moved

cdef struct Inspection:           # copy of state that only the thread writes; two arrays follow this struct
    int asking
    int serving
    bint sending
    bint averaging          # a mean of all models runs
    MeanStage stage
    int members             # how many super learners take part in the mean
    int nchunks
    int next
    int done
    double began
    double moved
    char* states            # of the peers
    ExchangeLook* exchanges
    int nexchanges


cdef void make_inspection(Core* e) noexcept nogil:
    """Copy the thread's state between two turns, if the trainer wants an inspection."""
    cdef Mailbox* p = &e.mailbox
    cdef int64_t number = load(&p.inspection_wanted)
    if number == p.inspection_made:
        return
    free(p.inspection)      # a copy for a trainer whose wait timed out
    p.inspection = copy_state(e)
    store(&p.inspection_made, number)


cdef Inspection* copy_state(Core* e) noexcept nogil:
    """Return a copy of the thread's state, to be freed; NULL if memory is exhausted."""
    cdef Inspection* seen
    cdef Mean* m = &e.mean
    cdef Exchange* x = e.pairs.running
    cdef int most = 0
    while x != NULL:
        most += 1
        x = x.next_one
    seen = <Inspection*>malloc(sizeof(Inspection) + most * sizeof(ExchangeLook) + e.wire.size)
    if seen == NULL:
        return NULL
    seen.exchanges = <ExchangeLook*>(seen + 1)
    seen.states = <char*>(seen.exchanges + most)
    memcpy(seen.states, e.membership.states, e.wire.size)
    seen.asking, seen.serving, seen.sending = e.pairs.asking, e.pairs.serving, e.control.outgoing != NULL
    seen.averaging, seen.stage, seen.members = m.running, m.stage, m.network.size
    seen.nchunks, seen.next, seen.done = m.nchunks, m.next, m.done
    seen.began, seen.moved = m.began, m.moved
    seen.nexchanges = 0
    x = e.pairs.running
    while x != NULL and seen.nexchanges < most:
        if x.phase != IDLE:
            seen.exchanges[seen.nexchanges] = [x.peer, x.phase, x.active, x.parked, x.number, x.nchunks, x.next, x.done,
                                               x.began, x.moved]
            seen.nexchanges += 1
        x = x.next_one
    return seen


# ---- the trainer's side ----------------------------------------------------------------------

cdef Inspection* take_inspection(Core* e, bint running) noexcept nogil:
    """Return a copy of the thread's state between two of its turns, to be freed; NULL if memory is exhausted.

    If the thread does not end its turn within LOOK_S (it is in a call of the wire's library), its state is
    copied here in the middle of that turn."""
    cdef Mailbox* p = &e.mailbox
    cdef Inspection* seen
    cdef int64_t number
    cdef double until = now(e) + LOOK_S
    pthread_mutex_lock(&p.inspections)
    number = p.inspection_wanted + 1
    store(&p.inspection_wanted, number)
    wake(e)                             # the thread may sleep
    while running and load(&p.inspection_made) < number and not load(&p.ended) and now(e) < until:
        e.clock.sleep(e.clock, 20e-6)
    if load(&p.inspection_made) == number:
        seen = <Inspection*>p.inspection
        p.inspection = NULL
    else:
        seen = copy_state(e)
    pthread_mutex_unlock(&p.inspections)
    return seen


cdef Inspection* state_of(Core* e, bint running) except NULL:
    """Call take_inspection without the GIL; raise MemoryError if it returns NULL."""
    cdef Inspection* seen
    with nogil:
        seen = take_inspection(e, running)
    if seen == NULL:
        raise MemoryError("no memory for the averaging engine")
    return seen


cdef Orders orders_given(Core* e) noexcept nogil:
    cdef Orders given
    pthread_mutex_lock(&e.mailbox.gate)
    given = e.mailbox.given
    pthread_mutex_unlock(&e.mailbox.gate)
    return given


cdef exchange_view(ExchangeLook* x, double t):
    names = ("idle", "asked", "running", "closing", "broken")
    return {"exchange": names[x.phase], "we_asked": bool(x.active), "parked": bool(x.parked),
            "number": x.number, "chunks": x.nchunks, "begun": x.next, "merged": x.done,
            "age_s": t - x.began, "silent_s": t - x.moved}


cdef mean_view(Core* e, Inspection* seen, double t):
    return {"wanted": load(&e.mean.wanted), "finished": load(&e.mean.finished), "running": bool(seen.averaging),
            "super_learners": seen.members, "stage": ("summing", "agreeing")[seen.stage],
            "chunks": seen.nchunks, "begun": seen.next, "merged": seen.done,
            "age_s": t - seen.began if seen.averaging else None,
            "silent_s": t - seen.moved if seen.averaging else None}


cdef counters_of(Core* e):
    """Return the thread's counters as a dict, read without waiting for the thread."""
    cdef Counters* c = &e.mailbox.counters
    return {
        "exchanges_active": load(&c.exchanges_active), "exchanges_passive": load(&c.exchanges_passive),
        "refused": load(&c.refused), "declined": load(&c.declined), "parked": load(&c.parked),
        "broken": load(&c.broken), "void_chunks": load(&c.void_chunks), "compared": load(&c.compared),
        "chunks": load(&c.chunks), "bytes_sent": load(&c.bytes_sent),
        "bytes_received": load(&c.bytes_received), "bytes_shared": load(&c.bytes_shared), "square": load_double(&c.square), "turns": load(&c.turns),
        "square_elements": load(&c.square_elements), "last_square": load_double(&c.last_square),
        "exchange_s": load_double(&c.exchange_s), "busy_s": load_double(&c.busy_s), "link_s": load_double(&c.link_s), "means": load(&c.means), "mean_s": load_double(&c.mean_s),
        "mean_square": load_double(&c.mean_square),
        "staleness": [load(&c.staleness[i]) for i in range(HISTOGRAM)],
        **{table.name: [load(count_of(&e.mailbox, <PeerCount>what, i)) for i in range(e.wire.size)]
           for table, what in zip(PEER_TABLES, range(PEER_COUNTS), strict=True)},
    }


cdef view_of(Core* e, bint running):
    """Return the thread's state between two of its turns as a dict; ages in seconds."""
    cdef Orders given = orders_given(e)
    cdef Inspection* seen = state_of(e, running)
    cdef double t = now(e)
    states = ("alive", "suspect", "left", "failed")
    exchanges = {seen.exchanges[i].peer: exchange_view(&seen.exchanges[i], t) for i in range(seen.nexchanges)}
    idle = {"exchange": "idle", "we_asked": False, "parked": False, "number": 0, "chunks": 0, "begun": 0,
            "merged": 0, "age_s": None, "silent_s": None}
    peers = [{"peer": i, "state": states[seen.states[i]], "exchanges": load(count_of(&e.mailbox, MET, i)),
              **exchanges.get(i, idle)} for i in range(e.wire.size)]
    view = {
        "ended": bool(load(&e.mailbox.ended)), "step": given.step, "fit": bool(given.fit),
        "paused": bool(given.paused), "leaving": bool(given.leaving),
        "asking": seen.asking, "serving": seen.serving, "wanted": given.wanted,
        "round": given.round, "credit": given.credit,
        "sending": bool(seen.sending), "fault": load(&e.mailbox.fault),
        "mean": mean_view(e, seen, t), "peers": peers, "counters": counters_of(e),
    }
    free(seen)
    return view
