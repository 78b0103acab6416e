# cython: language_level=3
# Why compiled: it runs on the engine's thread, without the GIL.
"""Departures: BYE of an engine that leaves, NEWS of departures from one that stays, and their answers.

    BYE, NEWS  ------------->     all departures that the sender knows of
               <-------------     BYE_SEEN: this engine stays, and tells its listeners
               <-------------     BYE: it has left itself; choose another listener

An engine may end once a listener that stays has answered: it tells the rest. So an engine has log2(n) BYEs to
send, and each departure costs every other engine at most as many messages: fewer if several come together, because a
listener is sent no NEWS before it has answered the last. A listener that has ended answers nothing: after a while
(PATIENCE) another one is chosen beside it. An engine also ends if no peer that may be there has answered in half of the
time that it has left: at the end of a job the last ones may have ended before they could say so.
"""

from hvd_adpsgd.engine.control cimport send_departures, send_control
from hvd_adpsgd.engine.core cimport *
from hvd_adpsgd.engine.membership cimport (Listener, Membership, choose_listeners, give_up_listeners, has_departed,
                                           hops, is_taken_over, knows_no_more, listener_of, note_departure)

cdef double PATIENCE = 0.04         # for the answer to a BYE, times leave_deadline_s


cdef void announce_departure(Core* e) noexcept nogil:
    """Tell the listeners that this engine leaves, and what other departures it knows of."""
    cdef Membership* m = &e.membership
    m.departing = True
    m.said_at = now(e)
    note_departure(m, m.own, e.mailbox.orders.broken)
    m.owed = m.known
    pass_on(e)


cdef void pass_on(Core* e) noexcept nogil:
    """Tell the listeners of departures that they may not know."""
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
    """Whether one that stays has taken over the departure of this engine, and others had the time to learn of it.

    For that time, log2(n) answers, it answers peers that have chosen it as a listener: they would wait in vain."""
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
    """The departures behind a BYE or NEWS."""
    return <const unsigned char*>(m + 1)


cdef void answer(Core* e, int peer, Message* message) noexcept nogil:
    """Answer BYE or NEWS: only an engine that stays takes over the telling."""
    cdef Membership* m = &e.membership
    cdef Listener* listener = listener_of(m, peer)
    if not m.departing:
        send_control(e, peer, BYE_SEEN, message.exchange, 0)
    elif not has_departed(departed_in(message), m.own):
        send_departures(e, peer, BYE)
    if listener != NULL and knows_no_more(m, departed_in(message)):
        listener.sent = listener.acknowledged = m.known


cdef void note_answer(Core* e, int peer, Message* message) noexcept nogil:
    """BYE_SEEN: the listener knows as many departures as our message held."""
    cdef Listener* listener = listener_of(&e.membership, peer)
    if listener != NULL:
        listener.acknowledged = max(listener.acknowledged, min(message.exchange, listener.sent))
        e.membership.answer_s = max(e.membership.answer_s, now(e) - listener.told_at)
        e.membership.unchecked = True
