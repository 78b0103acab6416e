# A network of engines in one process, in virtual time.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from hvd_adpsgd.engine.matching cimport Post, Posts
from hvd_adpsgd.engine.unconfirmed cimport Unconfirmed
from hvd_adpsgd.engine.wire cimport AnyClock, AnyWire, Clock, Status, Transfer, Wire

cdef enum:
    MOST_TORN = 64
    OPEN = 0                # of a transfer's handle
    COMPLETE = 1
    LOST = 2
    OVERLONG = 3

cdef struct Net

cdef struct Envelope:       # a message that its receiver has not taken
    int src
    int dst
    int channel
    int nbytes
    const void* source      # the sender's buffer, or `copy`
    void* copy              # of an eager message
    Transfer* sending       # NULL: complete
    Post* post              # of a stream: what it reads when it arrives
    double arrives
    bint arrived
    bint lost               # with its sender, or its connection
    Envelope* next_one      # to the same receiver, in the order of sends

cdef struct Posted:         # a receive that is not matched
    Transfer* transfer
    void* buffer
    int nbytes
    int src
    int channel
    bint down               # reported as failed, not released: late bytes may still be written to it
    Posted* next_one

cdef struct Down:           # a peer that has failed, as one engine's wire knows
    int peer                # rank
    bint told               # by next_failed
    Down* next_one

cdef struct Cut:            # what one process sends to another before then arrives after it
    int src
    int dst
    double until
    Cut* next_one

cdef struct Stream:         # what one engine sends to another, over one connection after the other (streams.pyx)
    int src
    int dst
    Unconfirmed outgoing
    uint32_t received       # messages that have come whole
    bint is_open
    uint64_t connection     # number of it
    double counted_at       # when the last count on its way arrives

cdef struct Link:           # what one engine sees of the network
    Net* net
    int first               # the place of the engine of rank 0 among its peers; its own is first + rank
    int size                # engines that are peers
    int process
    Envelope* coming
    Posted* posted
    Down* downs             # peers that have failed, newest first
    int news                # ... of which next_failed has not told
    bint woken              # a transfer of it is complete, and its owner has not looked since
    double free_at          # when its outgoing link is free
    int64_t sent_bytes      # with what waits for the link
    int64_t sent_messages

cdef struct Rules:          # of the network
    double latency_s
    double jitter           # times the latency, at most
    double bytes_per_s
    double bytes_scale      # bytes on the wire per byte of a message
    double eager            # probability that a message is copied when it is sent
    double late             # probability that a message takes up to LATE latencies
    double late_control     # ... that a control message does, which chunks overtake then
    double late_write       # ... that a message of a failed peer is still written into a released buffer

cdef struct Sent:           # of the trace: one message
    double at
    double arrives
    int src
    int dst
    int channel
    int nbytes
    int kind                # of a message of control or of the agreement, else -1
    int64_t number          # ... of its exchange, or of its decision

cdef struct Entry:          # of the calendar
    double at
    int64_t order           # of those at the same time: as they were entered
    int kind
    int who
    void* what

cdef struct Torn:           # a chunk that has changed while it was read
    char* lives
    int chunk

cdef struct Net:
    int n                   # places of engines
    Torn torn[MOST_TORN]    # in this turn; `ntorn` of them
    int ntorn
    double now_s
    uint64_t chance
    Rules rules
    Link* links
    Cut* cuts
    Stream* streams         # [src * n + dst]; NULL: no connection ends, and channels keep no order among each other
    Posts posts             # of streams
    Post** made             # ... all of them; `nmade`
    int64_t nmade
    int* woken              # links with `woken`; `nwoken` of them
    int nwoken
    Entry* calendar         # a heap: what happens next is first
    int64_t entries
    int64_t room
    int64_t entered
    Sent* trace             # NULL: none is kept
    int64_t traced
    int64_t trace_room

cdef double LATE             # latencies, at most, that a late message takes

cdef enum:
    ARRIVAL = 0             # kind of an entry; others are the caller's

cdef void enter(Net* net, double at, int kind, int who, void* what) noexcept nogil
cdef Entry leave(Net* net) noexcept nogil
cdef void arrive(Net* net, Envelope* message) noexcept nogil
cdef void crash(Net* net, int who) noexcept nogil
cdef void report_down(Net* net, int observer, int peer) noexcept nogil
cdef void give_up(Net* net, int src, int dst) noexcept nogil
cdef void cut_way(Net* net, int src, int dst, double until) noexcept nogil
cdef double cut_until(Net* net, int src, int dst) noexcept nogil
cdef double last_arrival(Net* net, int src, int dst) noexcept nogil
cdef int64_t bytes_sent(Net* net, int who) noexcept nogil
cdef int open_transfers(Net* net, int who) noexcept nogil
# for streams
cdef bint begin_send(Link* link, Transfer* t, int nbytes, int peer, int channel) noexcept nogil
cdef void schedule(Net* net, Link* link, Envelope* m) noexcept nogil
cdef void keep_trace(Net* net, Envelope* m) noexcept nogil
cdef void wake(Net* net, int who) noexcept nogil
cdef Down* down_of(Link* link, int peer) noexcept nogil
cdef void lose_from(Net* net, Envelope* first) noexcept nogil
cdef Status simulated_test(Wire* wire, Transfer* t) noexcept nogil
cdef bint simulated_release(Wire* wire, Transfer* t) noexcept nogil

cdef class Network:
    cdef Net net
    cdef int size           # engines at the beginning

    cdef void place(self, int at, int first, int size, int process)

cdef class SimulatedWire(AnyWire):
    cdef Network network

cdef class SimulatedClock(AnyClock):
    cdef Network network
