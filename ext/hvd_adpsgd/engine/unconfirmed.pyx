# cython: language_level=3
# Why compiled: the engine's thread keeps these lists without the GIL.
"""What is sent again when a connection has ended: the messages that the peer has not confirmed, in their order.

The receiver counts the messages that have come whole, from the first one on, over all connections, and sends the count.
The sender keeps each message until such a count includes it. Over a new connection it sends nothing until it has the
first count, and then all messages behind it, from their first bytes. So each message arrives once, in order.

wire_tcp and the simulator's network both keep this rule by these functions.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from hvd_adpsgd.engine.matching cimport give_post, settle, take_post
from hvd_adpsgd.engine.unconfirmed cimport *


cdef Post* copied_post(Posts* p, int peer, int channel, const void* buffer, int nbytes) noexcept nogil:
    """A post with a copy of the message; NULL without memory."""
    cdef char* copy = <char*>malloc(nbytes + 1)
    cdef Post* post = take_post(p, peer, channel, copy, nbytes) if copy != NULL else NULL
    if post == NULL:
        free(copy)
        return NULL
    memcpy(copy, buffer, nbytes)
    post.owned = True
    return post


cdef bint append(Unconfirmed* u, Post* post) noexcept nogil:
    """Queue a message. Whether it is the next one to be sent."""
    post.queued = True
    if u.first == NULL:
        u.first = post
    else:
        u.last.after = post
    u.last = post
    if u.unsent != NULL:
        return False
    u.unsent = post
    return True


cdef Post* note_sent(Unconfirmed* u) noexcept nogil:
    """The system has all of the next message, which stays until it is confirmed. The one behind it, or NULL."""
    cdef Post* post = u.unsent
    u.moved = 0
    u.sent += 1
    if post.owned:
        post.status = DONE
    u.unsent = post.after
    return u.unsent


cdef void resume(Unconfirmed* u) noexcept nogil:
    """There is a new connection. What is sent and not confirmed may be lost; a message that was sent in part is."""
    u.moved = 0
    u.resumes = u.first != u.unsent


cdef bint take_count(Unconfirmed* u, Posts* p, uint32_t count) noexcept nogil:
    """The peer has so many messages whole. False if it cannot have them."""
    cdef Post* post
    cdef uint32_t more = (count - u.confirmed) & COUNTS
    if more > ((u.sent - u.confirmed) & COUNTS):
        return False
    while more > 0:
        post = u.first
        u.first = post.after
        u.confirmed += 1
        more -= 1
        settle(p, post, DONE)
    if u.resumes:                   # the others were lost with the connection before
        u.resumes = False
        u.sent = u.confirmed
        u.unsent = u.first
    if u.first == NULL:
        u.last = NULL
    return True


cdef void fail_all(Unconfirmed* u, Posts* p) noexcept nogil:
    """The peer has failed."""
    cdef Post* post
    while u.first != NULL:
        post = u.first
        u.first = post.after
        settle(p, post, PEER_DOWN)
    u.unsent = u.last = NULL


cdef void let_go(Posts* p, Post* post) noexcept nogil:
    """Its transfer is over: a message that is not confirmed is the wire's from now on."""
    if post.queued:
        post.released = True
    else:
        give_post(p, post)


cdef bint own(Post* post) noexcept nogil:
    """Copy a message, so that its buffer is free. False without memory."""
    cdef char* copy
    if not post.queued or post.owned:
        return True
    copy = <char*>malloc(post.nbytes + 1)
    if copy == NULL:
        return False
    memcpy(copy, post.buffer, post.nbytes)
    post.buffer = copy
    post.owned = True
    return True
