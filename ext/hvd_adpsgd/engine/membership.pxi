"""States of the peers.

    ALIVE <-> SUSPECT     the peer is silent for deadline_s; it answers again
    both -> LEFT          the peer announces that it has left
    both -> FAILED        the wire reports that the peer has failed
"""

cdef bint open_membership(Membership* m, int own, int size, int64_t* changes) noexcept:
    m.size = size
    m.own = own
    m.changes = changes
    m.states = <char*>calloc(4 * size, 1)
    m.left_broken = m.states + size
    m.ended = m.left_broken + size
    m.answered = m.ended + size
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


cdef void note_departure(Membership* m, int peer, bint broken) noexcept nogil:
    """Process BYE of a peer; `broken`: it leaves because it failed."""
    store_byte(&m.left_broken[peer], broken)    # before `changes`: then the trainer reads both
    set_peer(m, peer, LEFT)
