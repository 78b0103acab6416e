# cython: language_level=3
# Why compiled: the engine's thread lives without the GIL, beside the trainer's computation.
"""The averaging engine of one super learner: one thread, one communicator, ask gossip.

    asker                         asked
    ASK   ------------------->    (free, fit and not leaving?)
          <-------------------    YES, or NO: ask somebody else
    chunk 0 <-> chunk 0           both send a snapshot and merge half of the difference
    ...                           (weight w: w times the difference)

Every engine answers while it waits, so no cycle of askers can block. A super learner is on the
asking side of at most one exchange and on the asked side of at most one; two partners have at
most one exchange between them. If both ask each other, the lower rank's question stands.

On one host a chunk is not copied by MPI: the snapshot is written into memory that the partner has
mapped, and the message only says where. A lane has two such buffers in turn, for a message about
chunk c + LANES tells that the partner has merged chunk c; a last empty message tells that it has
merged all.

A partner that stays silent for `deadline_s` is parked: its exchange keeps its buffers and is
finished when the partner answers, but the side it occupied is free again.

In rounds the trainer says who asks whom; an engine says NO to the question of another round.

The mean of all is a sum (_sums), chunk after chunk, LANES of them on their way at once. Each chunk
carries two more numbers: how many contribute (a model that is not finite does not), and the sum of
a number that belongs to the layout, which shows whether all average the same tensors.

With ULFM all agree at the end of a mean that everybody has it. If somebody was lost meanwhile, the
living make a smaller communicator and take the mean again, all of them from its first chunk: it
then is of what their models have become, so a chunk that some had merged already is only averaged
once more.
"""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from mpi4py cimport libmpi as mpi

from hvd_adpsgd._arena cimport (Arena, Memory, memory_merge, memory_nbytes, memory_snapshot,
                                memory_merge_mean, memory_share, memory_sum_nbytes,
                                pthread_mutex_t)
from hvd_adpsgd._sums cimport (Network, Sum, network_open, sum_drained, sum_nbytes_sent, sum_post,
                               sum_test)
from hvd_adpsgd._transport cimport (FAILURE_FATAL, FAILURE_LAYOUT, FAILURE_NONE, FAILURE_PARTNER,
                                    FAILURE_PENDING, TAG_CONTROL, Arrival, Failure, Transport, acknowledge_failures,
                                    classify, data_tag, give_up, let_go, post_agreement, post_receive,
                                    post_send, revoke, shrink, test, transport_open)

cdef extern from "<time.h>" nogil:
    ctypedef int clockid_t
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(clockid_t, timespec*)
    int nanosleep(const timespec*, timespec*)
    clockid_t CLOCK_MONOTONIC

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int option, unsigned long value)
    int PR_SET_TIMERSLACK
    int PR_SET_NAME
    int prctl_name "prctl"(int option, const char* name)

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
    LANES = 8               # chunks of one exchange on their way at once
    HISTOGRAM = 64          # staleness 0 .. 62 steps, and more
    EVENTS = 16384          # timeline records kept until the trainer takes them
    SPARES = 2              # sets of buffers kept for the next exchange
    SETS = 8                # sets of buffers in the memory shared on a host
    NOBODY = -1

cdef double IDLE_S = 0.9e-3         # shortest and longest sleep when nothing is on its way
cdef double LONG_IDLE_S = 10e-3
cdef double IDLE_SHARE = 0.02       # of the time since something moved, in between
cdef double LULL_S = 0.2
cdef double CENSUS_S = 1.0          # between looks at who is lost, also if no message says so
cdef double POLL_FIRST_S = 5e-6     # first and longest sleep while an exchange runs
cdef double POLL_LAST_S = 50e-6     # or half of the time of a chunk, on a slow network
cdef double SLOW_POLL_S = 1e-3      # at most, and when nothing moved for LULL_S
cdef double RETRY_FIRST_S = 50e-6   # pause after a NO, doubled up to the last
cdef double RETRY_LAST_S = 2e-3
cdef int64_t NO_STEP = 0x7FFFFFFFFFFFFFFF

cdef enum Kind:
    ASK = 1
    YES = 2
    NO = 3
    BYE = 4
    BYE_SEEN = 5
    CUT = 6                 # end this exchange after so many chunks, or a few more
    CUT_SEEN = 7            # after so many

cdef enum Phase:
    IDLE = 0
    ASKED = 1
    RUNNING = 2
    BROKEN = 3

cdef enum Stage:            # of a mean of all
    SUMMING = 0
    DRAINING = 1            # broken: requests under way end, with an error or not
    AGREEING = 2

cdef enum Partner:
    ALIVE = 0
    SUSPECT = 1
    LEFT = 2
    LOST = 3

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
    uint64_t lost           # who the sender knows to be lost: bit (rank % 64)

cdef struct Outgoing:
    Message message
    mpi.MPI_Request request
    Outgoing* next

cdef struct Place:          # where a chunk lies in the sender's shared memory
    int64_t offset
    int64_t nbytes          # 0: the snapshot was not finite

cdef struct Lane:
    bint busy
    bint sent
    bint received
    bint merged
    int nbytes              # received
    bint void               # one of the two snapshots was not finite: nobody merges
    int chunk
    int64_t step
    double began
    char* out
    char* keep              # our snapshot once more, in the caches: `out` is written past them
    char* inp
    Place here              # on a shared host: of our snapshot, and of the partner's
    Place there
    mpi.MPI_Request send_request
    mpi.MPI_Request receive_request

cdef struct Waits:          # whether an older chunk of an exchange has not arrived, or left
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
    bint cut                # this side has asked for an early end, and begins no chunk until told where
    bint held
    double began
    double moved            # when the partner last showed life
    double square           # sum of squared differences
    int64_t elements
    int64_t nbytes
    char* buffers           # private memory, or NULL
    int set                 # set of buffers in shared memory, or NOBODY
    bint closing
    mpi.MPI_Request last_send
    mpi.MPI_Request last_receive
    Lane lanes[LANES]

cdef struct Share:          # one chunk on its way to the mean of all
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
    mpi.MPI_Comm* comm      # of its own, for it may be revoked; without the lost. The caller's handle
    Network network         # over it
    bint survives           # ULFM is on
    Stage stage
    int* agreed             # behind the buffers: MPI may know it longer than this lives
    mpi.MPI_Request agreement
    int64_t wanted          # means that the trainer asked for, and those that are over
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
    int kind                # 0 exchange asked by us, 1 exchange asked by the partner, 2 merge, 3 parked,
                            # 4 mean of all (partner is NOBODY)
    int partner
    double began
    double ended
    int64_t nbytes
    int64_t step

cdef struct Counters:
    int64_t exchanges_active
    int64_t exchanges_passive
    int64_t refused         # our questions answered with NO
    int64_t declined        # questions we answered with NO
    int64_t parked
    int64_t broken          # exchanges that a partner's loss has cut
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
    bint halted             # end the thread at once, without goodbye
    bint broken             # the goodbye is that of a super learner that cannot go on
    int wanted              # partner of an explicit question
    int64_t round           # of those driven by hand
    double credit
    int64_t step
    # the thread's own
    Message inbox
    mpi.MPI_Request inbox_request
    Outgoing* outgoing
    Exchange* exchanges     # one per partner
    Mean mean
    char* spares[SPARES]
    char* shared            # our memory that partners on this host have mapped, or NULL
    char** mapped           # theirs, by partner; NULL: reached through MPI
    bint taken[SETS]
    int asking              # partner of our question or active exchange
    int serving             # partner of our passive exchange
    int number
    double ask_after
    double retry_s
    char* partners          # Partner
    char* broken_partners   # who said goodbye because it cannot go on
    char* farewells         # goodbyes not yet seen
    bint said_goodbye
    uint64_t lost           # as in Message
    uint64_t* last_words    # by partner: what its goodbye knew; of this one, what its own did
    double leave_by
    double counted              # when it was last looked at who is lost
    # for the trainer to read
    Counters counters
    int64_t in_flight_step  # oldest snapshot on its way, NO_STEP if none
    int64_t at_rest         # told to pause, and no exchange under way
    double pace             # seconds of a chunk, lately; and what it was counted from
    double paced_at
    int64_t paced
    int64_t partner_events
    int64_t finished
    int64_t* met            # exchanges with each partner
    int fault
    int fault_code
    int fault_partner
    Event* events
    int64_t events_written
    int64_t events_read


# ---- small tools ---------------------------------------------------------------------------

cdef double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef void rest(double seconds) noexcept nogil:
    cdef timespec t
    t.tv_sec = 0
    t.tv_nsec = <long>(seconds * 1e9)
    nanosleep(&t, NULL)


cdef void latch(State* e, Fault fault, int code, int partner) noexcept nogil:
    """The first cause stays; the trainer raises it at its next offer."""
    if e.fault == FAULT_NONE:
        e.fault_code = code
        e.fault_partner = partner
        e.fault = fault


cdef void record(State* e, int kind, int partner, double began, double ended, int64_t nbytes,
                 int64_t step) noexcept nogil:
    cdef Event* event
    if e.events == NULL or e.events_written - load(&e.events_read) >= EVENTS:
        return
    event = &e.events[e.events_written % EVENTS]
    event.kind = kind
    event.partner = partner
    event.began = began
    event.ended = ended
    event.nbytes = nbytes
    event.step = step
    store(&e.events_written, e.events_written + 1)


cdef uint64_t bit(int partner) noexcept nogil:
    return <uint64_t>1 << (partner % 64)


cdef void set_partner(State* e, int partner, Partner state) noexcept nogil:
    """Who left or is lost stays so: that somebody who left ends its process is no news."""
    cdef Partner before = <Partner>e.partners[partner]
    if before != state and before < LEFT:
        e.partners[partner] = state
        if state == LOST:
            e.lost |= bit(partner)
        store(&e.partner_events, e.partner_events + 1)


# ---- control messages ----------------------------------------------------------------------

cdef void listen(State* e) noexcept nogil:
    cdef int code = post_receive(&e.transport, &e.inbox, sizeof(Message), NOBODY, TAG_CONTROL,
                                 &e.inbox_request)
    if code != mpi.MPI_SUCCESS:
        handle_failure(e, code, NOBODY)


cdef void say(State* e, int partner, Kind kind, int exchange, int nchunks) noexcept nogil:
    cdef Outgoing* out = <Outgoing*>calloc(1, sizeof(Outgoing))
    cdef Generation* generation = &e.generations[e.ngenerations - 1]
    cdef int code
    if out == NULL:
        latch(e, FAULT_MEMORY, 0, partner)
        return
    out.message.kind = kind
    out.message.exchange = exchange
    out.message.nchunks = nchunks
    out.message.generation = e.ngenerations - 1
    out.message.fingerprint = generation.fingerprint
    out.message.weight = e.weight
    out.message.round = e.round
    out.message.lost = e.lost
    code = post_send(&e.transport, &out.message, sizeof(Message), partner, TAG_CONTROL, &out.request)
    if code != mpi.MPI_SUCCESS:
        free(out)
        handle_failure(e, code, partner)
        return
    out.next = e.outgoing
    e.outgoing = out


cdef bint reap_outgoing(State* e) noexcept nogil:
    cdef Outgoing** link = &e.outgoing
    cdef Outgoing* out
    cdef bint done = False, moved = False
    while link[0] != NULL:
        out = link[0]
        test(&out.request, &done, NULL)
        if done:
            link[0] = out.next
            free(out)
            moved = True
        else:
            link = &out.next
    return moved


cdef bint read_inbox(State* e) noexcept nogil:
    cdef Arrival arrival
    cdef Message message
    cdef bint done = False
    cdef int code = test(&e.inbox_request, &done, &arrival)
    if code != mpi.MPI_SUCCESS:
        handle_failure(e, code, NOBODY)
        if e.inbox_request == mpi.MPI_REQUEST_NULL and e.fault != FAULT_MPI:
            listen(e)
        return True
    if not done:
        return False
    message = e.inbox
    listen(e)
    hear(e, arrival.source, &message)
    return True


cdef void hear(State* e, int partner, Message* m) noexcept nogil:
    if e.partners[partner] == LOST:
        return                      # written before its end was noticed
    if e.partners[partner] == SUSPECT:
        set_partner(e, partner, ALIVE)
    if m.kind == ASK:
        hear_ask(e, partner, m)
    elif m.kind == YES:
        hear_yes(e, partner, m)
    elif m.kind == NO:
        hear_no(e, partner, m)
    elif m.kind == BYE:
        e.broken_partners[partner] = m.nchunks
        if m.nchunks:
            e.lost |= bit(partner)
        e.last_words[partner] = m.lost
        set_partner(e, partner, LEFT)
        e.farewells[partner] = 0
        say(e, partner, BYE_SEEN, 0, 0)
        dismiss(e, partner)
    elif m.kind == BYE_SEEN:
        e.farewells[partner] = 0
    elif m.kind == CUT:
        say(e, partner, CUT_SEEN, m.exchange, shorten(e, partner, m))
    elif m.kind == CUT_SEEN:
        shorten(e, partner, m)


cdef void dismiss(State* e, int partner) noexcept nogil:
    """Who left answers nothing more; what it sent before may still come."""
    cdef Exchange* x = &e.exchanges[partner]
    vacate(e, partner)
    if x.phase == ASKED:
        x.phase = IDLE
    elif x.phase == RUNNING:
        x.parked = True


cdef void cut(State* e, int partner) noexcept nogil:
    """Ask for an early end of an exchange: there is no time for all of it."""
    cdef Exchange* x = &e.exchanges[partner]
    if x.phase == RUNNING and not x.cut:
        x.cut = x.held = True
        say(e, partner, CUT, x.number, x.next)


cdef int shorten(State* e, int partner, Message* m) noexcept nogil:
    """End after the chunks that either side has begun: each is averaged on both, or on neither.

    Where both ask, both come to the same number; who has finished already keeps all."""
    cdef Exchange* x = &e.exchanges[partner]
    if x.phase == RUNNING and x.number == m.exchange:
        x.nchunks = min(x.nchunks, max(m.nchunks, x.next))
        x.held = False
    return x.nchunks


cdef bint same_model(State* e, int partner, Message* m) noexcept nogil:
    """Do both sides average the same tensors, with the same weight?"""
    if m.weight != e.weight:
        latch(e, FAULT_WEIGHT, 0, partner)
        return False
    if m.generation < e.ngenerations and e.generations[m.generation].fingerprint != m.fingerprint:
        latch(e, FAULT_LAYOUT, 0, partner)
        return False
    return True


cdef void hear_ask(State* e, int partner, Message* m) noexcept nogil:
    cdef Exchange* x = &e.exchanges[partner]
    cdef int mine = e.generations[e.ngenerations - 1].nchunks
    cdef bint crossed = x.phase == ASKED and e.transport.rank > partner
    if (not able(e) or m.round != e.round or e.serving != NOBODY
            or not (x.phase == IDLE or crossed)
            or not has_room(e, partner)
            or not same_model(e, partner, m)):
        e.counters.declined += 1
        say(e, partner, NO, m.exchange, 0)
        return
    if crossed and e.asking == partner:
        e.asking = NOBODY           # our own question will be answered with NO
    e.serving = partner
    say(e, partner, YES, m.exchange, min(m.nchunks, mine))
    if e.partners[partner] != LOST:
        begin(e, partner, m.exchange, min(m.nchunks, mine), False)


cdef void hear_yes(State* e, int partner, Message* m) noexcept nogil:
    cdef Exchange* x = &e.exchanges[partner]
    if x.phase != ASKED or x.number != m.exchange:
        return
    same_model(e, partner, m)
    e.retry_s = RETRY_FIRST_S
    begin(e, partner, m.exchange, m.nchunks, True)


cdef void hear_no(State* e, int partner, Message* m) noexcept nogil:
    cdef Exchange* x = &e.exchanges[partner]
    if x.phase != ASKED or x.number != m.exchange:
        return
    x.phase = IDLE
    e.counters.refused += 1
    same_model(e, partner, m)       # a partner with another model says NO for ever
    if e.asking == partner:
        e.asking = NOBODY
        e.ask_after = now() + e.retry_s
        e.retry_s = min(2 * e.retry_s, RETRY_LAST_S)


# ---- exchanges -----------------------------------------------------------------------------

cdef bint able(State* e) noexcept nogil:
    """May this super learner take part in a new exchange?"""
    return e.step >= 0 and e.fit and not e.paused and not e.leaving and e.fault == FAULT_NONE


cdef char* take_buffers(State* e) noexcept nogil:
    cdef int i
    cdef char* buffers
    for i in range(SPARES):
        if e.spares[i] != NULL:
            buffers = e.spares[i]
            e.spares[i] = NULL
            return buffers
    return <char*>malloc(3 * LANES * e.lane_nbytes)


cdef void return_buffers(State* e, Exchange* x) noexcept nogil:
    cdef int i
    cdef char* buffers = x.buffers
    x.buffers = NULL
    if x.set != NOBODY:
        e.taken[x.set] = False
        x.set = NOBODY
    for i in range(SPARES):
        if e.spares[i] == NULL:
            e.spares[i] = buffers
            return
    free(buffers)


cdef bint has_room(State* e, int partner) noexcept nogil:
    """Are there buffers for an exchange with `partner`, and for one more on our other side?

    Questions that are not yet answered count, for a silent partner may still say yes."""
    cdef int i, room = 0
    if e.mapped[partner] == NULL:
        return True
    for i in range(SETS):
        room += not e.taken[i]
    for i in range(e.transport.size):
        room -= i != partner and e.exchanges[i].phase == ASKED and e.mapped[i] != NULL
    return room >= 2


cdef bint equip(State* e, int partner) noexcept nogil:
    """Give an exchange its buffers."""
    cdef Exchange* x = &e.exchanges[partner]
    cdef int i
    x.set = NOBODY
    x.buffers = take_buffers(e)
    if x.buffers == NULL:
        return False
    for i in range(LANES):
        x.lanes[i].out = x.buffers + 3 * i * e.lane_nbytes
        x.lanes[i].inp = x.lanes[i].out + e.lane_nbytes
        x.lanes[i].keep = x.lanes[i].inp + e.lane_nbytes
        x.lanes[i].send_request = mpi.MPI_REQUEST_NULL
        x.lanes[i].receive_request = mpi.MPI_REQUEST_NULL
    x.last_send = mpi.MPI_REQUEST_NULL
    x.last_receive = mpi.MPI_REQUEST_NULL
    if e.mapped[partner] == NULL:
        return True
    for i in range(SETS):
        if not e.taken[i]:
            e.taken[i] = True
            x.set = i
            return True
    return False


cdef void begin(State* e, int partner, int number, int nchunks, bint active) noexcept nogil:
    cdef Exchange* x = &e.exchanges[partner]
    cdef int i
    if not equip(e, partner):
        latch(e, FAULT_MEMORY, 0, partner)
        return
    for i in range(LANES):
        x.lanes[i].busy = False
    x.closing = x.cut = x.held = False
    x.phase = RUNNING
    x.active = active
    x.parked = active and e.asking != partner
    x.number = number
    x.nchunks = nchunks
    x.next = 0
    x.done = 0
    x.tag = data_tag(number, active == (e.transport.rank > partner))
    x.began = now()
    x.moved = x.began
    x.square = 0
    x.elements = 0
    x.nbytes = 0
    pthread_mutex_lock(&e.gate)
    e.credit = max(e.credit - 1.0, -2.0 * max(e.rate, 1.0))
    if active and e.wanted == partner:
        e.wanted = NOBODY
    pthread_mutex_unlock(&e.gate)


cdef bint start_lane(State* e, int partner) noexcept nogil:
    """Send the snapshot of the next chunk and expect the partner's."""
    cdef Exchange* x = &e.exchanges[partner]
    cdef Lane* lane = &x.lanes[x.next % LANES]
    cdef int64_t nbytes
    cdef int code
    if x.next >= x.nchunks or lane.busy or x.held:
        return False
    nbytes = memory_nbytes(e.memory, x.next, e.wire)
    lane.chunk = x.next
    lane.busy = True
    lane.sent = False
    lane.received = False
    lane.merged = False
    lane.began = now()
    if not x.parked:                        # before the snapshot: the trainer must not miss it
        store(&e.in_flight_step, min(load(&e.in_flight_step), e.step))
    if x.set != NOBODY:
        code = start_shared(e, x, lane, partner, nbytes)
    else:
        code = start_sent(e, x, lane, partner, nbytes)
    x.nbytes += 0 if lane.void else nbytes
    x.next += 1
    if code != mpi.MPI_SUCCESS:
        handle_failure(e, code, partner)
        return False
    return True


cdef int start_sent(State* e, Exchange* x, Lane* lane, int partner, int64_t nbytes) noexcept nogil:
    """The chunk itself travels."""
    cdef int code = post_receive(&e.transport, lane.inp, <int>nbytes, partner, x.tag,
                                 &lane.receive_request)
    if code != mpi.MPI_SUCCESS:
        return code
    lane.void = memory_snapshot(e.memory, lane.chunk, e.wire, e.offered_only, True, lane.out,
                                lane.keep, &lane.step)
    return post_send(&e.transport, lane.out, 0 if lane.void else <int>nbytes, partner, x.tag,
                     &lane.send_request)


cdef int start_shared(State* e, Exchange* x, Lane* lane, int partner,
                      int64_t nbytes) noexcept nogil:
    """Only the place of the chunk travels."""
    cdef int turn = (lane.chunk // LANES) % 2
    cdef int code = post_receive(&e.transport, &lane.there, sizeof(Place), partner, x.tag,
                                 &lane.receive_request)
    if code != mpi.MPI_SUCCESS:
        return code
    lane.here.offset = (2 * (x.set * LANES + lane.chunk % LANES) + turn) * e.lane_nbytes
    lane.out = e.shared + lane.here.offset
    lane.void = memory_snapshot(e.memory, lane.chunk, e.wire, e.offered_only, True, lane.out,
                                lane.keep, &lane.step)
    lane.here.nbytes = 0 if lane.void else nbytes
    return post_send(&e.transport, &lane.here, sizeof(Place), partner, x.tag, &lane.send_request)


cdef int open_place(State* e, int partner, Lane* lane) noexcept nogil:
    """Find the partner's chunk in its shared memory. Returns its size, 0 for a place outside."""
    cdef int64_t last = e.shared_nbytes - e.lane_nbytes
    if lane.there.offset < 0 or lane.there.offset > last or not (
            0 <= lane.there.nbytes <= e.lane_nbytes):
        latch(e, FAULT_LAYOUT, 0, partner)
        return 0
    lane.inp = e.mapped[partner] + lane.there.offset
    return <int>lane.there.nbytes


cdef bint advance_lane(State* e, int partner, Lane* lane, Waits* waits) noexcept nogil:
    """One look at a chunk. Chunks arrive and leave in order: behind one that waits nobody looks."""
    cdef Exchange* x = &e.exchanges[partner]
    cdef Arrival arrival
    cdef bint done = False, moved = False
    cdef int code
    if not lane.received and not waits.receive:
        code = test(&lane.receive_request, &done, &arrival)
        if code != mpi.MPI_SUCCESS:
            handle_failure(e, code, partner)
            return True
        if done:
            lane.received = True
            moved = True
            if x.set != NOBODY:
                arrival.nbytes = open_place(e, partner, lane)
            e.counters.bytes_received += arrival.nbytes
            lane.nbytes = arrival.nbytes
        waits.receive = not done
    if lane.received and not lane.merged:
        lane.merged = merge_lane(e, partner, lane, lane.nbytes)
        x.moved = now()             # waiting for the node's own all-reduce is not silence
        moved |= lane.merged
    if not lane.sent and not waits.send:
        code = test(&lane.send_request, &lane.sent, NULL)
        if code != mpi.MPI_SUCCESS:
            handle_failure(e, code, partner)
            return True
        waits.send = not lane.sent
        moved |= lane.sent
    if lane.merged and lane.sent:
        lane.busy = False
        x.done += 1
    return moved


cdef bint merge_lane(State* e, int partner, Lane* lane, int nbytes) noexcept nogil:
    """correction += w (received - sent), unless one of the two snapshots was void.

    False if the open slot is held: try again later."""
    cdef Exchange* x = &e.exchanges[partner]
    cdef int64_t stale = max(e.step, lane.step) + 1 - lane.step  # the mirror may be ahead of the offer
    cdef double began, square
    if nbytes != 0 and nbytes != memory_nbytes(e.memory, lane.chunk, e.wire):
        latch(e, FAULT_LAYOUT, 0, partner)  # the two models are cut into different chunks
        nbytes = 0
    if lane.void or nbytes == 0:
        e.counters.void_chunks += 1
        return True
    began = now()
    square = memory_merge(e.memory, lane.chunk, e.wire, e.weight, lane.inp, lane.keep)
    if square < 0:
        return False
    x.square += square
    pthread_mutex_lock(&e.memory.lock)      # the trainer may be adding chunks
    x.elements += e.memory.chunks[lane.chunk].count
    pthread_mutex_unlock(&e.memory.lock)
    e.counters.chunks += 1
    e.counters.staleness[max(0, min(stale, HISTOGRAM - 1))] += 1
    record(e, 2, partner, began, now(), nbytes, lane.step)
    return True


cdef bint advance(State* e, int partner) noexcept nogil:
    """Whatever can be done now for the exchange with `partner`. True if something was."""
    cdef Exchange* x = &e.exchanges[partner]
    cdef Waits waits = [False, False]
    cdef Lane* lane
    cdef bint moved = False
    cdef int i
    if x.phase == RUNNING:
        for i in range(LANES):              # x.next takes the lane of the oldest chunk
            lane = &x.lanes[(x.next + i) % LANES]
            if lane.busy and x.phase == RUNNING:
                moved |= advance_lane(e, partner, lane, &waits)
        while x.phase == RUNNING and start_lane(e, partner):
            moved = True
        if x.phase == RUNNING and x.done == x.nchunks and closed(e, partner):
            finish(e, partner)
            return True
    if moved:
        x.moved = now()
        if e.partners[partner] == SUSPECT:
            set_partner(e, partner, ALIVE)
    elif not x.parked and now() - x.moved > e.deadline_s:
        park(e, partner)
    return moved


cdef bint closed(State* e, int partner) noexcept nogil:
    """On a shared host: has the partner read all of our snapshots?"""
    cdef Exchange* x = &e.exchanges[partner]
    cdef bint sent = False, received = False
    cdef int code
    if x.set == NOBODY:
        return True
    if not x.closing:
        x.closing = True
        code = post_receive(&e.transport, NULL, 0, partner, x.tag, &x.last_receive)
        if code == mpi.MPI_SUCCESS:
            code = post_send(&e.transport, NULL, 0, partner, x.tag, &x.last_send)
        if code != mpi.MPI_SUCCESS:
            handle_failure(e, code, partner)
            return False
    code = test(&x.last_receive, &received, NULL)
    if code == mpi.MPI_SUCCESS:
        code = test(&x.last_send, &sent, NULL)
    if code != mpi.MPI_SUCCESS:
        handle_failure(e, code, partner)
        return False
    return received and sent


cdef void park(State* e, int partner) noexcept nogil:
    """A silent partner keeps its buffers and loses its side of ours."""
    cdef Exchange* x = &e.exchanges[partner]
    x.parked = True
    vacate(e, partner)
    e.counters.parked += 1
    set_partner(e, partner, SUSPECT)
    record(e, 3, partner, x.began, now(), x.nbytes, e.step)


cdef void vacate(State* e, int partner) noexcept nogil:
    if e.asking == partner:
        e.asking = NOBODY
    if e.serving == partner:
        e.serving = NOBODY


cdef void finish(State* e, int partner) noexcept nogil:
    cdef Exchange* x = &e.exchanges[partner]
    cdef double ended = now()
    vacate(e, partner)
    if x.active:
        e.counters.exchanges_active += 1
    else:
        e.counters.exchanges_passive += 1
    e.counters.bytes_sent += x.nbytes
    e.counters.exchange_s += ended - x.began
    if x.elements:
        e.counters.compared += 1
        e.counters.square += x.square
        e.counters.square_elements += x.elements
        e.counters.last_square = x.square
    store(&e.met[partner], e.met[partner] + 1)
    record(e, 0 if x.active else 1, partner, x.began, ended, x.nbytes, e.step)
    return_buffers(e, x)
    x.phase = IDLE
    x.parked = False
    store(&e.finished, e.finished + 1)


cdef bint eligible(State* e, int partner) noexcept nogil:
    return (partner >= 0 and partner != e.transport.rank and e.partners[partner] == ALIVE
            and e.exchanges[partner].phase == IDLE and has_room(e, partner))


cdef int choose(State* e) noexcept nogil:
    """The next partner of the plan that can be asked, or NOBODY."""
    cdef int64_t tries = min(e.schedule_length, 64)
    cdef int partner
    while tries > 0:
        partner = e.schedule[e.cursor % e.schedule_length]
        e.cursor += 1
        tries -= 1
        if eligible(e, partner):
            return partner
    return NOBODY


cdef bint due(State* e) noexcept nogil:
    """Is it time to ask? An explicit wish needs no credit."""
    if e.asking != NOBODY or not able(e) or now() < e.ask_after:
        return False
    if e.wanted != NOBODY:
        return eligible(e, e.wanted)
    return e.credit >= 1.0 - 1e-9 and e.schedule_length > 0


cdef bint ask_if_due(State* e) noexcept nogil:
    cdef Exchange* x
    cdef int partner
    if not due(e):
        return False
    partner = e.wanted if e.wanted != NOBODY else choose(e)
    if partner == NOBODY:
        e.ask_after = now() + RETRY_LAST_S
        return False
    x = &e.exchanges[partner]
    e.number = (e.number + 1) & 0x3FFFFFFF
    x.phase = ASKED
    x.parked = False
    x.active = True
    x.number = e.number
    x.began = now()
    x.moved = x.began
    e.asking = partner
    say(e, partner, ASK, e.number, e.generations[e.ngenerations - 1].nchunks)
    return True


# ---- the mean of all -----------------------------------------------------------------------

cdef bint reserve_mean(State* e) noexcept nogil:
    """Room for LANES chunks: each in its own type, and three times in the type of sums."""
    cdef Mean* m = &e.mean
    cdef int i
    cdef int64_t sums = 2 * e.lane_nbytes + 16      # a 16-bit chunk doubles
    if m.buffers != NULL:
        return True
    m.lane_nbytes = e.lane_nbytes + 3 * sums        # a multiple of 4, as the lane is
    m.buffers = <char*>malloc(LANES * m.lane_nbytes + sizeof(int))
    if m.buffers == NULL:
        return False
    for i in range(LANES):
        m.shares[i].own = m.buffers + i * m.lane_nbytes
        m.shares[i].mine = m.shares[i].own + e.lane_nbytes
        m.shares[i].sum.total = m.shares[i].mine + sums
        m.shares[i].sum.incoming = m.shares[i].sum.total + sums
    m.agreed = <int*>(m.buffers + LANES * m.lane_nbytes)
    return True


cdef bint begin_mean(State* e) noexcept nogil:
    cdef Mean* m = &e.mean
    if m.running or m.finished >= load(&m.wanted) or e.fault != FAULT_NONE:
        return False
    if not reserve_mean(e):
        latch(e, FAULT_MEMORY, 0, NOBODY)
        return False
    m.running = True
    m.nchunks = e.generations[e.ngenerations - 1].nchunks
    m.began = now()
    m.nbytes = 0
    begin_sums(m)
    return True


cdef void begin_sums(Mean* m) noexcept nogil:
    m.stage = SUMMING
    m.next = 0
    m.done = 0
    m.square = 0
    m.moved = now()


cdef double layout_mark(State* e, int chunk) noexcept nogil:
    """A small whole number, whose sum over all is exact also in float32."""
    cdef uint64_t number = e.generations[e.ngenerations - 1].fingerprint
    cdef uint64_t modulus = 4093
    return 1.0 + <double>((number + <uint64_t>chunk * 31) % modulus)


cdef void put_number(Share* s, char* where, int i, double value) noexcept nogil:
    if s.itemsize == 8:
        (<double*>where)[s.count + i] = value
    else:
        (<float*>where)[s.count + i] = <float>value


cdef double get_number(Share* s, char* where, int i) noexcept nogil:
    return (<double*>where)[s.count + i] if s.itemsize == 8 else (<float*>where)[s.count + i]


cdef bint start_share(State* e) noexcept nogil:
    """Contribute the next chunk."""
    cdef Mean* m = &e.mean
    cdef Share* s = &m.shares[m.next % LANES]
    cdef int code
    if m.next >= m.nchunks or s.busy:
        return False
    m.nbytes += memory_sum_nbytes(e.memory, m.next, &s.count, &s.itemsize)
    s.void = memory_share(e.memory, m.next, e.offered_only, s.own, s.mine, &s.step)
    put_number(s, s.mine, 0, 0 if s.void else 1)
    put_number(s, s.mine, 1, layout_mark(e, m.next))
    s.began = now()
    s.busy = True
    m.next += 1
    s.summing = True
    code = sum_post(&m.network, &s.sum, s.mine, <int>s.count + 2, s.itemsize == 8, m.next)
    if code != mpi.MPI_SUCCESS:
        break_mean(e, code)
        return False
    return True


cdef bint advance_share(State* e, int lane) noexcept nogil:
    """Merge the chunk of a lane if its sum has arrived."""
    cdef Mean* m = &e.mean
    cdef Share* s = &m.shares[lane]
    cdef int chunk = m.done                 # sums are taken in in order
    cdef bint arrived = False
    cdef double square, learners, began = now()
    cdef int code
    if not s.busy:
        return False
    if s.summing:                           # also while it is not yet this one's turn
        code = sum_test(&m.network, &s.sum, &arrived)
        if code != mpi.MPI_SUCCESS:
            break_mean(e, code)
            return True
        s.summing = not arrived
    if s.summing or chunk % LANES != lane:
        return arrived
    learners = get_number(s, s.sum.total, 0)
    square = -2.0
    if get_number(s, s.sum.total, 1) != m.network.size * layout_mark(e, chunk):
        latch(e, FAULT_LAYOUT, 0, NOBODY)
    elif not s.void and learners > 0:
        square = memory_merge_mean(e.memory, chunk, m.replace, learners, s.sum.total, s.mine)
    if square == -1.0:
        return False                        # the slot is held: later
    if square >= 0:
        m.square += square
        e.counters.chunks += 1
        record(e, 2, NOBODY, began, now(), s.count * s.itemsize, s.step)
    else:
        e.counters.void_chunks += 1
    s.busy = False
    m.done += 1
    return True


cdef bint advance_mean(State* e) noexcept nogil:
    """Whatever can be done now for the mean of all. True if something was."""
    cdef Mean* m = &e.mean
    cdef bint moved = begin_mean(e)
    if not m.running or e.fault != FAULT_NONE:
        return moved
    if m.stage == SUMMING:
        moved |= advance_sums(e)
    elif m.stage == DRAINING:
        moved |= drain_sums(e)
    else:
        moved |= advance_agreement(e)
    if moved:
        m.moved = now()
    elif m.running:
        require_everybody(e)
    return moved


cdef bint advance_sums(State* e) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef bint moved = False
    cdef int i
    for i in range(LANES):
        if e.fault == FAULT_NONE and m.stage == SUMMING:
            moved |= advance_share(e, i)
    while e.fault == FAULT_NONE and m.stage == SUMMING and start_share(e):
        moved = True
    if e.fault == FAULT_NONE and m.stage == SUMMING and m.done == m.nchunks:
        conclude(e)
        return True
    return moved


cdef void conclude(State* e) noexcept nogil:
    """All sums are in here; are they everywhere?"""
    if e.mean.survives:
        agree(e, True)
    else:
        finish_mean(e)


cdef void agree(State* e, bint good) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef int code
    m.stage = AGREEING
    m.agreed[0] = good
    code = post_agreement(m.comm[0], m.agreed, &m.agreement)
    if code != mpi.MPI_SUCCESS:
        latch(e, FAULT_MPI, code, NOBODY)


cdef bint advance_agreement(State* e) noexcept nogil:
    """The mean is over if all say so; else the living take it again. All alike."""
    cdef Mean* m = &e.mean
    cdef bint done = False
    cdef int code = test(&m.agreement, &done, NULL)
    if not done:
        return False
    if code == mpi.MPI_SUCCESS and m.agreed[0]:
        finish_mean(e)
        return True
    lose_acknowledged(e)
    code = shrink(m.comm)
    if code == mpi.MPI_SUCCESS:
        code = network_open(&m.network, m.comm[0], m.network.butterfly)
    if code != mpi.MPI_SUCCESS:
        latch(e, FAULT_MPI, code, NOBODY)
    begin_sums(m)
    return True


cdef bint drain_sums(State* e) noexcept nogil:
    """Wait for the requests of a broken mean, whose buffers MPI may still touch; then say no."""
    cdef Mean* m = &e.mean
    cdef bint moved = False, busy = False
    cdef int i
    for i in range(LANES):
        if m.shares[i].busy and sum_drained(&m.shares[i].sum):
            m.shares[i].busy = False
            moved = True
        busy |= m.shares[i].busy
    if not busy:
        agree(e, False)
        return True
    return moved


cdef void finish_mean(State* e) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef double ended = now()
    m.running = False
    e.counters.means += 1
    e.counters.mean_s += ended - m.began
    e.counters.mean_square = m.square
    e.counters.bytes_sent += sum_nbytes_sent(&m.network, m.nbytes)
    e.counters.bytes_received += sum_nbytes_sent(&m.network, m.nbytes)
    record(e, 4, NOBODY, m.began, ended, m.nbytes, e.step)
    store(&m.finished, m.finished + 1)


cdef void require_everybody(State* e) noexcept nogil:
    """A mean waits for the slow, but not for whoever will never come.

    With ULFM who is lost is no longer asked, nor who has left once its process has ended."""
    cdef int partner = find_gone(e)
    cdef double patience = e.deadline_s         # what it sent may still arrive
    if e.mean.survives:
        patience += 2 * e.leave_deadline_s
    if partner != NOBODY and now() - e.mean.moved > patience:
        latch(e, FAULT_GONE, 0, partner)


cdef int find_gone(State* e) noexcept nogil:
    cdef int partner
    for partner in range(e.transport.size):
        if e.partners[partner] == LEFT or (e.partners[partner] == LOST and not e.mean.survives):
            return partner
    return NOBODY


cdef void break_mean(State* e, int code) noexcept nogil:
    """A sum has failed: nobody else may wait for one."""
    cdef Mean* m = &e.mean
    if m.survives:
        revoke(m.comm[0])
        m.stage = DRAINING
    else:                                       # without one of the learners it is not the mean
        handle_failure(e, code, NOBODY)
        latch(e, FAULT_GONE, code, find_gone(e))


# ---- failures ------------------------------------------------------------------------------

cdef void handle_failure(State* e, int code, int partner) noexcept nogil:
    """Sort an MPI error: a partner that is gone costs its exchange, anything else is latched."""
    cdef Failure failure = classify(code)
    if failure == FAILURE_PARTNER or failure == FAILURE_PENDING:
        if partner != NOBODY and failure == FAILURE_PARTNER:
            lose(e, partner)
        lose_acknowledged(e)
    elif failure == FAILURE_LAYOUT:
        latch(e, FAULT_LAYOUT, code, partner)
    elif failure == FAILURE_FATAL:
        latch(e, FAULT_MPI, code, partner)


cdef void lose_acknowledged(State* e) noexcept nogil:
    cdef int partner
    cdef char* lost = <char*>calloc(e.transport.size, 1)
    if lost == NULL:
        latch(e, FAULT_MEMORY, 0, NOBODY)
        return
    acknowledge_failures(&e.transport, lost)
    for partner in range(e.transport.size):
        if lost[partner]:
            lose(e, partner)
    free(lost)


cdef void take_census(State* e) noexcept nogil:
    """Look at who is lost now and then: who waits for a question only may get no error for it."""
    cdef double t = now()
    if t > e.counted + CENSUS_S:
        e.counted = t
        lose_acknowledged(e)


cdef void lose(State* e, int partner) noexcept nogil:
    """The partner's process is gone. Its buffers stay while MPI may hold their addresses."""
    cdef Exchange* x = &e.exchanges[partner]
    cdef int i
    if e.partners[partner] == LOST:
        return
    set_partner(e, partner, LOST)
    e.farewells[partner] = 0
    vacate(e, partner)
    if x.phase == RUNNING:
        for i in range(LANES):
            if x.lanes[i].receive_request != mpi.MPI_REQUEST_NULL:
                mpi.MPI_Cancel(&x.lanes[i].receive_request)
        if x.last_receive != mpi.MPI_REQUEST_NULL:
            mpi.MPI_Cancel(&x.last_receive)
        e.counters.broken += 1
        x.phase = BROKEN
    elif x.phase == ASKED:
        x.phase = IDLE
    if x.phase == BROKEN and x.set != NOBODY:
        e.taken[x.set] = False      # MPI never knew this memory, and who read it is gone
        x.set = NOBODY


cdef bint retire(State* e, int partner) noexcept nogil:
    """A broken exchange gives its buffers back when MPI has let go of them. True if it has."""
    cdef Exchange* x = &e.exchanges[partner]
    cdef bint free = let_go(&x.last_send) and let_go(&x.last_receive)
    cdef int i
    for i in range(LANES):
        free &= let_go(&x.lanes[i].send_request) and let_go(&x.lanes[i].receive_request)
        x.lanes[i].busy = False
    if not free:
        return False
    return_buffers(e, x)
    x.phase = IDLE
    x.parked = False
    return True


# ---- the loop ------------------------------------------------------------------------------

cdef bint turn(State* e) noexcept nogil:
    """One look at everything. True if anything moved."""
    cdef bint paused = e.paused, busy = False
    cdef bint moved = read_inbox(e)
    cdef int64_t oldest = NO_STEP
    cdef Exchange* x
    cdef int partner, i
    if e.outgoing != NULL:
        moved |= reap_outgoing(e)
    take_census(e)
    for partner in range(e.transport.size):
        x = &e.exchanges[partner]
        if x.phase == ASKED or x.phase == RUNNING:
            moved |= advance(e, partner)
            if x.phase == RUNNING and not x.parked:
                for i in range(LANES):
                    if x.lanes[i].busy and not x.lanes[i].received:
                        oldest = min(oldest, x.lanes[i].step)
        elif x.phase == BROKEN:
            moved |= retire(e, partner)
    moved |= ask_if_due(e)
    moved |= advance_mean(e)
    busy = e.mean.running and e.fault == FAULT_NONE
    for partner in range(e.transport.size):
        x = &e.exchanges[partner]
        busy |= (x.phase == ASKED or x.phase == RUNNING) and e.partners[partner] != LOST
    store(&e.in_flight_step, oldest)
    store(&e.at_rest, paused and not busy)
    e.counters.turns += 1
    return moved


cdef bint say_goodbye(State* e) noexcept nogil:
    """Leave: finish what runs, tell everybody, wait until they know. True when done."""
    cdef int partner
    cdef bint waiting = False
    cdef double t = now()
    if e.leave_by == 0:
        e.leave_by = t + e.leave_deadline_s
    if t > e.leave_by:
        return True
    waiting = e.mean.running and e.fault == FAULT_NONE
    for partner in range(e.transport.size):     # also what was parked and has come back
        if (e.partners[partner] in (ALIVE, LEFT)
                and e.exchanges[partner].phase in (ASKED, RUNNING)):
            waiting = True                      # who has left had sent all of its chunks
            if e.partners[partner] == ALIVE and t > e.leave_by - e.leave_deadline_s / 2:
                cut(e, partner)
    if waiting or e.asking != NOBODY or e.serving != NOBODY:
        return False
    if not e.said_goodbye:
        e.said_goodbye = True
        e.last_words[e.transport.rank] = e.lost
        for partner in range(e.transport.size):
            if partner != e.transport.rank and e.partners[partner] in (ALIVE, SUSPECT):
                e.farewells[partner] = 1
                say(e, partner, BYE, 0, e.broken)
    for partner in range(e.transport.size):
        waiting |= e.farewells[partner] != 0 and e.partners[partner] == ALIVE
    return not waiting and e.outgoing == NULL


cdef void sleep_until_woken(State* e, double seconds) noexcept nogil:
    cdef timespec until
    clock_gettime(CLOCK_MONOTONIC, &until)
    until.tv_nsec += <long>(seconds * 1e9)
    if until.tv_nsec >= 1000000000:
        until.tv_nsec -= 1000000000
        until.tv_sec += 1
    pthread_mutex_lock(&e.gate)
    if not due(e) and e.mean.finished >= e.mean.wanted:
        pthread_cond_timedwait(&e.wake, &e.gate, &until)
    pthread_mutex_unlock(&e.gate)


cdef void keep_pace(State* e, double t) noexcept nogil:
    """Seconds from one chunk to the next, lately. All lanes may arrive at once, and then none for long."""
    cdef int64_t chunks = e.counters.chunks + e.counters.void_chunks
    if chunks > e.paced:
        e.pace += ((t - e.paced_at) / (chunks - e.paced) - e.pace) / LANES
        e.paced = chunks
        e.paced_at = t


cdef double longest_poll(State* e, double lull) noexcept nogil:
    """With LANES chunks on their way, who looks twice per chunk keeps the network busy."""
    if lull > LULL_S:
        return SLOW_POLL_S
    return min(max(POLL_LAST_S, e.pace / 2), SLOW_POLL_S)


cdef void* live(void* argument) noexcept nogil:
    """The thread: look, act, and sleep a little longer each time there was nothing to do."""
    cdef State* e = <State*>argument
    cdef double poll_s = 0, last_s, idle_s, moved = now()
    cdef bint busy
    prctl(PR_SET_TIMERSLACK, 1000)
    prctl_name(PR_SET_NAME, b"adpsgd-engine")
    listen(e)
    while e.fault != FAULT_MPI and not e.halted:
        busy = turn(e)
        if e.leaving and say_goodbye(e):
            break
        if busy:
            poll_s = 0
            moved = now()
            keep_pace(e, moved)
            continue
        if e.asking == NOBODY and e.serving == NOBODY and not e.mean.running and not e.leaving:
            idle_s = min(max(IDLE_SHARE * (now() - moved), IDLE_S), LONG_IDLE_S)
            sleep_until_woken(e, idle_s)
            e.paced_at = now()
        elif poll_s == 0:
            sched_yield()
            poll_s = max(POLL_FIRST_S, longest_poll(e, 0) / LANES)
        else:
            rest(poll_s)
            poll_s = min(2 * poll_s, longest_poll(e, now() - moved))
    if e.inbox_request != mpi.MPI_REQUEST_NULL:
        give_up(&e.inbox_request)
    store(&e.in_flight_step, NO_STEP)
    store(&e.ended, 1)
    return NULL


# ---- the Python face ------------------------------------------------------------------------

cdef class Loop:
    """The engine's thread and what the trainer may say to it. See hvd_adpsgd.engine.Engine."""

    cdef State state
    cdef object keep            # arena and communicator stay alive as long as the thread may

    def __cinit__(self, *args, **kwargs):
        memset(&self.state, 0, sizeof(State))

    def __init__(self, comm, uintptr_t comm_address, Arena arena, const int[::1] schedule,
                 double weight, double rate, int wire, bint offered_only, double deadline_s,
                 double leave_deadline_s, int64_t lane_nbytes, bint timeline):
        cdef State* e = &self.state
        cdef pthread_condattr_t attributes
        cdef int code = transport_open(&e.transport, (<mpi.MPI_Comm*>comm_address)[0])
        if code != mpi.MPI_SUCCESS:
            raise RuntimeError(f"MPI code {code} on opening the engine's communicator")
        self.keep = (comm, arena)
        e.memory = &arena.memory
        e.weight = weight
        e.rate = rate
        e.wire = wire
        e.offered_only = offered_only
        e.deadline_s = deadline_s
        e.leave_deadline_s = leave_deadline_s
        e.lane_nbytes = lane_nbytes
        e.step = -1
        e.fit = True
        e.wanted = NOBODY
        e.asking = NOBODY
        e.serving = NOBODY
        e.retry_s = RETRY_FIRST_S
        e.in_flight_step = NO_STEP
        e.inbox_request = mpi.MPI_REQUEST_NULL
        e.schedule_length = schedule.shape[0]
        e.schedule = <int*>calloc(max(1, e.schedule_length), sizeof(int))
        e.exchanges = <Exchange*>calloc(e.transport.size, sizeof(Exchange))
        e.mapped = <char**>calloc(e.transport.size, sizeof(char*))
        e.partners = <char*>calloc(e.transport.size, 1)
        e.broken_partners = <char*>calloc(e.transport.size, 1)
        e.farewells = <char*>calloc(e.transport.size, 1)
        e.last_words = <uint64_t*>calloc(e.transport.size, sizeof(uint64_t))
        e.met = <int64_t*>calloc(e.transport.size, sizeof(int64_t))
        e.generations = <Generation*>calloc(1024, sizeof(Generation))
        if timeline:
            e.events = <Event*>calloc(EVENTS, sizeof(Event))
        if not (e.schedule and e.exchanges and e.mapped and e.partners and e.broken_partners
                and e.farewells and e.last_words and e.met and e.generations):
            raise MemoryError("engine")
        if e.schedule_length:
            memcpy(e.schedule, &schedule[0], e.schedule_length * sizeof(int))
        pthread_mutex_init(&e.gate, NULL)
        pthread_condattr_init(&attributes)
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)
        pthread_cond_init(&e.wake, &attributes)

    def __dealloc__(self):
        cdef State* e = &self.state
        if e.exchanges == NULL:
            return
        if e.running:                   # nobody said stop: the thread must not outlive its memory
            with nogil:
                e.halted = True
                pthread_join(e.thread, NULL)
        free(e.schedule)
        free(e.mapped)
        free(e.partners)
        free(e.broken_partners)
        free(e.farewells)
        free(e.last_words)
        free(e.met)
        free(e.generations)
        free(e.events)
        self.free_exchanges()

    cdef void free_exchanges(self) noexcept:
        """Free what MPI can no longer touch: exchanges that are not under way."""
        cdef int i
        for i in range(SPARES):
            free(self.state.spares[i])
        if not self.state.mean.running:
            free(self.state.mean.buffers)
        for i in range(self.state.transport.size):
            if self.state.exchanges[i].phase != IDLE:
                return
        free(self.state.exchanges)

    def extend(self, int nchunks, uint64_t fingerprint):
        """The layout now has `nchunks` chunks in all."""
        cdef State* e = &self.state
        if e.ngenerations == 1024:
            raise RuntimeError("more than 1023 add_param_group calls on one averaged optimizer")
        e.generations[e.ngenerations].nchunks = nchunks
        e.generations[e.ngenerations].fingerprint = fingerprint
        e.ngenerations += 1

    def share(self, uintptr_t own, addresses):
        """Use memory shared on this host: `own` of shared_nbytes, and each partner's (0: none)."""
        cdef int i
        self.state.shared = <char*>own
        self.state.shared_nbytes = 2 * SETS * LANES * self.state.lane_nbytes
        for i in range(self.state.transport.size):
            self.state.mapped[i] = <char*><uintptr_t>addresses[i]

    @staticmethod
    def shared_nbytes(int64_t lane_nbytes):
        """Size of the memory that an engine shares with its partners on the host."""
        return 2 * SETS * LANES * lane_nbytes

    def start(self):
        cdef State* e = &self.state
        if pthread_create(&e.thread, NULL, live, e) != 0:
            raise RuntimeError("the operating system refused a thread for the averaging engine")
        e.running = True

    def offer(self, int64_t step, bint fit):
        """The mirror holds the model of `step`; `fit` says whether all of it is finite."""
        cdef State* e = &self.state
        with nogil:
            pthread_mutex_lock(&e.gate)
            e.step = step
            e.fit = fit
            e.credit = min(e.credit + e.rate, max(e.rate, 1.0))
            pthread_cond_signal(&e.wake)
            pthread_mutex_unlock(&e.gate)

    def ask(self, int partner):
        """Ask `partner` whatever the credit says; NOBODY (-1) withdraws the wish."""
        cdef State* e = &self.state
        pthread_mutex_lock(&e.gate)
        e.wanted = partner
        pthread_cond_signal(&e.wake)
        pthread_mutex_unlock(&e.gate)

    def begin_round(self, int64_t round, int partner):
        """From now on exchange with whoever is in the same round; ask `partner` (-1: nobody)."""
        cdef State* e = &self.state
        pthread_mutex_lock(&e.gate)
        e.round = round
        e.wanted = partner
        pthread_cond_signal(&e.wake)
        pthread_mutex_unlock(&e.gate)

    def average_all(self, uintptr_t comm_address, bint survives, bint butterfly):
        """Means of all go over this communicator, errors returned; `survives`: ULFM is on.

        Sums are MPI's own, or those of a butterfly (see _sums).

        The handle at the address becomes that of the living when somebody is lost, so it must stay.
        """
        cdef Mean* m = &self.state.mean
        m.comm = <mpi.MPI_Comm*>comm_address
        m.survives = survives
        m.agreement = mpi.MPI_REQUEST_NULL
        if network_open(&m.network, m.comm[0], butterfly) != mpi.MPI_SUCCESS:
            raise RuntimeError("MPI refused the communicator for means of all")

    def begin_mean(self, bint replace):
        """Take part in the next mean of all, as every other engine must. Returns its number."""
        cdef State* e = &self.state
        pthread_mutex_lock(&e.gate)
        e.mean.replace = replace
        store(&e.mean.wanted, e.mean.wanted + 1)
        store(&e.at_rest, 0)
        pthread_cond_signal(&e.wake)
        pthread_mutex_unlock(&e.gate)
        return e.mean.wanted

    def wait_mean(self, int64_t number, double seconds):
        """Wait until that mean is over. Returns False after `seconds`, and after a failure."""
        cdef State* e = &self.state
        cdef double until = now() + seconds
        with nogil:
            while (load(&e.mean.finished) < number and not e.fault and not load(&e.ended)
                   and now() < until):
                rest(50e-6)
        return load(&e.mean.finished) >= number

    def pause(self, bint paused):
        """Begin no exchange and answer NO, until told otherwise."""
        cdef State* e = &self.state
        pthread_mutex_lock(&e.gate)
        e.paused = paused
        store(&e.at_rest, 0)
        pthread_cond_signal(&e.wake)
        pthread_mutex_unlock(&e.gate)

    def wait_quiet(self, double seconds):
        """After pause(True): wait until no exchange is under way. False after `seconds` without a chunk.

        The thread itself says so, at the end of a turn that began after the pause: an exchange that
        it was about to begin when told to pause is waited for. So is one with a silent partner, and
        one with a partner that has left: it had sent all of its chunks by then.
        """
        cdef State* e = &self.state
        cdef double until = now() + seconds
        cdef int64_t chunks = -1
        with nogil:
            while not load(&e.at_rest) and not load(&e.ended) and now() < until:
                if chunks != load(&e.counters.chunks) + load(&e.counters.void_chunks):
                    chunks = load(&e.counters.chunks) + load(&e.counters.void_chunks)
                    until = now() + seconds
                rest(100e-6)
        return load(&e.at_rest) != 0 or load(&e.ended) != 0

    def wait_fresh(self, int64_t step, double seconds):
        """Wait until every snapshot on its way is of `step` or later. False after `seconds`."""
        cdef State* e = &self.state
        cdef double until = now() + seconds
        with nogil:
            while load(&e.in_flight_step) < step and now() < until:
                rest(100e-6)
        return load(&e.in_flight_step) >= step

    def wait_finished(self, int64_t count, double seconds):
        """Wait until `count` exchanges are finished in all. Returns False after `seconds`."""
        cdef State* e = &self.state
        cdef double until = now() + seconds
        with nogil:
            while load(&e.finished) < count and now() < until:
                rest(50e-6)
        return load(&e.finished) >= count

    def stop(self, bint broken=False):
        """Say goodbye (bounded by leave_deadline_s) and end the thread.

        `broken` tells the others that this super learner cannot go on: they count it as lost.
        """
        cdef State* e = &self.state
        if not e.running:
            return
        with nogil:
            pthread_mutex_lock(&e.gate)
            e.broken = broken
            e.leaving = True
            pthread_cond_signal(&e.wake)
            pthread_mutex_unlock(&e.gate)
            pthread_join(e.thread, NULL)
        e.running = False

    def fault(self):
        """(kind, MPI code, partner) of the latched failure; kind 0 is none."""
        return self.state.fault, self.state.fault_code, self.state.fault_partner

    def partner_events(self):
        return load(&self.state.partner_events)

    def partners(self):
        """State of each partner: 0 alive, 1 suspect, 2 left, 3 lost.

        For the thread a broken one has left, and it may be served to the end; for everybody else it is
        lost.
        """
        cdef State* e = &self.state
        return [LOST if e.broken_partners[i] else e.partners[i] for i in range(e.transport.size)]

    def last_words(self, int place):
        """Whom a partner knew to be lost when it said goodbye, by rank; of the own rank: this one.

        Ranks that are equal modulo 64 cannot be told apart.
        """
        cdef State* e = &self.state
        cdef uint64_t known = e.last_words[place]
        return [i for i in range(e.transport.size) if known & bit(i)]

    def under_way(self):
        """Exchanges not finished, as they were at some moment lately; for tests and diagnosis.

        A list of dicts: partner, asked (this side asked), parked, broken (the partner is gone),
        done and chunks (how many are merged here, of how many), since (s, CLOCK_MONOTONIC).
        """
        cdef Exchange* x
        cdef int i
        out = []
        for i in range(self.state.transport.size):
            x = &self.state.exchanges[i]
            if x.phase == RUNNING or x.phase == BROKEN:
                out.append({"partner": i, "asked": bool(x.active), "parked": bool(x.parked),
                            "broken": x.phase == BROKEN, "done": x.done, "chunks": x.nchunks,
                            "since": x.began})
        return out

    def met(self, int partner):
        """Exchanges finished with `partner`."""
        return load(&self.state.met[partner])

    def finished(self):
        return load(&self.state.finished)

    def cpu_s(self):
        """CPU seconds the thread has used."""
        cdef clockid_t clock
        cdef timespec t
        if not self.state.running or pthread_getcpuclockid(self.state.thread, &clock) != 0:
            return 0.0
        clock_gettime(clock, &t)
        return t.tv_sec + 1e-9 * t.tv_nsec

    def void_exchanges(self):
        """Exchanges of which no chunk was merged."""
        cdef Counters* c = &self.state.counters
        return c.exchanges_active + c.exchanges_passive - c.compared

    def counters(self):
        cdef Counters* c = &self.state.counters
        return {
            "exchanges_active": c.exchanges_active, "exchanges_passive": c.exchanges_passive,
            "refused": c.refused, "declined": c.declined, "parked": c.parked, "broken": c.broken,
            "void_chunks": c.void_chunks, "compared": c.compared, "chunks": c.chunks, "bytes_sent": c.bytes_sent,
            "bytes_received": c.bytes_received, "square": c.square, "turns": c.turns,
            "square_elements": c.square_elements, "last_square": c.last_square,
            "exchange_s": c.exchange_s, "means": c.means, "mean_s": c.mean_s,
            "mean_square": c.mean_square,
            "staleness": [c.staleness[i] for i in range(HISTOGRAM)],
            "met": [self.state.met[i] for i in range(self.state.transport.size)],
        }

    def view(self):
        """What the thread is doing, of some moments lately; ages in seconds."""
        cdef State* e = &self.state
        cdef double t = now()
        names = ("idle", "asked", "running", "broken")
        states = ("alive", "suspect", "left", "lost")
        partners = []
        for i in range(e.transport.size):
            x = &e.exchanges[i]
            partners.append({
                "partner": i, "state": states[e.partners[i]], "exchanges": load(&e.met[i]),
                "exchange": names[x.phase], "we_asked": bool(x.active), "parked": bool(x.parked),
                "number": x.number, "chunks": x.nchunks, "begun": x.next, "merged": x.done,
                "age_s": t - x.began if x.phase else None,
                "silent_s": t - x.moved if x.phase else None,
            })
        m = &e.mean
        return {
            "ended": bool(load(&e.ended)), "step": e.step, "fit": bool(e.fit),
            "paused": bool(e.paused), "leaving": bool(e.leaving), "asking": e.asking,
            "serving": e.serving, "wanted": e.wanted, "round": e.round, "credit": e.credit,
            "sending": e.outgoing != NULL, "fault": e.fault, "cpu_s": self.cpu_s(),
            "mean": {"wanted": load(&m.wanted), "finished": load(&m.finished),
                     "running": bool(m.running), "super_learners": m.network.size,
                     "stage": ("summing", "draining", "agreeing")[m.stage],
                     "chunks": m.nchunks, "begun": m.next, "merged": m.done,
                     "age_s": t - m.began if m.running else None,
                     "silent_s": t - m.moved if m.running else None},
            "partners": partners, "counters": self.counters(),
        }

    def take_events(self):
        """Timeline records since the last call: (kind, partner, began, ended, nbytes, step)."""
        cdef State* e = &self.state
        cdef int64_t i, last = load(&e.events_written)
        cdef Event* v
        out = []
        if e.events != NULL:
            for i in range(e.events_read, last):
                v = &e.events[i % EVENTS]
                out.append((v.kind, v.partner, v.began, v.ended, v.nbytes, v.step))
            store(&e.events_read, last)
        return out
