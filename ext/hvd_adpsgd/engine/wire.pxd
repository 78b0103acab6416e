# Interfaces that an engine is created with: a wire that moves bytes between super learners, and a clock.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from hvd_adpsgd.engine.doorbell cimport Doorbell, ring

cdef enum:
    NOBODY = -1             # no rank; as the peer of a receive: from any peer
    CONTROL = 1             # channel of control messages
    AGREEMENT = 2           # channel of messages of the agreement
    DATA = 3                # first channel of chunks
    DATA_CHANNELS = 16384
    SUMS = DATA + DATA_CHANNELS     # first channel of sums

cdef enum Status:           # of a transfer
    PENDING = 0
    DONE = 1
    PEER_DOWN = 2           # the peer has failed
    TOO_LONG = 3            # the message was longer than the buffer
    WIRE_DOWN = 4           # the wire cannot be used any more

cdef struct Transfer:       # one send or receive; must not move in memory from its post until not `in_use`
    Status status           # as of the last `test_once`
    bint in_use             # the wire may use the buffer
    bint receives
    bint cancelled
    int peer                # the other side; of a receive from any peer, once it is complete, the sender
    int nbytes              # of a completed receive: bytes received
    int code                # of a failed transfer: error code of the wire's library
    uint64_t handle         # data of the wire

# A wire is called from one thread and never blocks. Messages of one (sender, receiver, channel) arrive in
# order and exactly once, or the receiver's transfers end with PEER_DOWN. Messages of different channels may
# pass each other.
cdef struct Wire:
    void* own
    int rank
    int size
    Doorbell** doorbells    # by peer: rung when something was sent to the peer; NULL: none
    # Post a transfer. Return PENDING, or why it could not be posted (then it is not in use).
    Status (*send)(Wire*, Transfer*, const void* buffer, int nbytes, int peer, int channel) noexcept nogil
    Status (*receive)(Wire*, Transfer*, void* buffer, int nbytes, int peer, int channel) noexcept nogil
    # Return the status of a transfer. Called through `test_once`, and not again once this is not PENDING.
    Status (*test)(Wire*, Transfer*) noexcept nogil
    # Give up a transfer, with a failed peer or when the engine ends. True: the wire no longer uses its
    # buffer.
    bint (*release)(Wire*, Transfer*) noexcept nogil
    # Return a peer that has failed and was not reported before; NOBODY if none. `look`: search thoroughly.
    int (*next_failed)(Wire*, bint look) noexcept nogil
    # Move bytes; called first in each turn. NULL: the wire moves bytes by itself, or in `test`.
    void (*progress)(Wire*) noexcept nogil
    # Free the messages of sums that have arrived without a receive, but for channels `first` to `last` - 1: their sums
    # were given up. NULL: the wire cannot, or keeps none.
    void (*drop_sums)(Wire*, int first, int last) noexcept nogil
    # Note that a peer lives, as other peers have newer reports of it. NULL: the wire does not need this.
    void (*lives)(Wire*, int peer) noexcept nogil
    # Sleep for about `seconds`, or until `progress` has something to do, or until another thread calls `wake`; not
    # at all if the doorbell was rung more often than `heard`. NULL: the wire cannot; peers ring doorbells.
    void (*wait)(Wire*, Doorbell*, uint32_t heard, double seconds) noexcept nogil
    void (*wake)(Wire*) noexcept nogil
    bint fenced             # set by the wire: peer `fenced_by` has taken this engine for failed
    int fenced_by

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
