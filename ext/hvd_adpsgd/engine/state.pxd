# The state of one engine, and the inline functions with which its modules change it.
from libc.stdint cimport int64_t, uint64_t
from mpi4py cimport libmpi as mpi

from hvd_adpsgd.engine.store cimport Memory, pthread_mutex_t
from hvd_adpsgd.engine.butterfly cimport Network, Sum
from hvd_adpsgd.engine.transport cimport Transport

cdef extern from "<time.h>" nogil:
    ctypedef int clockid_t
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(clockid_t, timespec*)
    int nanosleep(const timespec*, timespec*)
    clockid_t CLOCK_MONOTONIC

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    int pthread_getcpuclockid(pthread_t, clockid_t*)
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_condattr_init(pthread_condattr_t*)
    int pthread_condattr_setclock(pthread_condattr_t*, clockid_t)
    int pthread_cond_init(pthread_cond_t*, pthread_condattr_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_timedwait(pthread_cond_t*, pthread_mutex_t*, const timespec*)
    int pthread_cond_destroy(pthread_cond_t*)

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define adpsgd_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define adpsgd_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    #endif
    """
    int64_t load "adpsgd_load"(int64_t*) nogil
    void store "adpsgd_store"(int64_t*, int64_t) nogil

cdef enum:
    LANES = 8               # chunks of one exchange in flight at once
    HISTOGRAM = 64          # staleness 0 .. 62 steps, and more
    EVENTS = 16384          # timeline records kept until the trainer takes them
    SPARES = 2              # sets of buffers kept for the next exchange
    SETS = 8                # sets of buffers in the memory shared on a host
    NOBODY = -1

cdef enum Kind:
    ASK = 1
    YES = 2
    NO = 3
    BYE = 4
    BYE_SEEN = 5
    CUT = 6                 # request: end this exchange after `nchunks` chunks, or a few more
    CUT_SEEN = 7            # answer: it ends after `nchunks`

cdef enum Phase:
    IDLE = 0
    ASKED = 1
    RUNNING = 2
    BROKEN = 3

cdef enum Stage:            # of a mean of all
    SUMMING = 0
    DRAINING = 1            # broken: wait until MPI has completed its requests
    AGREEING = 2

cdef enum Peer:
    ALIVE = 0
    SUSPECT = 1
    LEFT = 2
    FAILED = 3

cdef enum Fault:
    FAULT_NONE = 0
    FAULT_MPI = 1
    FAULT_LAYOUT = 2
    FAULT_WEIGHT = 3
    FAULT_MEMORY = 4
    FAULT_GONE = 5

cdef struct Message:
    int kind
    int exchange
    int nchunks
    int generation
    uint64_t fingerprint
    double weight
    int64_t round

cdef struct Outgoing:
    Message message
    mpi.MPI_Request request
    Outgoing* next

cdef struct Place:          # where a chunk is in the sender's shared memory
    int64_t offset
    int64_t nbytes          # 0: the snapshot was not finite

cdef struct Lane:
    bint busy
    bint sent
    bint received
    bint merged
    int nbytes              # received
    bint void               # our snapshot was not finite: neither side merges
    int chunk
    int64_t step
    double began
    char* out
    char* keep              # a second copy of our snapshot, in the caches: `out` bypasses them
    char* inp
    Place here              # on a shared host: of our snapshot, and of the peer's
    Place there
    mpi.MPI_Request send_request
    mpi.MPI_Request receive_request

cdef struct Waits:          # whether an older chunk of an exchange is not received, or not sent
    bint receive
    bint send

cdef struct Exchange:
    Phase phase
    bint active             # this side asked
    bint parked
    int number
    int nchunks
    int next                # first chunk not yet begun
    int done
    int tag
    bint cut                # this side has asked for an early end
    bint held               # ... and begins no chunk until CUT_SEEN says how many there are
    double began
    double moved            # when something last arrived from the peer
    double square           # sum of squared differences
    int64_t elements
    int64_t nbytes
    char* buffers           # private memory, or NULL
    int set                 # set of buffers in shared memory, or NOBODY
    bint closing
    mpi.MPI_Request last_send
    mpi.MPI_Request last_receive
    Lane lanes[LANES]

cdef struct Share:          # one chunk of a mean of all, in flight
    bint busy
    bint void               # ours was not finite
    int64_t count
    int itemsize
    int64_t step
    double began
    char* own               # our chunk; then in the type of sums, with two numbers behind it
    char* mine
    bint summing
    Sum sum

cdef struct Mean:
    mpi.MPI_Comm* comm      # for means only, for it may be revoked; shrunk after a failure. The caller's
    Network network         # over it
    bint survives           # ULFM is enabled: a mean is repeated without a failed peer
    Stage stage
    int* agreed             # behind the buffers: MPI may write to it after this struct is freed
    mpi.MPI_Request agreement
    int64_t wanted          # means that the trainer has asked for; finished: those that are over
    int64_t finished
    bint running
    bint replace            # the model becomes the mean; else the difference is a correction
    int nchunks
    int next
    int done
    double began
    double moved
    double square
    int64_t nbytes
    int64_t lane_nbytes
    char* buffers
    Share shares[LANES]

cdef struct Generation:
    int nchunks
    uint64_t fingerprint

cdef struct Event:
    int kind                # 0 exchange asked by us, 1 exchange asked by the peer, 2 merge, 3 parked,
                            # 4 mean of all (peer is NOBODY)
    int peer
    double began
    double ended
    int64_t nbytes
    int64_t step

cdef struct Counters:
    int64_t exchanges_active
    int64_t exchanges_passive
    int64_t refused         # our ASKs answered with NO
    int64_t declined        # ASKs that we answered with NO
    int64_t parked
    int64_t broken          # exchanges ended by a peer's failure
    int64_t void_chunks
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

cdef struct State:
    Transport transport
    Memory* memory
    pthread_t thread
    bint running
    int64_t ended           # the thread has ended
    # the plan
    int* schedule
    int64_t schedule_length
    int64_t cursor
    double weight
    double rate
    int wire
    bint offered_only
    double deadline_s
    double leave_deadline_s
    int64_t lane_nbytes
    int64_t shared_nbytes   # size of each engine's shared memory
    Generation* generations
    int ngenerations
    # from the trainer, under `gate`
    pthread_mutex_t gate
    pthread_cond_t wake
    bint fit
    bint paused
    bint leaving
    bint halted             # end the thread at once, without BYE
    bint broken             # this super learner leaves because it has failed
    int wanted              # peer of this round, NOBODY if none
    int64_t round           # number of the round; ASKs of another round get a NO
    double credit
    int64_t step
    # the thread's own
    Message inbox
    mpi.MPI_Request inbox_request
    Outgoing* outgoing
    Exchange* exchanges     # one per peer
    Mean mean
    char* spares[SPARES]
    char* shared            # our memory that peers on this host map, or NULL
    char** mapped           # theirs, by peer; NULL: chunks go through MPI
    bint taken[SETS]
    int asking              # peer of our ASK or active exchange
    int serving             # peer of our passive exchange
    int number
    double ask_after
    double retry_s
    char* peers          # Peer
    char* left_broken   # peers that left because they failed
    char* farewells         # BYEs that the peer has not acknowledged
    bint said_goodbye
    double leave_by
    double checked_at           # when failures were last asked for
    # for the trainer to read
    Counters counters
    int64_t in_flight_step  # step of the oldest snapshot in flight, NO_STEP if none
    int64_t at_rest         # paused, and no exchange or mean is running
    double pace             # seconds per chunk, lately; paced_at, paced: since when, from how many
    double paced_at
    int64_t paced
    int64_t peer_events
    int64_t finished
    int64_t* met            # exchanges with each peer
    int fault
    int fault_code
    int fault_peer
    Event* events
    int64_t events_written
    int64_t events_read

cdef inline double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef inline void sleep_s(double seconds) noexcept nogil:
    cdef timespec t
    t.tv_sec = 0
    t.tv_nsec = <long>(seconds * 1e9)
    nanosleep(&t, NULL)


cdef inline void latch(State* e, Fault fault, int code, int peer) noexcept nogil:
    """Keep the first cause; the trainer raises it at its next check()."""
    if e.fault == FAULT_NONE:
        e.fault_code = code
        e.fault_peer = peer
        e.fault = fault


cdef inline void record(State* e, int kind, int peer, double began, double ended, int64_t nbytes,
                        int64_t step) noexcept nogil:
    cdef Event* event
    if e.events == NULL or e.events_written - load(&e.events_read) >= EVENTS:
        return
    event = &e.events[e.events_written % EVENTS]
    event.kind = kind
    event.peer = peer
    event.began = began
    event.ended = ended
    event.nbytes = nbytes
    event.step = step
    store(&e.events_written, e.events_written + 1)


cdef inline void set_peer(State* e, int peer, Peer state) noexcept nogil:
    """LEFT and FAILED are final.

    The process of a peer that left ends, which MPI may report as a failure: it stays LEFT."""
    cdef Peer before = <Peer>e.peers[peer]
    if before != state and before < LEFT:
        e.peers[peer] = state
        store(&e.peer_events, e.peer_events + 1)
