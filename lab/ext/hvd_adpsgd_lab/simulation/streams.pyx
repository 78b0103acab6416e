# cython: language_level=3
# Why compiled: engines call it as their wire, through C function pointers.
"""A wire whose messages travel over connections that may end, as those of wire_tcp do, in virtual time.

All messages of one engine to another form a stream: they arrive in the order in which they were sent,
whatever their channels. A connection may end at any moment. Then a random initial part of the messages in
flight still arrives, until the peer has accepted the next connection; the rest and counts in flight are lost.
The functions that wire_tcp uses (engine/matching) decide which messages are sent again, and when a send is
complete. Small messages are copied when they are sent; chunks and sums are read from the sender's buffer when
they arrive, which reveals a buffer that was changed too early.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, malloc, realloc
from libc.string cimport memcpy

from hvd_adpsgd.engine.matching cimport Post, take_post
from hvd_adpsgd.engine.matching cimport (COUNTS, append, copied_post, counted, fail_all, let_go, note_sent, own, resume,
                                            take_count)
from hvd_adpsgd.engine.wire cimport DATA, PEER_DOWN, PENDING, Status, Transfer, Wire
from hvd_adpsgd_lab.simulation.chance cimport happens, uniform
from hvd_adpsgd_lab.simulation.network cimport (LATE, Envelope, Link, Net, Network, Stream, begin_send, cut_until, enter, keep_trace,
                                            lose_from, schedule, simulated_release, simulated_test, wake)
from hvd_adpsgd_lab.simulation.streams cimport *


cdef uint64_t TO_SEND = 1 << 31     # in place of a count: time for the receiver to send one


cdef inline Stream* stream_of(Net* net, int src, int dst) noexcept nogil:
    return &net.streams[src * net.n + dst]


# ---- the wire ------------------------------------------------------------------------------

cdef Status stream_send(Wire* wire, Transfer* t, const void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    cdef Link* link = <Link*>wire.own
    cdef Net* net = link.net
    cdef Post* post
    if not begin_send(link, t, nbytes, peer, channel):
        return PEER_DOWN
    post = new_post(net, peer, channel, buffer, nbytes)
    t.handle = <uint64_t>post
    append(&stream_of(net, link.first + wire.rank, link.first + peer).outgoing, post)
    send_out(net, stream_of(net, link.first + wire.rank, link.first + peer))
    return PENDING


cdef Post* new_post(Net* net, int peer, int channel, const void* buffer, int nbytes) noexcept nogil:
    """Return a post for a message; the network frees all posts at its end, also those of crashed engines."""
    cdef bint is_new = net.posts.pool == NULL
    cdef Post* post
    if channel < DATA:
        post = copied_post(&net.posts, peer, channel, buffer, nbytes)
    else:
        post = take_post(&net.posts, peer, channel, <void*>buffer, nbytes)
    if is_new:
        net.made = <Post**>realloc(net.made, (net.nmade + 1) * sizeof(Post*))
        net.made[net.nmade] = post
        net.nmade += 1
    return post


cdef void send_out(Net* net, Stream* s) noexcept nogil:
    """Send all unsent messages, if there is a connection and no first count must be awaited."""
    cdef Envelope* m
    cdef Post* post = s.outgoing.unsent
    if not s.is_open or s.outgoing.resumes:
        return
    while post != NULL:
        m = <Envelope*>calloc(1, sizeof(Envelope))
        m.src, m.dst, m.channel, m.nbytes = s.src, s.dst, post.channel, post.nbytes
        m.post = post
        m.source = post.buffer
        schedule(net, &net.links[s.src], m)
        if net.trace != NULL:
            keep_trace(net, m)
        post = note_sent(&s.outgoing)


cdef Status stream_test(Wire* wire, Transfer* t) noexcept nogil:
    cdef Post* post = <Post*>t.handle
    cdef Status status
    if t.receives:
        return simulated_test(wire, t)
    status = post.status
    if status != PENDING:
        t.in_use = False
        let_go(&(<Link*>wire.own).net.posts, post)
    return status


cdef bint stream_release(Wire* wire, Transfer* t) noexcept nogil:
    cdef Net* net = (<Link*>wire.own).net
    if t.receives:
        return simulated_release(wire, t)
    if not t.in_use:
        return True
    if happens(&net.chance, 0.3) or not own(<Post*>t.handle):
        return False
    let_go(&net.posts, <Post*>t.handle)
    t.in_use = False
    return True


# ---- what happens to messages --------------------------------------------------------------

cdef double delay(Net* net, int src, int dst) noexcept nogil:
    """Return how long a head without a message takes, in seconds."""
    cdef double seconds = net.rules.latency_s * (1.0 + net.rules.jitter * uniform(&net.chance))
    if happens(&net.chance, net.rules.late):
        seconds += LATE * net.rules.latency_s * uniform(&net.chance)
    return seconds + max(0.0, cut_until(net, net.links[src].process, net.links[dst].process) - net.now_s)


cdef void hold_message(Envelope* m) noexcept nogil:
    """Copy the bytes of a message in flight, so that the sender's buffer is no longer read."""
    m.copy = malloc(max(1, m.nbytes))
    memcpy(m.copy, m.post.buffer, m.nbytes)
    m.source = m.copy
    m.post = NULL


cdef void came(Net* net, Envelope* m) noexcept nogil:
    """Process the arrival of a message: count and confirm it; small ones later, as no send waits for that."""
    cdef double later
    cdef Stream* s = stream_of(net, m.src, m.dst)
    hold_message(m)
    s.received = counted(s.received)
    if m.channel >= DATA:
        send_count(net, s, 0.0)
        return
    later = net.now_s + LATE * net.rules.latency_s * uniform(&net.chance)
    enter(net, later, COUNT, s.src * net.n + s.dst, <void*><uintptr_t>((s.connection << 32) + TO_SEND))


cdef void send_count(Net* net, Stream* s, double asked_s) noexcept nogil:
    """Send the receiver's count after `asked_s` seconds; counts of a connection keep their order."""
    s.counted_at = max(net.now_s + asked_s + delay(net, s.dst, s.src), s.counted_at + 1e-9)
    enter(net, s.counted_at, COUNT, s.src * net.n + s.dst, <void*><uintptr_t>((s.connection << 32) + s.received))


cdef bint read_count(Net* net, int at, uint64_t what) noexcept nogil:
    """Process a COUNT entry: the sender of a stream reads a count, or the receiver sends one.

    Return False if the count exceeds the messages sent."""
    cdef Stream* s = &net.streams[at]
    if what >> 32 != s.connection or not s.is_open:
        return True                         # the count was lost with its connection
    if what & TO_SEND:
        send_count(net, s, 0.0)
        return True
    if not take_count(&s.outgoing, &net.posts, what & COUNTS):
        return False
    wake(net, s.src)
    send_out(net, s)
    return True


cdef void end_connection(Net* net, int src, int dst, double seconds) noexcept nogil:
    """End the connection of a stream, and schedule its next one in `seconds`.

    A random initial part of the messages in flight still arrives."""
    cdef Stream* s = stream_of(net, src, dst)
    cdef Envelope* m = net.links[dst].coming
    if not s.is_open:
        return
    s.is_open = False
    while m != NULL:
        if m.src == src and not m.arrived and happens(&net.chance, 0.5):
            lose_from(net, m)
        m = m.next_one
    enter(net, net.now_s + seconds, REDIAL, src * net.n + dst, NULL)


cdef void redial(Net* net, int at) noexcept nogil:
    """Open a new connection for a stream, or after the end of a cut; messages of the old one are lost."""
    cdef Stream* s = &net.streams[at]
    cdef int here = net.links[s.src].process, there = net.links[s.dst].process
    cdef double cut = max(cut_until(net, here, there), cut_until(net, there, here))
    cdef Envelope* m = net.links[s.dst].coming
    if cut > net.now_s:
        enter(net, cut, REDIAL, at, NULL)
        return
    while m != NULL:
        m.lost |= m.src == s.src and not m.arrived
        m = m.next_one
    s.is_open = True
    s.connection += 1
    s.counted_at = 0
    resume(&s.outgoing)
    if s.outgoing.resumes:
        send_count(net, s, delay(net, s.src, s.dst))        # after ASK_COUNT has arrived
    else:
        send_out(net, s)


cdef void shut(Net* net, int src, int dst) noexcept nogil:
    """Close a stream whose sender takes the peer for failed.

    Its sends fail; a random initial part of the messages in flight still arrives."""
    cdef Stream* s = stream_of(net, src, dst)
    cdef Envelope* m = net.links[dst].coming
    while m != NULL:
        if m.src == src and m.post != NULL and not m.lost:
            hold_message(m)
            if happens(&net.chance, 0.5):
                lose_from(net, m)
        m = m.next_one
    fail_all(&s.outgoing, &net.posts)
    s.is_open = False
    s.connection += 1
    wake(net, src)


cdef class StreamWire(SimulatedWire):
    """The wire of one engine in a Network with streams."""

    def __cinit__(self, Network network, int at):
        self.calls.send = stream_send
        self.calls.test = stream_test
        self.calls.release = stream_release
