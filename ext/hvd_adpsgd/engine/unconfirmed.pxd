# Messages to a peer that it has not confirmed, over any number of connections to it.
from libc.stdint cimport int64_t, uint32_t

from hvd_adpsgd.engine.matching cimport Post, Posts
from hvd_adpsgd.engine.wire cimport DONE, PEER_DOWN

cdef enum:
    COUNTS = 0x7FFFFFFF     # of counts, as a mask

cdef struct Unconfirmed:
    Post* first             # oldest first
    Post* unsent            # ... the first that the system does not have whole
    Post* last
    int64_t moved           # bytes of `unsent` that it has
    uint32_t sent           # messages that the system has taken, and that the peer has confirmed, so far
    uint32_t confirmed
    bint resumes            # the first count of a new connection says what is to be sent again

cdef Post* copied_post(Posts* p, int peer, int channel, const void* buffer, int nbytes) noexcept nogil
cdef bint append(Unconfirmed* u, Post* post) noexcept nogil
cdef Post* note_sent(Unconfirmed* u) noexcept nogil
cdef void resume(Unconfirmed* u) noexcept nogil
cdef bint take_count(Unconfirmed* u, Posts* p, uint32_t count) noexcept nogil
cdef void fail_all(Unconfirmed* u, Posts* p) noexcept nogil
cdef void let_go(Posts* p, Post* post) noexcept nogil
cdef bint own(Post* post) noexcept nogil


cdef inline uint32_t counted(uint32_t received) noexcept nogil:
    """How many messages have come whole, with one more."""
    return (received + 1) & COUNTS
