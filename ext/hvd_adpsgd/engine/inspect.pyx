# cython: language_level=3
# Why compiled: it copies what only the engine's thread writes, while that thread stands still.
"""The state of the engine's thread, as Python sees it.

The thread looks after each turn whether an inspection is wanted. If so it stands still until the copy is made:

    trainer                                 thread
    inspection_wanted = k
                                            end of a turn: inspection_begun = k, stands still
    copies the state; inspection_over = k
                                            next turn
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from hvd_adpsgd.engine.doorbell cimport ring
from hvd_adpsgd.engine.core cimport *
from hvd_adpsgd.engine.mailbox cimport *
from hvd_adpsgd.engine.store cimport pthread_mutex_t

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef double LOOK_S = 1.0            # longest wait for the end of a turn


# ---- the thread's side -----------------------------------------------------------------------

cdef void stand_still(Core* e) noexcept nogil:
    """Between two turns: wait while the trainer looks at the state of the thread."""
    cdef int64_t number = load(&e.mailbox.inspection_wanted)
    if number == load(&e.mailbox.inspection_over):
        return
    store(&e.mailbox.inspection_begun, number)
    while load(&e.mailbox.inspection_over) < number:
        sched_yield()


# ---- the trainer's side ----------------------------------------------------------------------

cdef struct ExchangeLook:   # of an exchange, without its transfers and their buffers, where the wire may write
    int peer
    Phase phase
    bint active
    bint parked
    bint cut
    int number
    int nchunks
    int next
    int done
    double began
    double moved

cdef struct Inspection:           # a copy of what only the thread writes
    int asking
    int serving
    bint sending
    bint averaging          # the mean of all runs
    MeanStage stage
    int members             # of the mean
    int nchunks
    int next
    int done
    double began
    double moved
    char* states            # of the peers
    ExchangeLook* exchanges # in one block with the states
    int nexchanges


cdef bint take_inspection(Core* e, bint running, Inspection* seen) noexcept nogil:
    """Copy the state of the thread between two of its turns; free(seen.exchanges). False without memory.

    A thread that does not end its turn in LOOK_S, in a call of the wire's library, is copied as it is. Without the
    GIL: the thread stands still meanwhile."""
    cdef bint copied
    cdef int64_t number
    cdef double until = now(e) + LOOK_S
    pthread_mutex_lock(&e.mailbox.inspections)
    number = load(&e.mailbox.inspection_wanted) + 1
    store(&e.mailbox.inspection_wanted, number)
    ring(e.mailbox.doorbell)               # it may sleep
    while running and load(&e.mailbox.inspection_begun) < number and not load(&e.mailbox.ended) and now(e) < until:
        e.clock.sleep(e.clock, 20e-6)
    copied = copy_state(e, seen)
    store(&e.mailbox.inspection_over, number)
    pthread_mutex_unlock(&e.mailbox.inspections)
    return copied


cdef bint copy_state(Core* e, Inspection* seen) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef Exchange* x = e.pairs.running
    cdef int most = 0
    while x != NULL:
        most += 1
        x = x.next_one
    seen.exchanges = <ExchangeLook*>malloc(most * sizeof(ExchangeLook) + e.wire.size)
    if seen.exchanges == NULL:
        return False
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
            seen.exchanges[seen.nexchanges] = [x.peer, x.phase, x.active, x.parked, x.cut, x.number, x.nchunks, x.next,
                                               x.done, x.began, x.moved]
            seen.nexchanges += 1
        x = x.next_one
    return True


cdef Inspection state_of(Core* e, bint running) except *:
    """The same for Python; the caller frees `exchanges`."""
    cdef Inspection seen
    cdef bint copied
    with nogil:
        copied = take_inspection(e, running, &seen)
    if not copied:
        raise MemoryError("engine")
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


cdef exchanges_under_way(Core* e, bint running):
    """See Loop.under_way."""
    cdef Inspection seen = state_of(e, running)
    cdef ExchangeLook* x
    out = []
    for i in range(seen.nexchanges):
        x = &seen.exchanges[i]
        if x.phase > ASKED:
            out.append({"peer": x.peer, "asked": bool(x.active), "parked": bool(x.parked),
                        "broken": x.phase == BROKEN, "cut": bool(x.cut), "done": x.done, "chunks": x.nchunks,
                        "since": x.began})
    free(seen.exchanges)
    return out


cdef counters_of(Core* e):
    """Counters that the thread keeps, read without waiting for it."""
    cdef Counters* c = &e.mailbox.counters
    return {
        "exchanges_active": load(&c.exchanges_active), "exchanges_passive": load(&c.exchanges_passive),
        "refused": load(&c.refused), "declined": load(&c.declined), "parked": load(&c.parked),
        "broken": load(&c.broken), "void_chunks": load(&c.void_chunks), "compared": load(&c.compared),
        "chunks": load(&c.chunks), "bytes_sent": load(&c.bytes_sent),
        "bytes_received": load(&c.bytes_received), "square": load_double(&c.square), "turns": load(&c.turns),
        "square_elements": load(&c.square_elements), "last_square": load_double(&c.last_square),
        "exchange_s": load_double(&c.exchange_s), "means": load(&c.means), "mean_s": load_double(&c.mean_s),
        "mean_square": load_double(&c.mean_square),
        "staleness": [load(&c.staleness[i]) for i in range(HISTOGRAM)],
        "met": [load_count(&e.mailbox.met[i]) for i in range(e.wire.size)],
    }


cdef view_of(Core* e, bint running):
    """The thread's state between two of its turns; ages in seconds."""
    cdef Orders given = orders_given(e)
    cdef Inspection seen = state_of(e, running)
    cdef double t = now(e)
    states = ("alive", "suspect", "left", "failed")
    exchanges = {seen.exchanges[i].peer: exchange_view(&seen.exchanges[i], t) for i in range(seen.nexchanges)}
    idle = {"exchange": "idle", "we_asked": False, "parked": False, "number": 0, "chunks": 0, "begun": 0,
            "merged": 0, "age_s": None, "silent_s": None}
    peers = [{"peer": i, "state": states[seen.states[i]], "exchanges": load_count(&e.mailbox.met[i]),
              **exchanges.get(i, idle)} for i in range(e.wire.size)]
    free(seen.exchanges)
    return {
        "ended": bool(load(&e.mailbox.ended)), "step": given.step, "fit": bool(given.fit),
        "paused": bool(given.paused), "leaving": bool(given.leaving),
        "asking": seen.asking, "serving": seen.serving, "wanted": given.wanted,
        "round": given.round, "credit": given.credit,
        "sending": bool(seen.sending), "fault": load(&e.mailbox.fault),
        "mean": mean_view(e, &seen, t), "peers": peers, "counters": counters_of(e),
    }
