# The trainer's mailbox: what the trainer tells the engine's thread, and what the thread tells the trainer.
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
    uint32_t load_count "adpsgd_load"(uint32_t*) nogil
    void store_count "adpsgd_store"(uint32_t*, uint32_t) nogil
    char load_byte "adpsgd_load"(char*) nogil
    void store_byte "adpsgd_store"(char*, char) nogil
    double load_double "adpsgd_load_double"(double*) nogil
    void store_double "adpsgd_store_double"(double*, double) nogil

cdef enum:
    HISTOGRAM = 64          # staleness 0 .. 62 steps, and more
    EVENTS = 16384          # timeline records kept until the trainer takes them
    NO_PEER = -1

cdef extern from *:
    """
    #define ADPSGD_NO_STEP 0x7FFFFFFFFFFFFFFF
    """
    const int64_t NO_STEP "ADPSGD_NO_STEP"

cdef enum Fault:
    FAULT_NONE = 0
    FAULT_MPI = 1           # the wire cannot be used any more
    FAULT_LAYOUT = 2        # a peer averages other tensors
    FAULT_WEIGHT = 3        # ... with another weight
    FAULT_MEMORY = 4
    FAULT_GONE = 5          # a mean of all needs a super learner that has left or has failed
    FAULT_STATE = 6         # an exchange took a transition that does not exist: an error in the engine
    FAULT_FENCED = 7        # a peer has reused memory that this side was reading: it took us for failed

cdef enum EventKind:        # of the timeline
    EVENT_ASKED = 0         # an exchange that we asked for
    EVENT_SERVED = 1        # ... that the peer asked for
    EVENT_MERGED = 2
    EVENT_PARKED = 3
    EVENT_MEAN = 4          # mean of all; peer is NO_PEER

cdef struct Event:
    int kind                # EventKind
    int peer
    int chunk               # of EVENT_MERGED, else -1
    int number              # of the exchange, by its asker
    bint asked              # by us
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
    int64_t malformed       # control messages and messages of the agreement that no engine sends
    int64_t malformed_from  # peer that sent the last of them
    int64_t compared        # exchanges of which at least one chunk was merged
    int64_t chunks
    int64_t bytes_sent
    int64_t bytes_received
    int64_t square_elements
    int64_t turns
    double square
    double last_square
    double exchange_s
    int64_t means
    double mean_s
    double mean_square      # of the last mean: squared distance of our model to it
    int64_t staleness[HISTOGRAM]

cdef struct Orders:         # of the trainer
    bint fit                # the model offered last is finite
    bint paused
    bint leaving
    bint broken             # this super learner leaves because it has failed
    int wanted              # peer of this round, NO_PEER if none
    int64_t round           # number of the round; ASKs of another round get a NO
    int64_t step
    double credit           # exchanges that are due
    double leave_within     # s: leave_deadline_s is no more than that; 0: as it is

cdef struct Mailbox:
    pthread_mutex_t gate    # of `given`
    Doorbell* doorbell      # wakes the thread: rung by the trainer, and by peers that share memory
    Doorbell own_doorbell   # ... if there are none
    Orders given            # by the trainer, at any time; the thread spends credit
    Orders orders           # what the thread has read of them at the beginning of its poll
    double rate             # exchanges that are due per step
    int64_t halted          # end the thread at once, without BYE
    # looks at the thread's state, between two of its turns
    pthread_mutex_t inspections   # one at a time
    int64_t inspection_wanted     # number of the newest one
    int64_t inspection_made       # ... that the thread has made
    void* inspection              # the trainer's, from `made` until it wants another
    # for the trainer to read
    Counters counters
    int64_t in_flight_step  # step of the oldest snapshot in flight, NO_STEP if none
    int64_t at_rest         # paused, and no exchange or mean is running
    int64_t peer_events
    int64_t finished        # exchanges
    int64_t ended           # the thread has ended
    uint32_t* met           # exchanges with each peer
    int64_t fault           # Fault
    int fault_code
    int fault_peer
    Event* events
    int64_t events_written
    int64_t events_read


cdef inline void read_orders(Mailbox* p) noexcept nogil:
    pthread_mutex_lock(&p.gate)
    p.orders = p.given
    pthread_mutex_unlock(&p.gate)


cdef inline void spend_credit(Mailbox* p, int peer) noexcept nogil:
    """An exchange has begun; `peer`: with the peer that the trainer wanted, NO_PEER for another."""
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
    """Keep the first cause; the trainer raises it at its next check()."""
    if p.fault == FAULT_NONE:
        p.fault_code = code
        p.fault_peer = peer
        store(&p.fault, fault)


cdef inline void record(Mailbox* p, Event event) noexcept nogil:
    if p.events == NULL or p.events_written - load(&p.events_read) >= EVENTS:
        return
    p.events[p.events_written % EVENTS] = event
    store(&p.events_written, p.events_written + 1)
