# cython: language_level=3
# Why compiled: the engine's thread reads and writes it without the GIL.
"""States of the peers, and the peers to which departures are sent.

    ALIVE <-> SUSPECT     the peer is silent for deadline_s; it answers again
    both -> LEFT          the peer, or another one, announces that the peer has left
    both -> FAILED        the wire reports that the peer has failed

An engine sends the departures that it knows of to its listeners: for each distance 1, 2, 4, ... the first
peer at least so many ranks behind it that has not left or failed. An engine that learns of a departure sends
it to its own listeners, so a departure reaches n engines in log2(n) hops, with log2(n) messages of each
engine. The first listener is the next running engine: along this ring every departure reaches all engines,
whichever of them have left meanwhile.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp

from hvd_adpsgd.engine.membership cimport *
from hvd_adpsgd.engine.mailbox cimport store, store_byte
from hvd_adpsgd.engine.wire cimport NOBODY


cdef bint open_membership(Membership* m, int own, int size, int64_t* changes) noexcept:
    m.size = size
    m.own = own
    m.changes = changes
    m.states = <char*>calloc(4 * size + departed_nbytes(size), 1)
    m.left_broken = m.states + size
    m.ended = m.left_broken + size
    m.mute = m.ended + size
    m.departed = <unsigned char*>m.mute + size
    return m.states != NULL


cdef void close_membership(Membership* m) noexcept:
    free(m.states)
    m.states = NULL


cdef bint set_peer(Membership* m, int peer, Peer state) noexcept nogil:
    """Set the state of a peer, and return whether that changed it. LEFT and FAILED are final.

    When the process of a peer that left ends, the wire may report a failure: the peer stays LEFT."""
    cdef Peer before = <Peer>m.states[peer]
    if before == state or before >= LEFT:
        return False
    store_byte(&m.states[peer], <char>state)
    m.unchecked = True
    store(m.changes, m.changes[0] + 1)
    return True


cdef void note_end(Membership* m, int peer) noexcept nogil:
    """Process the wire's report that a peer has failed: if it has left, only its process has ended."""
    m.ended[peer] = True
    if not set_peer(m, peer, FAILED):
        store(m.changes, m.changes[0] + 1)


cdef bint is_gone(Membership* m, int peer) noexcept nogil:
    """Whether a peer sends nothing any more: it failed, or it left and its process has ended."""
    return m.states[peer] == FAILED or (m.states[peer] == LEFT and (m.ended[peer] or m.left_broken[peer]))


# ---- departures ----------------------------------------------------------------------------

cdef int departed_nbytes(int size) noexcept nogil:
    return (size + 3) // 4


cdef bint has_departed(const unsigned char* departed, int i) noexcept nogil:
    return (departed[i // 4] >> 2 * (i % 4)) & 1


cdef bint left_as_broken(const unsigned char* departed, int i) noexcept nogil:
    return (departed[i // 4] >> (2 * (i % 4) + 1)) & 1


cdef int next_departed(Membership* m, const unsigned char* departed, int first) noexcept nogil:
    """Return the first engine from `first` on in `departed` that is unknown here; NOBODY if none."""
    cdef int i = first
    while i < m.size:
        if departed[i // 4] == m.departed[i // 4]:
            i = 4 * (i // 4 + 1)
        elif has_departed(departed, i) and not has_departed(m.departed, i):
            return i
        else:
            i += 1
    return NOBODY


cdef void note_departure(Membership* m, int i, bint broken) noexcept nogil:
    """Store that an engine, perhaps this one, has left; `broken`: because it failed."""
    if has_departed(m.departed, i):
        return
    m.departed[i // 4] |= (3 if broken else 1) << 2 * (i % 4)
    m.known += 1
    m.unchecked = True
    if i != m.own:
        store_byte(&m.left_broken[i], broken)   # before `changes`: then the trainer reads both
        set_peer(m, i, LEFT)


cdef bint knows_no_more(Membership* m, const unsigned char* departed) noexcept nogil:
    """Whether `departed` equals the departures that this engine knows of."""
    return memcmp(departed, m.departed, departed_nbytes(m.size)) == 0


# ---- listeners -----------------------------------------------------------------------------

cdef Listener* listener_of(Membership* m, int peer) noexcept nogil:
    """Return the Listener of a peer; NULL if the peer is no listener."""
    cdef int i
    for i in range(m.nlisteners):
        if m.listeners[i].peer == peer:
            return &m.listeners[i]
    return NULL


cdef int first_from(Membership* m, int start, bint there) noexcept nogil:
    """Return the first peer from rank `start` on that has not left or failed; `there`: and that answers.

    NOBODY if there is none before this engine's own rank."""
    cdef int peer = start % m.size
    while peer != m.own:
        if m.states[peer] == ALIVE and not m.mute[peer] or not there and m.states[peer] <= SUSPECT:
            return peer
        peer = (peer + 1) % m.size
    return NOBODY


cdef void add_listener(Membership* m, const Membership* before, int peer) noexcept nogil:
    """Add a peer to the listeners, with its counts in `before`, unless it is among them."""
    cdef int i
    if peer == NOBODY or listener_of(m, peer) != NULL:
        return
    m.listeners[m.nlisteners] = [peer, 0, 0, 0]
    for i in range(before.nlisteners):
        if before.listeners[i].peer == peer:
            m.listeners[m.nlisteners] = before.listeners[i]
    m.nlisteners += 1


cdef void choose_listeners(Membership* m) noexcept nogil:
    """Choose the listeners: for each distance 1, 2, 4, ... the first peer that has not left or failed.

    If that peer is silent, also the first one behind it that answers."""
    cdef Membership before = m[0]
    cdef int64_t distance = 1
    m.nlisteners = 0
    while distance < m.size:
        add_listener(m, &before, first_from(m, <int>(m.own + distance), False))
        add_listener(m, &before, first_from(m, <int>(m.own + distance), True))
        distance *= 2


cdef int hops(Membership* m) noexcept nogil:
    """Return how many hops a departure takes to reach all engines: log2(n), rounded up."""
    cdef int count = 0
    while (<int64_t>1 << count) < m.size:
        count += 1
    return count


cdef void give_up_listeners(Membership* m, double before) noexcept nogil:
    """Mark listeners as mute that have not answered a BYE sent earlier than `before`: they may have ended."""
    cdef int i
    for i in range(m.nlisteners):
        if m.listeners[i].acknowledged < m.owed and m.listeners[i].told_at < before and not m.mute[m.listeners[i].peer]:
            m.mute[m.listeners[i].peer] = True
            m.unchecked = True


cdef bint is_taken_over(Membership* m, bint late) noexcept nogil:
    """Whether a listener that stays has answered the departure of this engine, or no listener can answer.

    Listeners that are silent or suspect may be slow: with `late`, mute ones count as unable to answer."""
    cdef int i
    cdef bint alone = True
    for i in range(m.nlisteners):
        if m.listeners[i].acknowledged >= m.owed:
            return True
        alone = alone and (m.states[m.listeners[i].peer] > SUSPECT or late and m.mute[m.listeners[i].peer])
    return alone
