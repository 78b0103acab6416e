# The mailbox of an engine: the trainer's orders to the engine's thread, and what the thread reports to the
# trainer.
from libc.stdint cimport int64_t, uint32_t

from hvd_adpsgd.engine.doorbell cimport Doorbell
from hvd_adpsgd.engine.store cimport pthread_mutex_t

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define adpsgd_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define adpsgd_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    static inline double adpsgd_load_double(const double* p) {
      double v;
      __atomic_load(p, &v, __ATOMIC_ACQUIRE);
      return v;
    }
    static inline void adpsgd_store_double(double* p, double v) { __atomic_store(p, &v, __ATOMIC_RELEASE); }
    #endif
    """
    int64_t load "adpsgd_load"(int64_t*) nogil
    void store "adpsgd_store"(int64_t*, int64_t) nogil
    char load_byte "adpsgd_load"(char*) nogil
    void store_byte "adpsgd_store"(char*, char) nogil
    double load_double "adpsgd_load_double"(double*) nogil
    void store_double "adpsgd_store_double"(double*, double) nogil

cdef enum:
    HISTOGRAM = 64          # bins of the staleness histogram: 0 to 62 steps, and more
    EVENTS = 16384          # timeline records kept until the trainer takes them; later ones are dropped
    NO_PEER = -1

cdef extern from *:
    """
    #define ADPSGD_NO_STEP 0x7FFFFFFFFFFFFFFF
    """
    const int64_t NO_STEP "ADPSGD_NO_STEP"

cdef enum Fault:
    FAULT_NONE = 0
    FAULT_MPI = 1           # the wire cannot be used any more
    FAULT_LAYOUT = 2        # a peer averages other tensors than this super learner
    FAULT_WEIGHT = 3        # a peer averages with another `weight`
    FAULT_MEMORY = 4
    FAULT_GONE = 5          # a mean of all models needs a super learner that has left or has failed
    FAULT_STATE = 6         # an exchange changed its phase in a way that is not allowed: a bug in the engine
    FAULT_FENCED = 7        # a peer has taken this super learner for failed, and continues without it

cdef enum EventKind:        # kinds of timeline records
    EVENT_ASKED = 0         # an exchange that this side asked for is over
    EVENT_SERVED = 1        # an exchange that the peer asked for is over
    EVENT_MERGED = 2        # a chunk was merged
    EVENT_PARKED = 3        # an exchange was parked
    EVENT_MEAN = 4          # a mean of all models; `peer` is NO_PEER

cdef struct Event:
    int kind                # EventKind
    int peer
    int chunk               # of EVENT_MERGED, else -1
    int number              # of the exchange, assigned by the side that asked
    bint asked              # this side asked
    double square           # of EVENT_MERGED: squared distance of the two models
    double began
    double ended
    int64_t nbytes
    int64_t step

cdef struct Counters:      # changed by the thread with `add` and `store`, read by the trainer with `load`
    int64_t exchanges_active
    int64_t exchanges_passive
    int64_t refused         # our ASKs answered with NO
    int64_t declined        # ASKs that we answered with NO
    int64_t parked
    int64_t broken          # exchanges ended by a peer's failure
    int64_t void_chunks
    int64_t malformed       # control and agreement messages that no engine sends, ignored
    int64_t malformed_from  # peer that sent the last malformed message
    int64_t compared        # exchanges in turn (windows.pxi) in which at least one chunk was merged
    int64_t chunks
    int64_t bytes_sent      # over the wire, of chunks and sums
    int64_t bytes_received
    int64_t bytes_shared    # of chunks that were merged through shared memory
    int64_t square_elements
    int64_t turns
    double square
    double last_square
    double exchange_s
    double busy_s           # time in which at least one exchange ran with a peer that was not silent
    double link_s           # what exchanges over the link would have taken if no peer were much slower than the others
    int64_t means
    double mean_s
    double mean_square      # squared distance of our model to the last mean
    int64_t staleness[HISTOGRAM]

cdef struct Orders:         # what the trainer wants
    bint fit                # the model offered last is finite
    bint paused
    bint leaving
    bint broken             # this super learner leaves because it has failed
    int wanted              # peer to ask next, NO_PEER if none
    int64_t round           # number of the round; ASKs of another round get a NO
    int64_t step
    double credit           # how many exchanges are due
    double share            # fraction of the model's chunks that an exchange moves; at most
    int wire_format         # of chunks over the wire; a peer may want fewer bits
    double leave_within     # s; upper bound of leave_deadline_s when the engine leaves; 0: none

cdef enum PeerCount:        # what is counted by peer: the tables PEER_TABLES of metrics.py, in their order
    MET                     # finished exchanges
    PEER_COUNTS

cdef struct Mailbox:
    pthread_mutex_t gate    # protects `given`
    Doorbell* doorbell      # wakes the thread: rung by the trainer, and over MPI by peers that share memory
    Doorbell own_doorbell   # the doorbell, if no peer rings it
    Orders given            # newest orders: the trainer changes them at any time; the thread takes credit
    Orders orders           # the thread's copy of `given`, made at the beginning of its poll
    double rate             # exchanges that become due per step
    int64_t halted          # the thread is to end at once, without BYE
    # copies of the thread's state, made between two of its turns (inspect.pxi)
    pthread_mutex_t inspections   # held by the thread of the trainer that makes an inspection
    int64_t inspection_wanted     # number of the newest inspection that the trainer wants
    int64_t inspection_made       # number of the newest inspection that the thread has made
    void* inspection              # that inspection; the trainer owns it until it wants another one
    # written by the thread, read by the trainer
    Counters counters
    int64_t in_flight_step  # step of the oldest snapshot in flight, NO_STEP if none
    int64_t at_rest         # averaging is paused, and no exchange or mean runs
    int64_t peer_events     # counts changes of the membership
    int64_t finished        # counts exchanges that are over
    int64_t ended           # the thread has ended
    int64_t* by_peer        # PEER_COUNTS counts of each peer, see count_of
    int64_t fault           # Fault
    int fault_code
    int fault_peer
    Event* events
    int64_t events_written
    int64_t events_read


cdef inline int64_t* count_of(Mailbox* p, PeerCount what, int peer) noexcept nogil:
    return &p.by_peer[peer * PEER_COUNTS + what]


cdef inline void read_orders(Mailbox* p) noexcept nogil:
    pthread_mutex_lock(&p.gate)
    p.orders = p.given
    pthread_mutex_unlock(&p.gate)


cdef inline void spend_credit(Mailbox* p, int peer) noexcept nogil:
    """Take one credit for an exchange that has begun.

    `peer`: the peer that this side asked, NO_PEER if it was asked; if the trainer wanted that peer, the order
    is done.
    """
    pthread_mutex_lock(&p.gate)
    p.given.credit = p.orders.credit = max(p.given.credit - 1.0, -2.0 * max(p.rate, 1.0))
    if peer != NO_PEER and p.given.wanted == peer:
        p.given.wanted = NO_PEER
        p.orders.wanted = NO_PEER
    pthread_mutex_unlock(&p.gate)


cdef inline void add(int64_t* counter, int64_t more) noexcept nogil:
    store(counter, counter[0] + more)


cdef inline void add_double(double* counter, double more) noexcept nogil:
    store_double(counter, counter[0] + more)


cdef inline void latch(Mailbox* p, Fault fault, int code, int peer) noexcept nogil:
    """Store the first fault only; the trainer raises it at its next check()."""
    if p.fault == FAULT_NONE:
        p.fault_code = code
        p.fault_peer = peer
        store(&p.fault, fault)


cdef inline void record(Mailbox* p, Event event) noexcept nogil:
    if p.events == NULL or p.events_written - load(&p.events_read) >= EVENTS:
        return
    p.events[p.events_written % EVENTS] = event
    store(&p.events_written, p.events_written + 1)
