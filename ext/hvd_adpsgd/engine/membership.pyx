# cython: language_level=3
# Why compiled: the engine's thread reads and writes it without the GIL.
"""States of the peers, and who is told of departures.

    ALIVE <-> SUSPECT     silent for deadline_s; answers again
    both -> LEFT          it, or another one, says that it has left
    both -> FAILED        the wire reports it

An engine tells its listeners what departures it knows of: of the peers that are there, the first one 1, 2, 4, ...
ranks behind it. Whoever learns of a departure tells its own listeners, so a departure reaches n engines in
log2(n) hops, with log2(n) messages of each. The first listener is the next engine that is there: from one to the
next every departure reaches all of them, whichever of the others have left meanwhile.
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
    """True if that changed its state. LEFT and FAILED are final.

    The process of a peer that left ends, which the wire may report as a failure: it stays LEFT."""
    cdef Peer before = <Peer>m.states[peer]
    if before == state or before >= LEFT:
        return False
    store_byte(&m.states[peer], <char>state)
    m.unchecked = True
    store(m.changes, m.changes[0] + 1)
    return True


cdef void note_end(Membership* m, int peer) noexcept nogil:
    """The wire reports that a peer has failed; one that has left has only ended."""
    m.ended[peer] = True
    if not set_peer(m, peer, FAILED):
        store(m.changes, m.changes[0] + 1)


cdef bint is_gone(Membership* m, int peer) noexcept nogil:
    """Whether nothing is to be expected of a peer: it failed, or it left and its process has ended."""
    return m.states[peer] == FAILED or (m.states[peer] == LEFT and (m.ended[peer] or m.left_broken[peer]))


# ---- departures ----------------------------------------------------------------------------

cdef int departed_nbytes(int size) noexcept nogil:
    return (size + 3) // 4


cdef bint has_departed(const unsigned char* departed, int i) noexcept nogil:
    return (departed[i // 4] >> 2 * (i % 4)) & 1


cdef bint left_as_broken(const unsigned char* departed, int i) noexcept nogil:
    return (departed[i // 4] >> (2 * (i % 4) + 1)) & 1


cdef int next_departed(Membership* m, const unsigned char* departed, int first) noexcept nogil:
    """The first engine from `first` on that has left, which this one does not know; NOBODY if there is none."""
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
    """An engine, perhaps this one, has left; `broken`: because it failed."""
    if has_departed(m.departed, i):
        return
    m.departed[i // 4] |= (3 if broken else 1) << 2 * (i % 4)
    m.known += 1
    m.unchecked = True
    if i != m.own:
        store_byte(&m.left_broken[i], broken)   # before set_peer tells the trainer, who reads both
        set_peer(m, i, LEFT)


cdef bint knows_no_more(Membership* m, const unsigned char* departed) noexcept nogil:
    """Whether these departures are all that this engine knows of."""
    return memcmp(departed, m.departed, departed_nbytes(m.size)) == 0


# ---- listeners -----------------------------------------------------------------------------

cdef Listener* listener_of(Membership* m, int peer) noexcept nogil:
    """NULL if the peer is none."""
    cdef int i
    for i in range(m.nlisteners):
        if m.listeners[i].peer == peer:
            return &m.listeners[i]
    return NULL


cdef int first_from(Membership* m, int start, bint there) noexcept nogil:
    """The first peer from `start` on, in the order of ranks, that may be there, or (`there`) that answers.

    NOBODY if that is this engine."""
    cdef int peer = start % m.size
    while peer != m.own:
        if m.states[peer] == ALIVE and not m.mute[peer] or not there and m.states[peer] <= SUSPECT:
            return peer
        peer = (peer + 1) % m.size
    return NOBODY


cdef void add_listener(Membership* m, const Membership* before, int peer) noexcept nogil:
    """What it was told before still counts."""
    cdef int i
    if peer == NOBODY or listener_of(m, peer) != NULL:
        return
    m.listeners[m.nlisteners] = [peer, 0, 0, 0]
    for i in range(before.nlisteners):
        if before.listeners[i].peer == peer:
            m.listeners[m.nlisteners] = before.listeners[i]
    m.nlisteners += 1


cdef void choose_listeners(Membership* m) noexcept nogil:
    """The first peers 1, 2, 4, ... ranks behind this one. Behind one that is silent also one that is not."""
    cdef Membership before = m[0]
    cdef int64_t distance = 1
    m.nlisteners = 0
    while distance < m.size:
        add_listener(m, &before, first_from(m, <int>(m.own + distance), False))
        add_listener(m, &before, first_from(m, <int>(m.own + distance), True))
        distance *= 2


cdef int hops(Membership* m) noexcept nogil:
    """That a departure takes to reach all: log2(n), rounded up."""
    cdef int count = 0
    while (<int64_t>1 << count) < m.size:
        count += 1
    return count


cdef void give_up_listeners(Membership* m, double before) noexcept nogil:
    """Peers that have not answered a BYE sent at that time or earlier: they may have left unnoticed."""
    cdef int i
    for i in range(m.nlisteners):
        if m.listeners[i].acknowledged < m.owed and m.listeners[i].told_at < before and not m.mute[m.listeners[i].peer]:
            m.mute[m.listeners[i].peer] = True
            m.unchecked = True


cdef bint is_taken_over(Membership* m, bint late) noexcept nogil:
    """Whether a listener that stays has answered the departure of this engine, or none is there to answer.

    Those that are silent or suspect may be slow, and are waited for until it is `late`."""
    cdef int i
    cdef bint alone = True
    for i in range(m.nlisteners):
        if m.listeners[i].acknowledged >= m.owed:
            return True
        alone = alone and (m.states[m.listeners[i].peer] > SUSPECT or late and m.mute[m.listeners[i].peer])
    return alone
