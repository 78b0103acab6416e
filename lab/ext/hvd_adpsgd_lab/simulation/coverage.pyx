# cython: language_level=3
# Why compiled: it reads the state of an engine before every turn.
"""Counts of the messages, silences and failures of a peer, by the state of the exchange with the peer."""

from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport ASKED, CLOSING, IDLE, RUNNING, Core, Exchange
from hvd_adpsgd.engine.wire cimport PENDING
from hvd_adpsgd_lab.simulation.network cimport COMPLETE, Link

STATES = ("none", "asked", "running", "held", "parked", "closing", "closing, parked", "broken")
MESSAGES = ("ask", "yes", "no", "bye", "bye seen", "cut", "cut seen", "report", "failure", "silence")


cdef void cover(int64_t* counts, Link* link, Core* e) noexcept:
    """Count what the next turn of an engine will find: a control message, failures of peers."""
    down = link.downs
    if e.control.listening.in_use and e.control.listening.status == PENDING \
            and e.control.listening.handle == COMPLETE:
        covered(counts, e, e.control.listening.peer, e.control.inbox.kind - 1, False)
    while down != NULL:
        if not down.told:
            covered(counts, e, down.peer, FAILURE, False)
        down = down.next_one


cdef void covered(int64_t* counts, Core* e, int peer, int message, bint was_active) noexcept:
    cdef Exchange* x = e.pairs.running
    cdef int state = 0
    while x != NULL and (x.peer != peer or x.phase == IDLE):
        x = x.next_one
    if x != NULL:
        state = state_of(x, x.parked and not was_active)
    counts[state * NMESSAGES + message] += 1


cdef object phase_of(Core* e):
    """Return what the engine is doing, as text: states of its exchanges, a mean, leaving, paused."""
    cdef Exchange* x = e.pairs.running
    found = set()
    while x != NULL:
        if x.phase != IDLE:
            found.add(STATES[state_of(x, x.parked)])
        x = x.next_one
    if e.mean.running:
        found.add("mean")
    if e.mailbox.given.leaving:
        found.add("leaving")
    if e.mailbox.given.paused:
        found.add("paused")
    return " + ".join(sorted(found)) or "idle"


cdef int state_of(Exchange* x, bint parked) noexcept nogil:
    """Return the state of an exchange, as an index of STATES."""
    if x.phase == ASKED:
        return 1
    if x.phase == RUNNING:
        return 4 if parked else 3 if x.held else 2
    if x.phase == CLOSING:
        return 6 if parked else 5
    return 7
