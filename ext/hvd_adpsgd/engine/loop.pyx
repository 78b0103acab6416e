# cython: language_level=3
# Why compiled: the engine's thread runs without the GIL, beside the trainer's computation.
"""The averaging engine of one super learner: its thread, and the functions through which the trainer uses it.

In each turn the thread polls the pairwise exchanges (exchange.pxi) and the mean of all models (mean.pxi), and
advances them; then it sleeps until something wakes it, or for a time that grows. The engine's state is in
core.pxd. A simulator takes the same turns (`turn`) with a wire and a clock of its own.
"""

from libc.math cimport INFINITY, NAN, ceil
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from hvd_adpsgd.engine.agreement cimport (agreement_failed, agreement_free, agreement_message_size, agreement_new,
                                          agreement_receive, agreement_take, agreement_vote)
from hvd_adpsgd.engine.codes cimport adpsgd_codes_bits, adpsgd_codes_nbytes
from hvd_adpsgd.engine.core cimport *
from hvd_adpsgd.engine.doorbell cimport DOORBELL_NBYTES, Doorbell, await_ring, times_rung
from hvd_adpsgd.engine.kernels cimport ADPSGD_DTYPES, ADPSGD_INT16, ADPSGD_OWN
from hvd_adpsgd.engine.mailbox cimport *
from hvd_adpsgd.engine.store cimport *
from hvd_adpsgd.engine.wire cimport *

from hvd_adpsgd.engine.metrics import PEER_TABLES

cdef extern from "<time.h>" nogil:
    ctypedef int clockid_t
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(clockid_t, timespec*)

cdef extern from "<pthread.h>" nogil:
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    int pthread_getcpuclockid(pthread_t, clockid_t*)
    int pthread_mutex_init(pthread_mutex_t*, void*)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int option, unsigned long value)
    int PR_SET_TIMERSLACK
    int PR_SET_NAME
    int prctl_name "prctl"(int option, const char* name)

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t, size_t)

# The engine's parts, in one module: each calls those above it only.
include "membership.pxi"
include "reports.pxi"
include "windows.pxi"
include "control.pxi"
include "departures.pxi"
include "pairs.pxi"
include "partners.pxi"
include "lanes.pxi"
include "exchange.pxi"
include "butterfly.pxi"
include "mean.pxi"
include "inspect.pxi"

cdef enum:
    PARTS = 1024            # versions of the layout, one per added parameter group; at most
    LARGEST_PAGE = 65536    # largest page size of the operating system, bytes

cdef double CHECK_S = 1.0           # period of searches for failed peers that no transfer has reported
cdef double IDLE_S = 0.9e-3         # shortest sleep when no exchange or mean runs, and nothing wakes the thread
cdef double LONG_IDLE_S = 10e-3     # longest sleep when no exchange or mean runs
cdef double IDLE_SHARE = 0.02       # sleep between the two bounds, as a fraction of the time without an event
cdef double RUNG_IDLE_SHARE = 0.5   # ... where all peers ring: only what the wire's library delivers late is looked for
cdef double LULL_S = 0.2            # after so long without an event polls of exchanges are SLOW_POLL_S apart
cdef double POLL_FIRST_S = 5e-6     # shortest sleep while an exchange runs
cdef double POLL_LAST_S = 50e-6     # longest sleep while an exchange runs; half of a chunk's time if longer
cdef double SLOW_POLL_S = 1e-3      # bound of half a chunk's time; also the sleep of an exchange that is woken
cdef double RING_FROM_S = 30e-6     # no ring ends a shorter sleep: waking the thread costs about as much


# ---- a turn --------------------------------------------------------------------------------

cdef bint poll_once(Core* e) noexcept nogil:
    """Poll every exchange and the mean once, and advance them. Return whether anything was done."""
    cdef bint moved, at_rest
    cdef int peer
    cdef Message* message
    progress(e.wire)
    read_orders(&e.mailbox)
    message = take_message(e, &peer)
    moved = message != NULL
    if moved:
        handle_control(e, peer, message)
    if e.control.outgoing != NULL:
        moved |= reap(e, &e.control.outgoing)
    tell_reports(e)
    search_failures(e)
    moved |= advance_pairs(e)
    moved |= ask_if_due(e)
    moved |= advance_mean(e)
    at_rest = e.mailbox.orders.paused and not any_under_way(e) and not mean_due(e)
    store(&e.mailbox.at_rest, at_rest)
    add(&e.mailbox.counters.turns, 1)
    return moved


cdef bint mean_due(Core* e) noexcept nogil:
    """Whether a mean of all models runs, or the trainer has asked for one."""
    return e.mailbox.fault == FAULT_NONE and (e.mean.running or e.mean.finished < load(&e.mean.wanted))


cdef void search_failures(Core* e) noexcept nogil:
    """Process failures that the wire has found in transfers; every CHECK_S let it search for others."""
    cdef double t = now(e)
    cdef bint look = t > e.membership.checked_at + CHECK_S
    if look:
        e.membership.checked_at = t
    take_failures(e, look)
    if e.wire.fenced:
        latch(&e.mailbox, FAULT_FENCED, 0, e.wire.fenced_by)


cdef bint leave(Core* e) noexcept nogil:
    """Finish exchanges, announce this engine's departure, and wait until its peers have answered.

    True when done."""
    cdef Membership* m = &e.membership
    cdef double t = now(e)
    if m.leave_by == 0:
        if e.mailbox.orders.leave_within > 0:
            e.leave_deadline_s = min(e.leave_deadline_s, e.mailbox.orders.leave_within)
        m.leave_by = t + e.leave_deadline_s
    if t > m.leave_by:
        if not m.departing:              # else its peers would wait for exchanges with it
            announce_departure(e)
        return True
    if finishes(e, t) or (e.mean.running and e.mailbox.fault == FAULT_NONE):
        return False
    if e.pairs.asking != NOBODY or e.pairs.serving != NOBODY:
        return False
    if not m.departing:
        announce_departure(e)
    return departure_is_known(e) and not owes_answers(e)


cdef bint finishes(Core* e, double t) noexcept nogil:
    """Whether to wait for exchanges before leaving.

    In the first half of leave_deadline_s also for those with silent peers: a chunk that only the peer merges,
    once that peer continues, changes the mean of all models. In the second half the other exchanges are cut
    short."""
    cdef Exchange* x = e.pairs.running
    cdef bint waiting = False, late = t > e.membership.leave_by - e.leave_deadline_s / 2
    while x != NULL:
        if under_way(e, x) and not (late and e.membership.states[x.peer] == SUSPECT):
            waiting = True
            if late and e.membership.states[x.peer] == ALIVE:
                cut(e, x)
        x = x.next_one
    return waiting


cdef void keep_pace(Rhythm* r, int64_t chunks) noexcept nogil:
    """Update the mean time between chunks, smoothed over LANES chunks because these may arrive together."""
    if chunks > r.paced:
        r.pace += ((r.moved - r.paced_at) / (chunks - r.paced) - r.pace) / LANES
        r.paced = chunks
        r.paced_at = r.moved


cdef bint is_woken(Core* e) noexcept nogil:
    """Whether each event that the engine waits for wakes it, and brings few bytes: no chunk, but its place in memory.

    Chunks that come over the network are looked for at their pace instead: each packet would wake the thread."""
    cdef Exchange* x = e.pairs.running
    cdef bint by_wire = e.wire.wait != NULL
    if not by_wire and e.wire.doorbells == NULL or e.pairs.changing or e.mean.running or e.mailbox.orders.leaving:
        return False
    while x != NULL and (x.phase == IDLE or x.phase == BROKEN or x.phase == ASKED and by_wire or shares(e, x.peer)):
        x = x.next_one
    return x == NULL


cdef inline bint shares(Core* e, int peer) noexcept nogil:
    """Whether all chunks of an exchange with a peer go through shared memory."""
    return mapped(e, peer) != NULL and generation(e).nchunks <= e.memory.shown


cdef double longest_poll(Core* e, Rhythm* r, double lull) noexcept nogil:
    """Return the longest pause between polls, in seconds.

    With LANES chunks in flight, two polls per chunk saturate a slow link. `lull`: seconds since something
    happened."""
    if lull > LULL_S or r.woken:
        return SLOW_POLL_S
    return min(max(POLL_LAST_S, r.pace / 2), SLOW_POLL_S)


cdef double idle_pause(Core* e, Rhythm* r, double t) noexcept nogil:
    """Return the pause of an idle engine, in seconds.

    Where the wire wakes it, only time ends the pause after a NO; if no peer could be asked, an event has to come."""
    cdef double grows = RUNG_IDLE_SHARE if e.pairs.all_ring else IDLE_SHARE
    if e.wire.wait == NULL:
        return min(max(grows * (t - r.moved), IDLE_S), LONG_IDLE_S)
    if e.pairs.nobody or not wants_to_ask(e, &e.mailbox.orders):
        return LONG_IDLE_S
    return min(max(e.pairs.ask_after - t, IDLE_S), LONG_IDLE_S)


cdef Rest turn(Core* e, Rhythm* r) noexcept nogil:
    """Take one turn: poll once. Return what to do for `r.pause_s` seconds until the next turn.

    Each turn in which nothing happens makes the next sleep longer."""
    cdef bint moved = poll_once(e)
    cdef double t = now(e)
    r.pause_s = 0
    if e.mailbox.orders.leaving and leave(e):
        return OVER
    if moved:
        r.polls_s = 0
        r.moved = t
        keep_pace(r, e.mailbox.counters.chunks + e.mailbox.counters.void_chunks)
        return AGAIN
    if e.pairs.asking == NOBODY and e.pairs.serving == NOBODY and not e.mean.running and not e.mailbox.orders.leaving:
        r.pause_s = idle_pause(e, r, t)
        r.paced_at = t + r.pause_s
        return SLEEP
    r.woken = is_woken(e)
    if r.polls_s == 0:
        r.polls_s = max(POLL_FIRST_S, longest_poll(e, r, 0) / LANES)
        return AGAIN
    r.pause_s = r.polls_s
    r.polls_s = min(2 * r.polls_s, longest_poll(e, r, t - r.moved))
    return POLL


cdef void begin_turns(Core* e, Rhythm* r) noexcept nogil:
    memset(r, 0, sizeof(Rhythm))
    r.moved = now(e)
    listen(e)
    listen_mean(e)


cdef void end_turns(Core* e) noexcept nogil:
    e.wire.release(e.wire, &e.control.listening)
    e.wire.release(e.wire, &e.mean.listening)
    store(&e.mailbox.in_flight_step, NO_STEP)
    store(&e.mailbox.ended, 1)


# ---- the thread ----------------------------------------------------------------------------

cdef void* engine_main(void* argument) noexcept nogil:
    """Run the thread: take turns until the engine has left, the wire is down, or `halted` is set."""
    cdef Core* e = <Core*>argument
    cdef Rhythm rhythm
    cdef Rest rest = AGAIN
    cdef uint32_t heard
    prctl(PR_SET_TIMERSLACK, 1000)
    prctl_name(PR_SET_NAME, b"adpsgd-engine")
    begin_turns(e, &rhythm)
    while rest != OVER and e.mailbox.fault != FAULT_MPI and not load(&e.mailbox.halted):
        heard = times_rung(e.mailbox.doorbell)
        make_inspection(e)
        rest = turn(e, &rhythm)
        if e.wire.wait != NULL and (rest == SLEEP or rest == POLL and rhythm.woken):
            e.wire.wait(e.wire, e.mailbox.doorbell, heard, rhythm.pause_s)
        elif rest == POLL and rhythm.pause_s < RING_FROM_S:
            e.clock.sleep(e.clock, rhythm.pause_s)
        elif rest == POLL or rest == SLEEP:
            await_ring(e.mailbox.doorbell, heard, rhythm.pause_s)
        elif rhythm.polls_s > 0:
            sched_yield()
    end_turns(e)
    return NULL


# ---- the trainer's side --------------------------------------------------------------------

cdef inline int64_t buffers_nbytes(int64_t lane_nbytes) noexcept nogil:
    return SETS * LANES // 2 * (lane_nbytes + STAMP)


cdef bint wait_for(Core* e, int64_t* counter, int64_t least, double seconds) noexcept:
    """Wait until a counter of the engine is at least `least`.

    Return False if it is not after `seconds`, or after a fault or the end of the thread."""
    cdef double until = now(e) + seconds
    with nogil:
        while load(counter) < least and not load(&e.mailbox.fault) and not load(&e.mailbox.ended) and now(e) < until:
            e.clock.sleep(e.clock, 50e-6)
    return load(counter) >= least


cdef class Loop:
    """The engine's thread, and the trainer's commands to the thread. See hvd_adpsgd.engine.engine.Engine.

    Args:
        schedule: ranks of the peers to ask, in this order.
        options: an EngineOptions.
    """

    def __cinit__(self, *args, **kwargs):
        memset(&self.core, 0, sizeof(Core))

    def __init__(self, AnyWire wire, AnyClock clock, Store chunks, const int[::1] schedule, options):
        cdef Core* e = &self.core
        cdef Mailbox* p = &e.mailbox
        cdef int n = wire.calls.size
        cdef double prefer = options.prefer_fast, report_s = options.report_s
        self.keep = (wire, clock, chunks)
        e.wire = &wire.calls
        e.clock = &clock.calls
        e.memory = &chunks.memory
        e.leave_deadline_s = options.leave_deadline_s
        e.pairs.weight = options.weight
        e.pairs.wire_format, e.pairs.chooses_format = options.wire_format, options.chooses_format
        e.pairs.offered_only = options.offered_only
        e.pairs.deadline_s = options.deadline_s
        e.pairs.lane_nbytes = e.pairs.room = options.chunk_nbytes
        if e.pairs.chooses_format or adpsgd_codes_bits(e.pairs.wire_format):
            e.pairs.room = max(e.pairs.room, (adpsgd_codes_nbytes(ADPSGD_INT16, e.pairs.room // 2) + 63) // 64 * 64)
        if options.aims:        # see windows.pxi
            e.pairs.coin = 2 * <uint64_t>wire.calls.rank + 1
        e.generations = <Generation*>calloc(PARTS, sizeof(Generation))
        p.rate = options.rate
        p.given.step = -1
        p.given.fit = True
        p.given.wanted = NOBODY
        p.given.share = options.share
        p.given.wire_format = e.pairs.wire_format
        p.orders = p.given
        p.in_flight_step = NO_STEP
        p.by_peer = <int64_t*>calloc(n * PEER_COUNTS, sizeof(int64_t))
        if options.timeline:
            p.events = <Event*>calloc(EVENTS, sizeof(Event))
        if not (e.generations and p.by_peer and open_membership(&e.membership, wire.calls.rank, n, &p.peer_events)
                and open_control(&e.control)
                and open_pairs(&e.pairs, &schedule[0] if schedule.shape[0] else NULL, schedule.shape[0])
                and (prefer <= 0 or open_speeds(&e.pairs, wire.calls.rank, n, prefer))
                and (report_s <= 0 or open_reports(&e.reports, wire.calls.rank, n, report_s))):
            raise MemoryError("no memory for the averaging engine")
        pthread_mutex_init(&p.gate, NULL)
        pthread_mutex_init(&p.inspections, NULL)
        p.doorbell = &p.own_doorbell
        self.open = True

    def __dealloc__(self):
        cdef Core* e = &self.core
        cdef int i
        if not self.open:
            return
        if self.running:                # stop() was not called: the thread must not outlive its memory
            with nogil:
                store(&e.mailbox.halted, 1)
                pthread_join(self.thread, NULL)
        close_membership(&e.membership)
        close_control(&e.control)
        close_reports(&e.reports)
        free(e.mailbox.by_peer)
        free(e.mailbox.events)
        free(e.mailbox.inspection)
        for i in range(e.ngenerations):
            free(e.generations[i].order)
        free(e.generations)
        close_pairs(&e.pairs)
        close_mean(e)

    def extend(self, int nchunks, uint64_t fingerprint, rare=(), int period=1):
        """Add a version of the layout: the model now has `nchunks` chunks.

        Args:
            nchunks: their number.
            fingerprint: hash of all that peers must have in common.
            rare: numbers of chunks that move in every `period`th exchange only.
            period: of these.
        """
        cdef Core* e = &self.core
        if e.ngenerations == PARTS:
            raise RuntimeError("more than 1023 add_param_group calls on one averaged optimizer")
        set_layout(&e.generations[e.ngenerations], nchunks, rare, period)
        e.generations[e.ngenerations].fingerprint = fingerprint
        store(&e.ngenerations, e.ngenerations + 1)

    def share(self, uintptr_t own, outboxes, lives, areas):
        """Exchange chunks with peers on this host through shared memory; before start.

        Args:
            own: address of this engine's shared memory, of shared_nbytes.
            outboxes: of each peer's shared memory as mapped here, by rank; 0: none.
            lives, areas: what each peer has passed to its Store.show, as mapped here; 0: none.
        """
        cdef Pairs* p = &self.core.pairs
        cdef int i
        p.neighbours = <Neighbour*>calloc(self.core.wire.size, sizeof(Neighbour))
        if p.neighbours == NULL:
            raise MemoryError("no memory for the averaging engine")
        p.shared = <char*>own
        p.shared_nbytes = buffers_nbytes(p.lane_nbytes)
        for i in range(self.core.wire.size):
            p.neighbours[i].outbox = <char*><uintptr_t>outboxes[i]
            p.neighbours[i].lives = <char*><uintptr_t>lives[i]
            p.neighbours[i].area = <char*><uintptr_t>areas[i]

    def hear(self, uintptr_t own, addresses):
        """Let engines that share memory wake each other when they send something; before start, after `share`.

        For a wire that cannot wait for what peers send.

        Args:
            own: address of this engine's doorbell in its shared memory; 0: a private one.
            addresses: of each peer's doorbell as mapped here, by rank; 0: none.
        """
        cdef Core* e = &self.core
        cdef int i
        e.wire.doorbells = <Doorbell**>calloc(e.wire.size, sizeof(Doorbell*))
        if e.wire.doorbells == NULL:
            raise MemoryError("no memory for the averaging engine")
        if own:
            e.mailbox.doorbell = <Doorbell*>own
        for i in range(e.wire.size):
            e.wire.doorbells[i] = <Doorbell*><uintptr_t>addresses[i] if i != e.wire.rank else NULL
        e.pairs.all_ring = all(addresses[i] for i in range(e.wire.size) if i != e.wire.rank)

    @staticmethod
    def shared_nbytes(int64_t lane_nbytes):
        """Return the bytes of the memory that an engine shares with its peers on the host."""
        return Loop.doorbell_at(lane_nbytes) + DOORBELL_NBYTES

    @staticmethod
    def doorbell_at(int64_t lane_nbytes):
        """Return the offset of the doorbell in an engine's shared memory.

        The doorbell has pages of its own, because peers write to nothing else."""
        return (buffers_nbytes(lane_nbytes) + LARGEST_PAGE - 1) // LARGEST_PAGE * LARGEST_PAGE

    def start(self):
        cdef Core* e = &self.core
        if pthread_create(&self.thread, NULL, engine_main, e) != 0:
            raise RuntimeError("the operating system refused a thread for the averaging engine")
        self.running = True

    def offer(self, int64_t step, bint fit):
        """Offer the model: the mirror holds that of `step`; `fit`: all of it is finite."""
        cdef Core* e = &self.core
        with nogil:
            pthread_mutex_lock(&e.mailbox.gate)
            e.mailbox.given.step = step
            e.mailbox.given.fit = fit
            e.mailbox.given.credit = min(e.mailbox.given.credit + e.mailbox.rate, max(e.mailbox.rate, 1.0))
            pthread_mutex_unlock(&e.mailbox.gate)
            wake(e)

    def due(self):
        """Whether the credit suffices to ask a peer after the next offer."""
        cdef Mailbox* p = &self.core.mailbox
        pthread_mutex_lock(&p.gate)
        cdef double credit = p.given.credit + p.rate
        pthread_mutex_unlock(&p.gate)
        return credit >= 1.0 - 1e-9

    def ask(self, int peer):
        """Ask `peer` for an exchange next, whatever the credit is; NOBODY (-1) withdraws that order."""
        cdef Core* e = &self.core
        pthread_mutex_lock(&e.mailbox.gate)
        e.mailbox.given.wanted = peer
        pthread_mutex_unlock(&e.mailbox.gate)
        wake(e)

    def begin_round(self, int64_t round, int peer):
        """From now on exchange only with peers in the same round, and ask `peer` (-1: none)."""
        cdef Core* e = &self.core
        pthread_mutex_lock(&e.mailbox.gate)
        e.mailbox.given.round = round
        e.mailbox.given.wanted = peer
        pthread_mutex_unlock(&e.mailbox.gate)
        wake(e)

    def average_all(self):
        """Take part in exact means of all models; before start."""
        if not open_mean(&self.core):
            raise MemoryError("no memory for the averaging engine")

    def move_share(self, double share):
        """Set the fraction of the model's chunks that the next exchanges move, in (0, 1].

        Where the two sides of an exchange have different fractions, it moves the smaller one."""
        cdef Core* e = &self.core
        pthread_mutex_lock(&e.mailbox.gate)
        e.mailbox.given.share = share
        pthread_mutex_unlock(&e.mailbox.gate)

    def use_format(self, int wire_format):
        """Set the format of the next exchanges between hosts; if the peer wants fewer bits, it has those."""
        cdef Core* e = &self.core
        if not may_have(&e.pairs, wire_format):
            raise ValueError(f"exchanges of this engine cannot have the format {wire_format}")
        pthread_mutex_lock(&e.mailbox.gate)
        e.mailbox.given.wire_format = wire_format
        pthread_mutex_unlock(&e.mailbox.gate)

    def mark_next(self, unsigned char[::1] marks):
        """Set to 1 the marks of the chunks of the next exchange for which the engine asks, as far as it is known.

        Args:
            marks: one for each chunk."""
        cdef Core* e = &self.core
        cdef double share
        pthread_mutex_lock(&e.mailbox.gate)
        share = e.mailbox.given.share
        pthread_mutex_unlock(&e.mailbox.gate)
        mark_next(e, <int>marks.shape[0], share, &marks[0])

    def report(self, bytes text):
        """Set the text that this super learner reports from now on: at most REPORT_NBYTES bytes."""
        cdef Core* e = &self.core
        cdef Report* own
        cdef const char* source = text
        if len(text) > REPORT_NBYTES:
            raise ValueError(f"a report of {len(text)} bytes; at most {REPORT_NBYTES} are sent")
        if e.reports.known == NULL:
            return
        own = &e.reports.known[e.wire.rank].report
        pthread_mutex_lock(&e.mailbox.gate)
        memcpy(own.text, source, len(text))
        own.nbytes = <int>len(text)
        own.version += 1
        e.reports.known[e.wire.rank].heard = now(e)
        pthread_mutex_unlock(&e.mailbox.gate)

    def reports(self):
        """Return the newest known report of each super learner: {rank: (version, text, age in seconds)}."""
        cdef Core* e = &self.core
        cdef Report report
        cdef double heard, t = now(e)
        cdef int i
        found = {}
        for i in range(e.wire.size if e.reports.known != NULL else 0):
            pthread_mutex_lock(&e.mailbox.gate)
            report = e.reports.known[i].report
            heard = e.reports.known[i].heard
            pthread_mutex_unlock(&e.mailbox.gate)
            if report.version:
                found[i] = report.version, report.text[:report.nbytes], t - heard
        return found

    def begin_mean(self, bint replace):
        """Begin the next mean of all models, as every other engine must. Return the number of the mean."""
        cdef Core* e = &self.core
        pthread_mutex_lock(&e.mailbox.gate)
        store(&e.mean.replace, replace)
        store(&e.mean.wanted, e.mean.wanted + 1)
        store(&e.mailbox.at_rest, 0)
        pthread_mutex_unlock(&e.mailbox.gate)
        wake(e)
        return e.mean.wanted

    def wait_mean(self, int64_t number, double seconds):
        """Wait until mean `number` is over. Return False if it is not after `seconds`, or after a fault."""
        return wait_for(&self.core, &self.core.mean.finished, number, seconds)

    def pause(self, bint paused):
        """Begin no exchange and answer NO until pause(False) is called."""
        cdef Core* e = &self.core
        pthread_mutex_lock(&e.mailbox.gate)
        e.mailbox.given.paused = paused
        store(&e.mailbox.at_rest, 0)
        pthread_mutex_unlock(&e.mailbox.gate)
        wake(e)

    def wait_quiet(self, double seconds):
        """After pause(True): wait until no exchange is running. Return False after `seconds` without a chunk.

        The thread sets `at_rest` at the end of a poll that began after the pause, so this also waits for an
        exchange that the thread was about to begin, for one with a silent peer, and, as long as chunks
        arrive, for one with a peer that has left.
        """
        cdef Core* e = &self.core
        cdef double until = now(e) + seconds
        cdef int64_t chunks, before = -1
        with nogil:
            while not load(&e.mailbox.at_rest) and not load(&e.mailbox.ended) and now(e) < until:
                chunks = load(&e.mailbox.counters.chunks) + load(&e.mailbox.counters.void_chunks)
                if chunks != before:
                    before = chunks
                    until = now(e) + seconds
                e.clock.sleep(e.clock, 100e-6)
        return load(&e.mailbox.at_rest) != 0 or load(&e.mailbox.ended) != 0

    def oldest_step(self, int64_t step, config):
        """Return the oldest step of which a snapshot may be in flight when `step` is published."""
        # corrections that exchanges compute after publish() reach the parameters one step later
        return 0 if config.max_staleness is None else step + 1 - config.max_staleness

    def wait_fresh(self, int64_t step, config):
        """Wait until no snapshot in flight is too old for `step`. Return False if not within deadline_s."""
        return wait_for(&self.core, &self.core.mailbox.in_flight_step, self.oldest_step(step, config), config.deadline_s)

    def wait_finished(self, int64_t count, double seconds):
        """Wait until `count` exchanges have finished since the start.

        Return False if not within `seconds`."""
        return wait_for(&self.core, &self.core.mailbox.finished, count, seconds)

    def stop(self, bint broken=False, double within=INFINITY):
        """Announce the departure and end the thread, within leave_deadline_s and within `within` seconds.

        With `broken`, peers count this super learner as failed.
        """
        cdef Core* e = &self.core
        if not self.running:
            return
        with nogil:
            pthread_mutex_lock(&e.mailbox.gate)
            e.mailbox.given.broken = broken
            e.mailbox.given.leave_within = within
            e.mailbox.given.leaving = True
            pthread_mutex_unlock(&e.mailbox.gate)
            wake(e)
            pthread_join(self.thread, NULL)
        self.running = False

    def released(self):
        """Give up all transfers of an engine that has stopped; for TCP, call it after the wire's `close`.

        Returns:
            Whether the engine may be freed: its thread has ended, and the wire uses none of its buffers."""
        cdef Core* e = &self.core
        if self.running:
            return False
        reap(e, &e.control.outgoing)
        mean, pairs = release_mean(e), release_pairs(e)
        return mean and pairs and e.control.outgoing == NULL and bool(e.wire.release(e.wire, &e.control.listening))

    def fault(self):
        """Return (kind, code of the wire's library, peer) of the first fault; kind 0: there was none."""
        cdef Mailbox* p = &self.core.mailbox
        cdef int64_t kind = load(&p.fault)
        if kind == FAULT_NONE:              # code and peer may be written just now
            return FAULT_NONE, 0, NOBODY
        return kind, p.fault_code, p.fault_peer

    def peer_events(self):
        return load(&self.core.mailbox.peer_events)

    def peers(self):
        """Return the state of each peer, by rank: 0 alive, 1 suspect, 2 left, 3 failed.

        A super learner that left because it failed is reported as failed, although the thread treats it as
        LEFT and finishes its exchange.
        """
        cdef Membership* m = &self.core.membership
        return [FAILED if load_byte(&m.left_broken[i]) else load_byte(&m.states[i]) for i in range(m.size)]

    def met(self, int peer):
        """Return how many exchanges with `peer` have finished."""
        return load(count_of(&self.core.mailbox, MET, peer))

    def finished(self):
        return load(&self.core.mailbox.finished)

    def cpu_s(self):
        """Return the CPU seconds that the thread has used; 0 if it does not run."""
        cdef clockid_t clock
        cdef timespec t
        if not self.running or pthread_getcpuclockid(self.thread, &clock) != 0:
            return 0.0
        if clock_gettime(clock, &t) != 0:
            return 0.0
        return t.tv_sec + 1e-9 * t.tv_nsec

    def void_chunks(self):
        """Return how many chunks an exchange or a mean could not average so far."""
        return load(&self.core.mailbox.counters.void_chunks)

    def malformed(self):
        """Return how many malformed messages were ignored, and the peer that sent the last of them."""
        cdef Counters* c = &self.core.mailbox.counters
        return load(&c.malformed), load(&c.malformed_from)

    def counters(self):
        return counters_of(&self.core)

    def view(self):
        """Return the thread's state between two of its turns as a dict; ages in seconds."""
        return {**view_of(&self.core, self.running), "cpu_s": self.cpu_s()}

    def take_events(self):
        """Return the timeline records since the last call: [(kind, peer, began, ended, nbytes, step)]."""
        cdef Core* e = &self.core
        cdef int64_t i, last = load(&e.mailbox.events_written)
        cdef Event* v
        out = []
        if e.mailbox.events != NULL:
            for i in range(e.mailbox.events_read, last):
                v = &e.mailbox.events[i % EVENTS]
                out.append((v.kind, v.peer, v.began, v.ended, v.nbytes, v.step))
            store(&e.mailbox.events_read, last)
        return out
