# cython: language_level=3
# Why compiled: the engine's thread keeps these lists without the GIL.
"""Messages that are sent again, in order, after a connection has ended: those the peer has not confirmed.

The receiver counts the messages that have arrived completely, over all connections, and sends the count. The
sender keeps each message until such a count includes it. Over a new connection the sender waits for the first
count, and then sends all messages behind it, from their first bytes. So each message arrives once, in order.

wire_tcp and the simulator's network both use these functions.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from hvd_adpsgd.engine.matching cimport give_post, settle, take_post
from hvd_adpsgd.engine.unconfirmed cimport *


cdef Post* copied_post(Posts* p, int peer, int channel, const void* buffer, int nbytes) noexcept nogil:
    """Return a post with a copy of the message; NULL if memory is exhausted."""
    cdef char* copy = <char*>malloc(nbytes + 1)
    cdef Post* post = take_post(p, peer, channel, copy, nbytes) if copy != NULL else NULL
    if post == NULL:
        free(copy)
        return NULL
    memcpy(copy, buffer, nbytes)
    post.owned = True
    return post


cdef bint append(Unconfirmed* u, Post* post) noexcept nogil:
    """Append a message to the queue. Return whether it is the next one to be sent."""
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
    """Mark the message `unsent` as sent: the operating system has taken it.

    Return the next one to send, or NULL."""
    cdef Post* post = u.unsent
    u.moved = 0
    u.sent += 1
    if post.owned:
        post.status = DONE
    u.unsent = post.after
    return u.unsent


cdef void resume(Unconfirmed* u) noexcept nogil:
    """Begin a new connection: unconfirmed messages may be lost, and one that was sent in part is lost."""
    u.moved = 0
    u.resumes = u.first != u.unsent


cdef bint take_count(Unconfirmed* u, Posts* p, uint32_t count) noexcept nogil:
    """Process the peer's count of messages that it has received. Return False if so many were not sent."""
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
    if u.resumes:                   # all behind the count were lost with the last connection
        u.resumes = False
        u.sent = u.confirmed
        u.unsent = u.first
    if u.first == NULL:
        u.last = NULL
    return True


cdef void fail_all(Unconfirmed* u, Posts* p) noexcept nogil:
    """End all messages to a peer that has failed with PEER_DOWN."""
    cdef Post* post
    while u.first != NULL:
        post = u.first
        u.first = post.after
        settle(p, post, PEER_DOWN)
    u.unsent = u.last = NULL


cdef void let_go(Posts* p, Post* post) noexcept nogil:
    """Free the post of a transfer that is over, at once or when the peer has confirmed the message."""
    if post.queued:
        post.released = True
    else:
        give_post(p, post)


cdef bint own(Post* post) noexcept nogil:
    """Copy an unconfirmed message, so that the engine may reuse its buffer. False if memory is exhausted."""
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
