# cython: language_level=3
# Why compiled: the engine's thread runs without the GIL, beside the trainer's computation.
"""The averaging engine of one super learner: one thread, one communicator.

The thread polls pairwise exchanges (exchange.pyx) and the mean of all (mean.pyx), acts, and sleeps longer each
time that nothing moved. Its state is in state.pxd.
"""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from mpi4py cimport libmpi as mpi

from hvd_adpsgd.engine.store cimport Store
from hvd_adpsgd.engine.exchange cimport (RETRY_FIRST_S, advance, ask_if_due, cut, due, listen, read_inbox, reap_outgoing,
                                   retire, send_control, check_failures, under_way)
from hvd_adpsgd.engine.mean cimport advance_mean
from hvd_adpsgd.engine.state cimport *
from hvd_adpsgd.engine.butterfly cimport network_open
from hvd_adpsgd.engine.transport cimport give_up, transport_open

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int option, unsigned long value)
    int PR_SET_TIMERSLACK
    int PR_SET_NAME
    int prctl_name "prctl"(int option, const char* name)

cdef double IDLE_S = 0.9e-3         # shortest and longest sleep when nothing is on its way
cdef double LONG_IDLE_S = 10e-3
cdef double IDLE_SHARE = 0.02       # of the time since something moved, in between
cdef double LULL_S = 0.2
cdef double POLL_FIRST_S = 5e-6     # first and longest sleep while an exchange runs
cdef double POLL_LAST_S = 50e-6     # or half of the time of a chunk, on a slow network
cdef double SLOW_POLL_S = 1e-3      # at most, and when nothing moved for LULL_S
cdef int64_t NO_STEP = 0x7FFFFFFFFFFFFFFF


# ---- the loop ------------------------------------------------------------------------------

cdef bint poll_once(State* e) noexcept nogil:
    """Poll every exchange and the mean once. True if anything moved."""
    cdef bint paused = e.paused, busy = False
    cdef bint moved = read_inbox(e)
    cdef int64_t oldest = NO_STEP
    cdef Exchange* x
    cdef int peer, i
    if e.outgoing != NULL:
        moved |= reap_outgoing(e)
    check_failures(e)
    for peer in range(e.transport.size):
        x = &e.exchanges[peer]
        if x.phase == ASKED or x.phase == RUNNING:
            moved |= advance(e, peer)
            if x.phase == RUNNING and not x.parked:
                for i in range(LANES):
                    if x.lanes[i].busy and not x.lanes[i].received:
                        oldest = min(oldest, x.lanes[i].step)
        elif x.phase == BROKEN:
            moved |= retire(e, peer)
    moved |= ask_if_due(e)
    moved |= advance_mean(e)
    busy = e.mean.running and e.fault == FAULT_NONE
    for peer in range(e.transport.size):
        busy |= under_way(e, peer)
    store(&e.in_flight_step, oldest)
    store(&e.at_rest, paused and not busy)
    e.counters.turns += 1
    return moved


cdef bint say_goodbye(State* e) noexcept nogil:
    """Leave: finish what runs, send BYE to all peers, wait for their answers. True when done."""
    cdef int peer
    cdef bint waiting = False
    cdef double t = now()
    if e.leave_by == 0:
        e.leave_by = t + e.leave_deadline_s
    if t > e.leave_by:
        return True
    waiting = e.mean.running and e.fault == FAULT_NONE
    for peer in range(e.transport.size):     # also parked exchanges whose peer has answered
        if e.peers[peer] != SUSPECT and under_way(e, peer):
            waiting = True
            if e.peers[peer] == ALIVE and t > e.leave_by - e.leave_deadline_s / 2:
                cut(e, peer)
    if waiting or e.asking != NOBODY or e.serving != NOBODY:
        return False
    if not e.said_goodbye:
        e.said_goodbye = True
        for peer in range(e.transport.size):
            if peer != e.transport.rank and e.peers[peer] in (ALIVE, SUSPECT):
                e.farewells[peer] = 1
                send_control(e, peer, BYE, 0, e.broken)
    for peer in range(e.transport.size):
        waiting |= e.farewells[peer] != 0 and e.peers[peer] == ALIVE
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
    """Update the mean time between chunks, smoothed over LANES, which may all arrive at once."""
    cdef int64_t chunks = e.counters.chunks + e.counters.void_chunks
    if chunks > e.paced:
        e.pace += ((t - e.paced_at) / (chunks - e.paced) - e.pace) / LANES
        e.paced = chunks
        e.paced_at = t


cdef double longest_poll(State* e, double lull) noexcept nogil:
    """The longest pause between polls: with LANES chunks in flight, two polls per chunk saturate a slow link."""
    if lull > LULL_S:
        return SLOW_POLL_S
    return min(max(POLL_LAST_S, e.pace / 2), SLOW_POLL_S)


cdef void* engine_main(void* argument) noexcept nogil:
    """The thread's loop: poll, and sleep longer each time that nothing moved."""
    cdef State* e = <State*>argument
    cdef double poll_s = 0, idle_s, moved = now()
    cdef bint busy
    prctl(PR_SET_TIMERSLACK, 1000)
    prctl_name(PR_SET_NAME, b"adpsgd-engine")
    listen(e)
    while e.fault != FAULT_MPI and not e.halted:
        busy = poll_once(e)
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
            sleep_s(poll_s)
            poll_s = min(2 * poll_s, longest_poll(e, now() - moved))
    if e.inbox_request != mpi.MPI_REQUEST_NULL:
        give_up(&e.inbox_request)
    store(&e.in_flight_step, NO_STEP)
    store(&e.ended, 1)
    return NULL


# ---- the Python face ------------------------------------------------------------------------

cdef bint wait_for(State* e, int64_t* counter, int64_t least, double seconds) noexcept:
    """Wait until the engine has counted so far. False after `seconds`, and after a fault or the end."""
    cdef double until = now() + seconds
    with nogil:
        while load(counter) < least and not e.fault and not load(&e.ended) and now() < until:
            sleep_s(50e-6)
    return load(counter) >= least


cdef class Loop:
    """The engine's thread, and the trainer's commands to it. See hvd_adpsgd.engine.engine.Engine."""

    cdef State state
    cdef object keep            # store and communicator stay alive as long as the thread may

    def __cinit__(self, *args, **kwargs):
        memset(&self.state, 0, sizeof(State))

    def __init__(self, comm, uintptr_t comm_address, Store chunks, const int[::1] schedule,
                 double weight, double rate, int wire, bint offered_only, double deadline_s,
                 double leave_deadline_s, int64_t lane_nbytes, bint timeline):
        cdef State* e = &self.state
        cdef pthread_condattr_t attributes
        cdef int code = transport_open(&e.transport, (<mpi.MPI_Comm*>comm_address)[0])
        if code != mpi.MPI_SUCCESS:
            raise RuntimeError(f"MPI code {code} on opening the engine's communicator")
        self.keep = (comm, chunks)
        e.memory = &chunks.memory
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
        e.peers = <char*>calloc(e.transport.size, 1)
        e.left_broken = <char*>calloc(e.transport.size, 1)
        e.farewells = <char*>calloc(e.transport.size, 1)
        e.met = <int64_t*>calloc(e.transport.size, sizeof(int64_t))
        e.generations = <Generation*>calloc(1024, sizeof(Generation))
        if timeline:
            e.events = <Event*>calloc(EVENTS, sizeof(Event))
        if not (e.schedule and e.exchanges and e.mapped and e.peers and e.left_broken
                and e.farewells and e.met and e.generations):
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
        free(e.peers)
        free(e.left_broken)
        free(e.farewells)
        free(e.met)
        free(e.generations)
        free(e.events)
        self.free_exchanges()

    cdef void free_exchanges(self) noexcept:
        """Free the buffers that MPI no longer uses: those of exchanges that are not running."""
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
        """Use memory shared on this host: `own` of shared_nbytes, and each peer's (0: none)."""
        cdef int i
        self.state.shared = <char*>own
        self.state.shared_nbytes = 2 * SETS * LANES * self.state.lane_nbytes
        for i in range(self.state.transport.size):
            self.state.mapped[i] = <char*><uintptr_t>addresses[i]

    @staticmethod
    def shared_nbytes(int64_t lane_nbytes):
        """Size of the memory that an engine shares with its peers on the host."""
        return 2 * SETS * LANES * lane_nbytes

    def start(self):
        cdef State* e = &self.state
        if pthread_create(&e.thread, NULL, engine_main, e) != 0:
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

    def ask(self, int peer):
        """Ask `peer` whatever the credit says; NOBODY (-1) withdraws the spec."""
        cdef State* e = &self.state
        pthread_mutex_lock(&e.gate)
        e.wanted = peer
        pthread_cond_signal(&e.wake)
        pthread_mutex_unlock(&e.gate)

    def begin_round(self, int64_t round, int peer):
        """From now on exchange with peers in the same round; ask `peer` (-1: none)."""
        cdef State* e = &self.state
        pthread_mutex_lock(&e.gate)
        e.round = round
        e.wanted = peer
        pthread_cond_signal(&e.wake)
        pthread_mutex_unlock(&e.gate)

    def average_all(self, uintptr_t comm_address, bint survives, bint butterfly):
        """Means of all go over this communicator, errors returned; `survives`: ULFM is on.

        Sums are MPI's own, or those of a butterfly (see _sums).

        The handle at the address becomes that of the living when somebody has failed, so it must stay.
        """
        cdef Mean* m = &self.state.mean
        m.comm = <mpi.MPI_Comm*>comm_address
        m.survives = survives
        m.agreement = mpi.MPI_REQUEST_NULL
        if network_open(&m.network, m.comm[0], butterfly) != mpi.MPI_SUCCESS:
            raise RuntimeError("MPI refused the communicator for means of all")

    def begin_mean(self, bint replace):
        """Join the next mean of all, as every other engine must. Returns its number."""
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
        return wait_for(&self.state, &self.state.mean.finished, number, seconds)

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
        it was about to begin when told to pause is waited for. So is one with a silent peer, and
        one with a peer that has left, as long as its chunks come in.
        """
        cdef State* e = &self.state
        cdef double until = now() + seconds
        cdef int64_t chunks, before = -1
        with nogil:
            while not load(&e.at_rest) and not load(&e.ended) and now() < until:
                chunks = load(&e.counters.chunks) + load(&e.counters.void_chunks)
                if chunks != before:
                    before = chunks
                    until = now() + seconds
                sleep_s(100e-6)
        return load(&e.at_rest) != 0 or load(&e.ended) != 0

    def wait_fresh(self, int64_t step, double seconds):
        """Wait until every snapshot in flight is of `step` or later. False after `seconds`."""
        return wait_for(&self.state, &self.state.in_flight_step, step, seconds)

    def wait_finished(self, int64_t count, double seconds):
        """Wait until `count` exchanges are finished in all. Returns False after `seconds`."""
        return wait_for(&self.state, &self.state.finished, count, seconds)

    def stop(self, bint broken=False):
        """Send BYE to all peers (bounded by leave_deadline_s) and end the thread.

        With `broken`, peers count this super learner as failed.
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

    def released(self):
        """Whether the thread has ended and MPI holds none of its buffers, so that this may be freed."""
        cdef State* e = &self.state
        cdef int i
        cdef bint idle = not e.running and not e.mean.running and e.outgoing == NULL
        for i in range(e.transport.size):
            idle = idle and e.exchanges[i].phase == IDLE
        return idle and e.inbox_request == mpi.MPI_REQUEST_NULL

    def fault(self):
        """(kind, MPI code, peer) of the latched failure; kind 0 is none."""
        return self.state.fault, self.state.fault_code, self.state.fault_peer

    def peer_events(self):
        return load(&self.state.peer_events)

    def peers(self):
        """State of each peer: 0 alive, 1 suspect, 2 left, 3 failed.

        For the thread a broken one has left, and it may be served to the end; for everybody else it has
        failed.
        """
        cdef State* e = &self.state
        return [FAILED if e.left_broken[i] else e.peers[i] for i in range(e.transport.size)]

    def under_way(self):
        """Unfinished exchanges, read without a lock; for tests and diagnosis.

        A list of dicts: peer, asked (this side asked), parked, broken (the peer is gone),
        done and chunks (how many are merged here, of how many), since (s, CLOCK_MONOTONIC).
        """
        cdef Exchange* x
        cdef int i
        out = []
        for i in range(self.state.transport.size):
            x = &self.state.exchanges[i]
            if x.phase == RUNNING or x.phase == BROKEN:
                out.append({"peer": i, "asked": bool(x.active), "parked": bool(x.parked),
                            "broken": x.phase == BROKEN, "done": x.done, "chunks": x.nchunks,
                            "since": x.began})
        return out

    def met(self, int peer):
        """Exchanges finished with `peer`."""
        return load(&self.state.met[peer])

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
        """The thread's state, read without a lock; ages in seconds."""
        cdef State* e = &self.state
        cdef double t = now()
        names = ("idle", "asked", "running", "broken")
        states = ("alive", "suspect", "left", "failed")
        peers = []
        for i in range(e.transport.size):
            x = &e.exchanges[i]
            peers.append({
                "peer": i, "state": states[e.peers[i]], "exchanges": load(&e.met[i]),
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
            "peers": peers, "counters": self.counters(),
        }

    def take_events(self):
        """Timeline records since the last call: (kind, peer, began, ended, nbytes, step)."""
        cdef State* e = &self.state
        cdef int64_t i, last = load(&e.events_written)
        cdef Event* v
        out = []
        if e.events != NULL:
            for i in range(e.events_read, last):
                v = &e.events[i % EVENTS]
                out.append((v.kind, v.peer, v.began, v.ended, v.nbytes, v.step))
            store(&e.events_read, last)
        return out
