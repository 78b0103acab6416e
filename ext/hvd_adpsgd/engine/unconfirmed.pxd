# Messages to a peer that the peer has not confirmed, over successive connections to it.
from libc.stdint cimport int64_t, uint32_t

from hvd_adpsgd.engine.matching cimport Post, Posts
from hvd_adpsgd.engine.wire cimport DONE, PEER_DOWN

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
