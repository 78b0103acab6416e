# cython: language_level=3
# Why compiled: the engine's thread keeps these lists without the GIL.
"""Matching of messages with posted receives, for a wire that moves its bytes itself.

A message goes to the oldest receive that was posted for its sender, or for any peer, and for its channel. A
message that arrives before its receive is posted is a *stray* and is kept. As in MPI, messages of one sender
and channel are received in the order in which they were sent.

The receiver counts the messages that have arrived completely, over all connections, and sends the count. The
sender keeps each message until such a count includes it. Over a new connection the sender waits for the first
count, and then sends all messages behind it, from their first bytes. So each message arrives once, in order.

wire_tcp and the simulator's network both use these functions.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from hvd_adpsgd.engine.matching cimport *


# ---- the pool ------------------------------------------------------------------------------

cdef Post* take_post(Posts* p, int peer, int channel, void* buffer, int nbytes) noexcept nogil:
    """Return a new pending post; NULL if memory is exhausted."""
    cdef Post* post = p.pool
    if post != NULL:
        p.pool = post.after
    else:
        post = <Post*>malloc(sizeof(Post))
    if post != NULL:
        post[0] = Post(PENDING, peer, channel, nbytes, <char*>buffer, peer == NOBODY, False, False, False, NULL, NULL)
    return post


cdef void give_post(Posts* p, Post* post) noexcept nogil:
    if post.owned:
        free(post.buffer)
    post.after = p.pool
    p.pool = post


cdef void settle(Posts* p, Post* post, Status status) noexcept nogil:
    """End a message of a queue with `status`: its receiver has confirmed it, or has failed."""
    post.queued = False
    post.after = NULL
    if post.released:
        give_post(p, post)
    elif post.status == PENDING:
        post.status = status


# ---- receives ------------------------------------------------------------------------------

cdef inline bint is_for(Post* post, int peer, int channel) noexcept nogil:
    return post.channel == channel and (post.peer == peer or post.peer == NOBODY)


cdef bint take_early(Posts* p, Post* post) noexcept nogil:
    """Give a receive the first stray that matches it. Return whether there was one."""
    cdef Stray* stray = p.first
    while stray != NULL and (stray.wanted != NULL or not is_for(post, stray.peer, stray.channel)):
        stray = stray.after
    if stray == NULL:
        return False
    stray.wanted = post
    if stray.complete:
        hand_over(p, stray)
    return True


cdef void expect(Posts* p, Post* post) noexcept nogil:
    """Post a receive: give it the first stray that matches it, or append it to the pending receives."""
    if take_early(p, post):
        return
    post.before = p.newest
    if p.newest != NULL:
        p.newest.after = post
    else:
        p.oldest = post
    p.newest = post


cdef bint is_here(Posts* p, int peer, int channel) noexcept nogil:
    """Whether a stray of `peer` on `channel` has no receive yet."""
    cdef Stray* stray = p.first
    while stray != NULL and (stray.wanted != NULL or stray.peer != peer or stray.channel != channel):
        stray = stray.after
    return stray != NULL


cdef void unlink_receive(Posts* p, Post* post) noexcept nogil:
    if post.before != NULL:
        post.before.after = post.after
    else:
        p.oldest = post.after
    if post.after != NULL:
        post.after.before = post.before
    else:
        p.newest = post.before
    post.before = post.after = NULL


cdef Post* receive_for(Posts* p, int peer, int channel) noexcept nogil:
    """Remove and return the pending receive for a message that begins to arrive; NULL if none was posted."""
    cdef Post* post = p.oldest
    while post != NULL and not is_for(post, peer, channel):
        post = post.after
    if post != NULL:
        unlink_receive(p, post)
        post.peer = peer
    return post


cdef void give_up(Posts* p, Post* post) noexcept nogil:
    """Remove a pending receive for which no message has begun to arrive on a connection."""
    cdef Stray* stray = p.first
    cdef Post* other = p.oldest
    while stray != NULL:
        if stray.wanted == post:
            stray.wanted = NULL
            return
        stray = stray.after
    while other != NULL and other != post:
        other = other.after
    if other != NULL:
        unlink_receive(p, post)


cdef void cut_off(Posts* p, Post* post) noexcept nogil:
    """Post a receive again, before all others: the message that it had begun to take will be sent again."""
    if post.anybody:
        post.peer = NOBODY
    if take_early(p, post):
        return
    post.after = p.oldest
    if p.oldest != NULL:
        p.oldest.before = post
    else:
        p.newest = post
    p.oldest = post


# ---- strays --------------------------------------------------------------------------------

cdef Stray* take_stray(Posts* p, int peer, int channel, int nbytes) noexcept nogil:
    """Append a stray: memory for a message without a receive. Return NULL if memory is exhausted.

    A weakness that we accept: neither the size nor the number of strays is bounded. Only peers that have
    proven that they belong to the job can send, their pickles are loaded anyway, and memory is used only as
    the bytes arrive.
    """
    cdef Stray* stray = <Stray*>malloc(sizeof(Stray) + nbytes)
    if stray == NULL:
        return NULL
    stray[0] = Stray(peer, channel, nbytes, False, NULL, NULL)
    if p.last != NULL:
        p.last.after = stray
    else:
        p.first = stray
    p.last = stray
    p.nstrays += 1
    return stray


cdef void drop(Posts* p, Stray* stray) noexcept nogil:
    cdef Stray* before = NULL
    cdef Stray* other = p.first
    while other != stray:
        before = other
        other = other.after
    if before != NULL:
        before.after = stray.after
    else:
        p.first = stray.after
    if p.last == stray:
        p.last = before
    p.nstrays -= 1
    free(stray)


cdef void forget_stray(Posts* p, Stray* stray) noexcept nogil:
    """Free a stray that arrived in part, because its message will be sent again."""
    cdef Post* post = stray.wanted
    drop(p, stray)
    if post != NULL:
        cut_off(p, post)


cdef Stray* first_whole(Posts* p) noexcept nogil:
    """Return the first complete stray without a receive; NULL if there is none."""
    cdef Stray* stray = p.first
    while stray != NULL and (stray.wanted != NULL or not stray.complete):
        stray = stray.after
    return stray


cdef void hand_over(Posts* p, Stray* stray) noexcept nogil:
    cdef Post* post = stray.wanted
    post.peer = stray.peer
    if stray.nbytes > post.nbytes:
        post.status = TOO_LONG
    else:
        memcpy(post.buffer, stray_bytes(stray), stray.nbytes)
        post.nbytes = stray.nbytes
        post.status = DONE
    drop(p, stray)


cdef void complete_stray(Posts* p, Stray* stray) noexcept nogil:
    """Mark a stray as complete, and give it to its receive if that is posted."""
    stray.complete = True
    if stray.wanted != NULL:
        hand_over(p, stray)


# ---- ends ----------------------------------------------------------------------------------

cdef void fail_posts(Posts* p, int peer) noexcept nogil:
    """End all pending receives from `peer` with PEER_DOWN: the peer has failed.

    Strays with chunks are freed, because their exchange is over; other strays stay."""
    cdef Post* post
    cdef Post* next_post
    cdef Stray* stray = p.first
    cdef Stray* next_stray
    while stray != NULL:
        next_stray = stray.after
        if stray.peer == peer and stray.channel >= DATA and stray.wanted == NULL:
            drop(p, stray)
        stray = next_stray
    post = p.oldest
    while post != NULL:
        next_post = post.after
        if post.peer == peer:
            unlink_receive(p, post)
            post.status = PEER_DOWN
        post = next_post


cdef void drop_sums(Posts* p, int first, int last) noexcept nogil:
    """Free the complete strays of sums on other channels than `first` to `last` - 1."""
    cdef Stray* stray = p.first
    cdef Stray* next_stray
    while stray != NULL:
        next_stray = stray.after
        if stray.complete and stray.channel >= SUMS and not first <= stray.channel < last:
            drop(p, stray)
        stray = next_stray


cdef void close_posts(Posts* p) noexcept nogil:
    """Free all strays and the pool of posts."""
    cdef Post* post
    while p.first != NULL:
        drop(p, p.first)
    while p.pool != NULL:
        post = p.pool
        p.pool = post.after
        free(post)


# ---- messages that are sent again, in order, after a connection has ended: those the peer has not confirmed

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
