# A network of engines in one process, in virtual time.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from hvd_adpsgd.engine.matching cimport Post, Posts
from hvd_adpsgd.engine.matching cimport Unconfirmed
from hvd_adpsgd.engine.wire cimport AnyClock, AnyWire, Clock, Status, Transfer, Wire

cdef enum:
    MOST_TORN = 64
    OPEN = 0                # values of a transfer's handle
    COMPLETE = 1
    LOST = 2
    OVERLONG = 3

cdef struct Net

cdef struct Envelope:       # a message that is sent, and not received
    int src
    int dst
    int channel
    int nbytes
    const void* source      # the sender's buffer, or `copy`
    void* copy              # of an eager message; else NULL
    Transfer* sending       # NULL: the send is complete
    Post* post              # of a stream: the post whose buffer is read when the message arrives
    double arrives          # when it arrives
    bint arrived
    bint lost               # it does not arrive, because its sender crashed or its connection ended
    Envelope* next_one      # the next message to the same receiver, in the order of sends

cdef struct Posted:         # a pending receive
    Transfer* transfer
    void* buffer
    int nbytes
    int src
    int channel
    bint down               # its peer has failed, and it is not released: its buffer may still be written to
    Posted* next_one

cdef struct Down:           # a peer that one engine's wire takes for failed
    int peer                # rank
    bint told               # next_failed has returned it
    Down* next_one

cdef struct Cut:            # messages of one process to another that are sent before `until` arrive after it
    int src
    int dst
    double until
    Cut* next_one

cdef struct Stream:         # messages of one engine to another, over successive connections (streams.pyx)
    int src
    int dst
    Unconfirmed outgoing
    uint32_t received       # count of messages that were received completely
    bint is_open            # there is a connection
    uint64_t connection     # number of the connection
    double counted_at       # when the last count in flight arrives at the sender

cdef struct Link:           # the network as one engine sees it
    Net* net
    int first               # index of the engine of rank 0 among its peers; its own index is first + rank
    int size                # engines in its group, itself included
    int process
    Envelope* coming        # messages to this engine
    Posted* posted          # its pending receives
    Down* downs             # peers that its wire takes for failed, newest first
    int news                # how many of them next_failed has not yet returned
    bint woken              # a transfer of the engine has completed since its last turn
    double free_at          # when its outgoing link is free
    double bytes_per_s      # speed of that link
    int64_t sent_bytes      # bytes sent so far, those that wait for the link included
    int64_t sent_messages

cdef struct Path:           # the way of chunks from one process to another, behind the sender's link
    double slowness         # times the seconds of the sender's link; 1: not slower
    double free_at

cdef struct Rules:          # how the network behaves; see Network
    double latency_s
    double jitter           # largest random addition to the latency, as a fraction of it
    double bytes_per_s
    double bytes_scale      # bytes on the wire per byte of a chunk or sum
    double eager            # probability that a message is copied when it is sent
    double late             # probability that a message takes up to LATE latencies more
    double late_control     # probability that a control message takes up to LATE latencies more
    double late_write       # probability that a message of a failed peer is written into an unreleased buffer

cdef struct Sent:           # a message in the trace
    double at               # when it was sent
    double arrives          # when it arrives
    int src
    int dst
    int channel
    int nbytes
    int kind                # kind of a control or agreement message; of others -1
    int64_t number          # of its exchange or decision; of others -1

cdef struct Entry:          # an event in the calendar
    double at               # virtual time, s
    int64_t order           # orders events of the same time as they were entered
    int kind                # ARRIVAL, or a Happening (state.pxd, streams.pxd)
    int who                 # engine, process, fault or stream
    void* what

cdef struct Torn:           # a chunk that was changed while it was read
    char* lives
    int chunk

cdef struct Net:
    int n                   # engines, later ones included
    Torn torn[MOST_TORN]    # chunks torn in this turn
    int ntorn
    double now_s            # virtual time
    uint64_t chance         # state of the random generator
    Rules rules
    Link* links             # by engine
    Cut* cuts
    Path* paths             # [src * npaths + dst], by process; NULL: none is slower than the links
    int npaths
    Stream* streams         # [src * n + dst]; NULL: connections do not end, and channels may pass each other
    Posts posts             # posts of streams
    Post** made             # all posts that were allocated
    int64_t nmade
    int* woken              # engines whose links are `woken`
    int nwoken
    Entry* calendar         # a heap: the next event comes first
    int64_t entries         # events in the calendar
    int64_t room            # length of the array
    int64_t entered         # events entered so far
    Sent* trace             # NULL: no trace is recorded
    int64_t traced
    int64_t trace_room

cdef double LATE             # largest additional delay of a late message, in latencies

cdef enum:
    ARRIVAL = 0             # kind of a calendar entry: a message arrives; the caller defines other kinds

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
# used by streams.pyx
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
    cdef int size           # engines when the job begins

    cdef void place(self, int at, int first, int size, int process)

cdef class SimulatedWire(AnyWire):
    cdef Network network

cdef class SimulatedClock(AnyClock):
    cdef Network network
