"""Departures of engines: BYE of an engine that leaves, NEWS of departures by others, and the answers to both.

    BYE, NEWS  ------------->     all departures that the sender knows of
               <-------------     BYE_SEEN: the receiver stays, and passes the departures on to its listeners
               <-------------     BYE: the receiver has left, too; choose another listener

An engine may end once a listener that stays has answered, because that listener passes the departure on. So
an engine sends log2(n) BYEs, and each departure costs every other engine at most log2(n) messages: fewer if
several departures come together, because a listener is sent no NEWS before it has answered the last one. A
listener that has ended answers nothing: after PATIENCE another one is chosen beside it. An engine also ends
if no peer that may still run has answered within half of the time that it has to leave: at the end of a job
the last peers may have ended before they could send BYE.
"""

cdef double PATIENCE = 0.04         # longest wait for the answer to a BYE, as a fraction of leave_deadline_s


cdef void announce_departure(Core* e) noexcept nogil:
    """Send BYE to the listeners, with all departures that this engine knows of."""
    cdef Membership* m = &e.membership
    m.departing = True
    m.said_at = now(e)
    note_departure(m, m.own, e.mailbox.orders.broken)
    m.owed = m.known
    pass_on(e)


cdef void pass_on(Core* e) noexcept nogil:
    """Send departures to the listeners that may not know them: BYE if this engine leaves, else NEWS."""
    cdef Membership* m = &e.membership
    cdef Listener* listener
    cdef int i
    m.unchecked = False
    if m.known == 0:
        return
    choose_listeners(m)
    for i in range(m.nlisteners):
        listener = &m.listeners[i]
        if m.departing:
            if listener.sent < m.owed:
                tell(e, listener, BYE)
        elif listener.sent < m.known and listener.acknowledged == listener.sent:
            tell(e, listener, NEWS)


cdef bint departure_is_taken_over(Core* e) noexcept nogil:
    """Whether a listener that stays has answered this engine's BYE, and all engines had time to learn of it.

    During that time (log2(n) times the longest answer) this engine still answers peers that chose it as a
    listener: without an answer they would wait in vain."""
    cdef Membership* m = &e.membership
    cdef double patience = PATIENCE * e.leave_deadline_s
    give_up_listeners(m, now(e) - patience)
    if m.unchecked:
        pass_on(e)
    if m.end_at == 0 and is_taken_over(m, 2 * now(e) > m.said_at + m.leave_by):
        m.end_at = now(e) + min(m.answer_s, patience) * hops(m)
    return m.end_at > 0 and now(e) >= m.end_at


cdef void tell(Core* e, Listener* listener, Kind kind) noexcept nogil:
    listener.told_at = now(e)
    listener.sent = e.membership.known
    send_departures(e, listener.peer, kind)


cdef const unsigned char* departed_in(Message* m) noexcept nogil:
    """Return the departures that follow a BYE or NEWS, two bits for each engine."""
    return <const unsigned char*>(m + 1)


cdef void answer(Core* e, int peer, Message* message) noexcept nogil:
    """Answer BYE or NEWS: BYE_SEEN if this engine stays, BYE if it has left and the sender does not know."""
    cdef Membership* m = &e.membership
    cdef Listener* listener = listener_of(m, peer)
    if not m.departing:
        send_control(e, peer, BYE_SEEN, message.exchange, 0)
    elif not has_departed(departed_in(message), m.own):
        send_departures(e, peer, BYE)
    if listener != NULL and knows_no_more(m, departed_in(message)):
        listener.sent = listener.acknowledged = m.known


cdef void note_answer(Core* e, int peer, Message* message) noexcept nogil:
    """Process BYE_SEEN: the listener knows as many departures as our message to it contained."""
    cdef Listener* listener = listener_of(&e.membership, peer)
    if listener != NULL:
        listener.acknowledged = max(listener.acknowledged, min(message.exchange, listener.sent))
        e.membership.answer_s = max(e.membership.answer_s, now(e) - listener.told_at)
        e.membership.unchecked = True
