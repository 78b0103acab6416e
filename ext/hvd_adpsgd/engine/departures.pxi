"""Departures of engines: an engine that leaves says BYE to each peer, and each peer answers BYE_SEEN.

An engine ends once all peers have answered. A peer that leaves at the same time answers too, before it ends; one
that had left before, or whose process has ended, is not asked. A silent peer finds the BYE when it continues: the
engine waits for answers at most half of the time that it has to leave.

n - 1 messages of each engine: gossip would need log2(n), with acknowledgements that departures were taken over.
"""

cdef void announce_departure(Core* e) noexcept nogil:
    """Send BYE to all peers that may still run."""
    cdef Membership* m = &e.membership
    cdef int peer
    m.departing = True
    m.said_at = now(e)
    for peer in range(m.size):
        m.answered[peer] = peer == m.own or m.states[peer] >= LEFT
        if not m.answered[peer]:
            send_control(e, peer, BYE, e.mailbox.orders.broken, 0)


cdef bint departure_is_known(Core* e) noexcept nogil:
    """Whether all peers that may still run have answered this engine's BYE, or it is late."""
    cdef Membership* m = &e.membership
    cdef int peer
    for peer in range(m.size):
        if not m.answered[peer] and m.states[peer] < FAILED and not m.ended[peer]:
            return 2 * now(e) > m.said_at + m.leave_by
    return True
