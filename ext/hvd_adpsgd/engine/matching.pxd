# Posted transfers of a wire that moves its bytes itself, messages that arrived before their receives were posted, and
# messages that a peer has not confirmed, over successive connections to it.
from libc.stdint cimport int64_t, uint32_t

from hvd_adpsgd.engine.wire cimport DATA, SUMS, DONE, NOBODY, PEER_DOWN, PENDING, TOO_LONG, Status

cdef struct Post:           # a posted transfer
    Status status
    int peer                # of a completed receive: the sender
    int channel
    int nbytes              # of a completed receive: bytes that arrived
    char* buffer
    bint anybody            # a receive from any peer
    bint owned              # the buffer is a private copy, freed with the post
    bint queued             # a sent message that its receiver has not confirmed
    bint released           # the engine's transfer is over: the wire frees the post
    Post* before            # the previous one in the list of receives
    Post* after             # the next one in the list of receives, in a connection's queue, or in the pool

cdef struct Stray:          # a message that arrived before its receive was posted; its bytes follow
    int peer
    int channel
    int nbytes
    bint complete
    Post* wanted            # the receive for this message, if it was posted before the message was complete
    Stray* after

cdef struct Posts:
    Post* oldest            # list of pending receives
    Post* newest
    Stray* first            # list of strays
    Stray* last
    int64_t nstrays
    Post* pool              # posts that are free

cdef inline char* stray_bytes(Stray* stray) noexcept nogil:
    return <char*>(stray + 1)


cdef Post* take_post(Posts* p, int peer, int channel, void* buffer, int nbytes) noexcept nogil
cdef void expect(Posts* p, Post* post) noexcept nogil
cdef bint is_here(Posts* p, int peer, int channel) noexcept nogil
cdef Post* receive_for(Posts* p, int peer, int channel) noexcept nogil
cdef void give_up(Posts* p, Post* post) noexcept nogil
cdef void cut_off(Posts* p, Post* post) noexcept nogil
cdef void forget_stray(Posts* p, Stray* stray) noexcept nogil
cdef Stray* take_stray(Posts* p, int peer, int channel, int nbytes) noexcept nogil
cdef void complete_stray(Posts* p, Stray* stray) noexcept nogil
cdef void fail_posts(Posts* p, int peer) noexcept nogil
cdef void drop_sums(Posts* p, int first, int last) noexcept nogil
cdef void close_posts(Posts* p) noexcept nogil
cdef Stray* first_whole(Posts* p) noexcept nogil
cdef void drop(Posts* p, Stray* stray) noexcept nogil

# ---- unconfirmed messages ---------------------------------------------------------------------

cdef enum:
    COUNTS = 0x7FFFFFFF     # mask of the counts of messages

cdef struct Unconfirmed:
    Post* first             # list of unconfirmed messages, oldest first
    Post* unsent            # the first message that the operating system has not taken completely
    Post* last
    int64_t moved           # bytes of `unsent` that the operating system has taken
    uint32_t sent           # messages that the operating system has taken so far
    uint32_t confirmed      # messages that the peer has confirmed so far
    bint resumes            # wait for the first count on a new connection, to know which messages are lost

cdef Post* copied_post(Posts* p, int peer, int channel, const void* buffer, int nbytes) noexcept nogil
cdef bint append(Unconfirmed* u, Post* post) noexcept nogil
cdef Post* note_sent(Unconfirmed* u) noexcept nogil
cdef void resume(Unconfirmed* u) noexcept nogil
cdef bint take_count(Unconfirmed* u, Posts* p, uint32_t count) noexcept nogil
cdef void fail_all(Unconfirmed* u, Posts* p) noexcept nogil
cdef void let_go(Posts* p, Post* post) noexcept nogil
cdef bint own(Post* post) noexcept nogil


cdef inline uint32_t counted(uint32_t received) noexcept nogil:
    """Return the count of completely received messages after one more."""
    return (received + 1) & COUNTS
