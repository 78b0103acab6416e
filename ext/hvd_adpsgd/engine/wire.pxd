# What the engine is handed: a wire that moves bytes between super learners, and a clock.
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.doorbell cimport Doorbell, ring

cdef enum:
    NOBODY = -1             # as the peer of a receive: from anybody
    CONTROL = 1             # channel of control messages
    AGREEMENT = 2           # ... of agreements
    DATA = 3                # first channel of chunks
    DATA_CHANNELS = 16384
    SUMS = DATA + DATA_CHANNELS     # first channel of sums

cdef enum Status:           # of a transfer
    PENDING = 0
    DONE = 1
    PEER_DOWN = 2           # the peer has failed
    TOO_LONG = 3            # the message was longer than the buffer
    WIRE_DOWN = 4           # the wire cannot be used any more

cdef struct Transfer:       # one send or receive; the wire's, which must not move, from its post until `in_use` is False
    Status status           # as of the last `test_once`
    bint in_use             # the wire may use the buffer
    bint receives
    bint cancelled
    int peer                # of the transfer, also when it fails; of a completed receive from anybody the sender
    int nbytes              # of a completed receive
    int code                # of a failed one: the library's
    uint64_t handle         # the wire's own

# Called from one thread, never blocks. Messages of one (sender, receiver, channel) arrive in order and exactly
# once, or the receiver's transfers end with PEER_DOWN. Several channels keep no order among each other.
cdef struct Wire:
    void* own
    int rank
    int size
    Doorbell** doorbells    # by peer: rung when something was sent to it; NULL: it has none. NULL: no peer has
    # Post a transfer. PENDING, or why it could not be posted (then it is not in use).
    Status (*send)(Wire*, Transfer*, const void* buffer, int nbytes, int peer, int channel) noexcept nogil
    Status (*receive)(Wire*, Transfer*, void* buffer, int nbytes, int peer, int channel) noexcept nogil
    # Is it complete? Called through `test_once`, which asks no more after any answer but PENDING.
    Status (*test)(Wire*, Transfer*) noexcept nogil
    # Give up a transfer, of a failed peer or at the end. True: the wire no longer uses its buffer.
    bint (*release)(Wire*, Transfer*) noexcept nogil
    # A peer that has failed and was not reported before; NOBODY if there is none. `look`: search thoroughly.
    int (*next_failed)(Wire*, bint look) noexcept nogil
    # Move bytes: called once per turn, before all else. NULL: the wire moves them by itself, or in `test`.
    void (*progress)(Wire*) noexcept nogil
    # Others have news of this peer: it lives. NULL: the wire needs none.
    void (*lives)(Wire*, int peer) noexcept nogil
    bint fenced             # set by the wire: the peer `fenced_by` has taken this engine for failed
    int fenced_by
    # The sum of `count` numbers over all engines, by the wire's library; all post theirs in the same order. NULL: it has
    # none. Nobody may fail meanwhile.
    Status (*sum)(Wire*, Transfer*, const void* mine, void* total, int count, bint double_precision) noexcept nogil

cdef inline Status send(Wire* wire, Transfer* t, const void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    t.status = wire.send(wire, t, buffer, nbytes, peer, channel)
    if wire.doorbells != NULL and wire.doorbells[peer] != NULL:
        ring(wire.doorbells[peer])
    return t.status


cdef inline Status receive(Wire* wire, Transfer* t, void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    t.status = wire.receive(wire, t, buffer, nbytes, peer, channel)
    return t.status


cdef inline Status test_once(Wire* wire, Transfer* t) noexcept nogil:
    if t.status == PENDING:
        t.status = wire.test(wire, t)
    return t.status


cdef inline void progress(Wire* wire) noexcept nogil:
    if wire.progress != NULL:
        wire.progress(wire)


cdef struct Clock:
    void* own
    double (*now)(Clock*) noexcept nogil                # seconds, monotonic
    void (*sleep)(Clock*, double seconds) noexcept nogil

cdef class AnyWire:
    cdef Wire calls

cdef class AnyClock:
    cdef Clock calls

cdef class SystemClock(AnyClock):
    pass
