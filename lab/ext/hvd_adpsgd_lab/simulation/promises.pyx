# cython: language_level=3
# Why compiled: it reads the state of the engines after each turn.
"""Checks of a simulated job's promises and invariants: after each turn, when an engine or the job ends."""

from libc.stdint cimport int64_t, uintptr_t

import numpy as np

from hvd_adpsgd_lab.simulation.ledger import NOTHING_LOST, ONE_DECISION, REPORTS_ERRORS

from hvd_adpsgd.engine.core cimport ASKED, BROKEN, CLOSING, IDLE, LANES, RUNNING, SETS, Core, Exchange, Generation
from hvd_adpsgd.engine.core cimport ALIVE, FAILED, LEFT
from hvd_adpsgd.engine.mailbox cimport EVENT_ASKED, EVENT_MEAN, EVENT_MERGED, EVENT_PARKED, EVENTS, FAULT_FENCED, FAULT_GONE, FAULT_LAYOUT, NO_STEP, Event, load, store
from hvd_adpsgd.engine.loop cimport mapped
from hvd_adpsgd.engine.store cimport Store, chunk_at, memory_snapshot_as
from hvd_adpsgd_lab.simulation.coverage cimport SILENCE, covered
from hvd_adpsgd_lab.simulation.ledger cimport Ledger
from hvd_adpsgd_lab.simulation.network cimport open_transfers
from hvd_adpsgd_lab.simulation.state cimport FLOAT16, FLOAT32, FLOAT64, MEET, Actor, JobState


cdef int check_turn(JobState job, int i) except -1:
    """Check the merges and decisions of a turn, and the invariants of the engine's state."""
    cdef Actor* a = &job.actors[i]
    cdef Core* e = a.core
    cdef Event* event
    a.overdue |= parks(e)
    while e.mailbox.events_read < e.mailbox.events_written:
        event = &e.mailbox.events[e.mailbox.events_read % EVENTS]
        if job.story is not None:
            tell_event(job, i, event)
        if event.kind == EVENT_MERGED and event.peer >= 0:
            job.ledger.merged(i, a.first + event.peer, event)
            check_tensors(job, i, event)
            check_staleness(job, i, event)
            if job.net.ntorn:
                check_torn(job, i, event)
        elif event.kind == EVENT_PARKED:
            covered(job.coverage, e, event.peer, SILENCE, True)
            check_silence(job, i, a.first + event.peer, event)
        elif event.kind == EVENT_ASKED:
            job.asked[i, a.first + event.peer] = event.number
        store(&e.mailbox.events_read, e.mailbox.events_read + 1)
    if a.changes != e.mailbox.peer_events:
        a.changes = e.mailbox.peer_events
        note_left(job, i, e)
    if e.mailbox.fault == FAULT_GONE and not a.gave_up:
        check_patience(job, i, a)
    elif e.mailbox.fault == FAULT_FENCED and (i, a.first + e.mailbox.fault_peer) in job.suspected:
        pass                                # the peer has taken it for failed, and reused the memory
    elif e.mailbox.fault == FAULT_LAYOUT and average_others(e, job.actors[a.first + e.mailbox.fault_peer].core):
        note_other_tensors(job, i, a.first + e.mailbox.fault_peer)
    elif e.mailbox.fault and not a.gave_up:
        job.fail("no fault", f"engine {i} has latched fault {e.mailbox.fault}, code {e.mailbox.fault_code}, peer "
                  f"{e.mailbox.fault_peer}")
    check_exchanges(job, i, e)
    if job.means is None:
        return check_credit(job, i, a)
    if e.mean.agreement.number != a.decided:
        a.decided = e.mean.agreement.number
        check_decision(job, a)
    return 0


cdef bint average_others(Core* e, Core* other) noexcept:
    """Whether two engines have layouts that do not agree."""
    cdef int64_t k
    for k in range(min(e.ngenerations, other.ngenerations)):
        if e.generations[k].fingerprint != other.generations[k].fingerprint:
            return True
    return False


cdef Generation* first_with(Core* e, int chunk) noexcept:
    """Return the layout with which an engine has added a chunk."""
    cdef int64_t k = 0
    while e.generations[k].nchunks <= chunk:
        k += 1
    return &e.generations[k]


cdef int check_tensors(JobState job, int i, Event* event) except -1:
    """Check that both sides of an exchange have added the chunk that one of them has merged with the same group."""
    cdef int peer = job.actors[i].first + event.peer
    cdef Core* e = job.actors[i].core
    cdef Core* other = job.actors[peer].core
    if event.chunk >= job.nchunks and first_with(e, event.chunk).fingerprint != first_with(other, event.chunk).fingerprint:
        job.fail(REPORTS_ERRORS, f"engine {i} merges chunk {event.chunk} with engine {peer}, which averages "
                 "other tensors")
    return 0


cdef void note_other_tensors(JobState job, int i, int peer):
    """Record that an engine has found another layout: its trainer raises an error."""
    if not job.actors[i].gave_up:
        job.note("extend | other tensors found")
        job.tell(i, f"raises an error: engine {peer} averages other tensors")


cdef bint parks(Core* e):
    """Whether an engine has a parked exchange: its late chunks may be stale, as no trainer waits for them."""
    cdef Exchange* x = e.pairs.running
    while x != NULL and not x.parked:
        x = x.next_one
    return x != NULL


cdef int check_silence(JobState job, int i, int peer, Event* event) except -1:
    """Check that an exchange is parked again only after deadline_s: the peer has answered in between."""
    cdef double patience = job.actors[i].core.pairs.deadline_s
    before = job.parked_at.get((i, peer))
    if before is not None and event.ended - before <= patience:
        job.fail("invariant (silence)", f"engine {i} parks its exchange with {peer} again after {event.ended - before:.6f} s, "
                 f"deadline_s is {patience:.6f}")
    job.parked_at[i, peer] = event.ended
    return 0


cdef int check_paired(JobState job, int i, Core* e) except -1:
    """Check that the asker of each served exchange awaits an answer, takes part in it, or has finished it."""
    cdef Exchange* x = e.pairs.running
    cdef Actor* asker
    cdef int peer
    while x != NULL:
        peer = job.actors[i].first + x.peer
        asker = &job.actors[peer]
        if (x.phase == RUNNING and not x.active and not asker.dead and not asker.over
                and asker.core.mailbox.fault != FAULT_LAYOUT
                and asker.core.membership.states[e.wire.rank] < LEFT and not takes_part(asker.core, e.wire.rank, x.number)
                and job.asked.get((peer, i)) != x.number):
            job.fail("invariant (both or none)", f"engine {i} serves exchange {x.number} of engine {peer}, "
                     "which has given it up")
        x = x.next_one
    return 0


cdef bint takes_part(Core* e, int peer, int number) noexcept:
    """Whether an engine takes part in an exchange with `peer` that it has asked for under that number."""
    cdef Exchange* x = e.pairs.running
    while x != NULL:
        if x.peer == peer and x.active and x.number == number and x.phase != IDLE:
            return True
        x = x.next_one
    return False


cdef int check_staleness(JobState job, int i, Event* event) except -1:
    """Check that a chunk is merged at most `max_staleness` steps after its snapshot.

    At least two steps are allowed: a snapshot that is taken between publish and offer is of the step before,
    and its chunk waits for the next publish."""
    cdef Actor* a = &job.actors[i]
    cdef int64_t stale = a.step + (a.doing == MEET) - event.step
    if job.config.bounds_staleness and stale > max(job.config.max_staleness, 2) and not a.overdue:
        job.fail("option max_staleness", f"engine {i} merges chunk {event.chunk} of a snapshot {stale} steps old, allowed "
                 f"are {max(job.config.max_staleness, 2)}")
    return 0


cdef int check_torn(JobState job, int i, Event* event) except -1:
    """Check that a chunk which changed while it was read was not merged in this turn."""
    cdef int k
    for k in range(job.net.ntorn):
        if (job.net.torn[k].chunk == event.chunk
                and job.net.torn[k].lives == job.actors[i].core.pairs.neighbours[event.peer].lives):
            job.fail("invariant (torn reads)", f"engine {i} has merged chunk {event.chunk} of {event.peer}, which has "
                     "changed while it was read")
    return 0


cdef int check_versions(JobState job, int i, before) except -1:
    """Check that the versions of chunks that peers may read are even, and have grown, after a change.

    Chunks that were left out have not changed."""
    after = versions_of(job, i)
    if np.any(after % 2) or np.any(after < before + (2 if job.every == 1 else 0)):
        job.fail("invariant (torn reads)", f"engine {i} has changed its model; versions were {before.tolist()}, and are "
                 f"{after.tolist()}")
    return 0


cdef object versions_of(JobState job, int i):
    """Return the versions of the chunks that peers may read; None if they read none."""
    if job.lives is None or not (<Store>job.stores[i]).memory.shown:
        return None
    return job.lives[i].view(np.int64)[::Store.live_nbytes(1) // 8].copy()


cdef int note_left(JobState job, int i, Core* e) except -1:
    cdef int j, first = job.actors[i].first
    for j in range(first, first + e.membership.size):
        if e.membership.states[j - first] == LEFT:
            job.left_at.setdefault((i, j), job.net.now_s)
        elif (e.membership.states[j - first] == FAILED and not job.actors[j].dead and not job.actors[j].over
              and (i, j) not in job.suspected):
            job.fail(ONE_DECISION, f"engine {i} takes engine {j} for failed, which lives")
    return 0


cdef int check_patience(JobState job, int i, Actor* a) except -1:
    """Check a FAULT_GONE: the peer has left, its process has not ended, and the engine has waited."""
    cdef Core* e = a.core
    cdef int peer = e.mailbox.fault_peer
    cdef double patience = e.pairs.deadline_s + 2 * e.leave_deadline_s
    left_at = job.left_at.get((i, a.first + peer))
    if e.membership.ended[peer] or left_at is None or job.net.now_s - left_at < patience:
        job.fail("no fault", f"engine {i} gives up a mean for engine {peer}, which left at {left_at} s "
                  f"(patience {patience:.3f} s)")
    return 0


cdef int check_exchanges(JobState job, int i, Core* e) except -1:
    wrong = wrong_exchanges(i, e)
    if wrong is not None:
        promise, what = wrong
        job.fail(promise, what)
    check_begun(job, i, e)
    return check_paired(job, i, e)


cdef int check_begun(JobState job, int i, Core* e) except -1:
    """Check that no exchange began with a peer known to have left: it would occupy a side in vain."""
    cdef Exchange* x = e.pairs.running
    cdef int first = job.actors[i].first
    while x != NULL:
        if x.phase == RUNNING and e.membership.states[x.peer] >= LEFT:
            left_at = job.left_at.get((i, first + x.peer))
            if left_at is not None and x.began > left_at:
                job.fail("invariant (one that left)", f"engine {i} begins an exchange with {first + x.peer} at {x.began - 1:.6f} s, "
                         f"which left at {left_at - 1:.6f} s")
        x = x.next_one
    return 0


cdef object wrong_exchanges(int i, Core* e):
    """Check the exchanges of an engine: at most one on each side, and one with each peer; none in a pause.

    Also that the trainer knows the step of the oldest snapshot in flight. Return (the broken invariant, how
    it is broken), or None."""
    cdef Exchange* x = e.pairs.running
    cdef Exchange* y
    cdef int asked = 0, served = 0, k
    cdef int64_t oldest = NO_STEP
    cdef bint at_rest = load(&e.mailbox.at_rest)
    while x != NULL:
        if x.phase == ASKED or x.phase == RUNNING or x.phase == CLOSING:
            asked += x.active and not x.parked
            served += not x.active and not x.parked
            if at_rest and e.membership.states[x.peer] < LEFT:
                return ("invariant (rest)", f"engine {i} is at rest with an exchange with {x.peer}")
        y = x.next_one
        while y != NULL:
            if y.peer == x.peer and y.phase != IDLE and x.phase != IDLE:
                return ("invariant (one exchange)", f"engine {i} has two exchanges with {x.peer}")
            y = y.next_one
        for k in range(LANES):
            if x.phase == RUNNING and not x.parked and x.lanes[k].busy and not x.lanes[k].received:
                oldest = min(oldest, x.lanes[k].step)
        x = x.next_one
    if asked > 1 or served > 1:
        return ("invariant (one exchange)", f"engine {i} asks {asked} peers and serves {served}")
    if oldest < load(&e.mailbox.in_flight_step):
        return ("invariant (staleness)", f"engine {i} has a snapshot of step {oldest} in flight and tells its trainer "
                f"{load(&e.mailbox.in_flight_step)}")
    return None


cdef int64_t take_credit(Core* e, int64_t* begun, double* credit) noexcept:
    """Take a credit for each exchange that has begun in this turn; return how many have begun so far."""
    cdef Exchange* x = e.pairs.running
    cdef int64_t count = e.mailbox.counters.exchanges_active + e.mailbox.counters.exchanges_passive + e.mailbox.counters.broken
    while x != NULL:
        count += x.phase == RUNNING or x.phase == CLOSING
        x = x.next_one
    while begun[0] < count:
        begun[0] += 1
        credit[0] = max(credit[0] - 1.0, -2.0 * max(e.mailbox.rate, 1.0))
    return count


cdef int check_credit(JobState job, int i, Actor* a) except -1:
    cdef Core* e = a.core
    cdef int64_t begun = take_credit(e, &a.begun, &a.credit)
    if a.begun > begun or a.credit != e.mailbox.given.credit:
        job.fail("invariant (credit)", f"engine {i} has credit {e.mailbox.given.credit} after {begun} "
                 f"exchanges; it must be {a.credit}")
    return 0


cdef int check_decision(JobState job, Actor* a) except -1:
    cdef Core* e = a.core
    cdef int i
    if e.mean.agreement.excluded:
        return 0
    failed = [i for i in range(a.size) if e.mean.agreement.last.failed[i]]
    return job.ledger.same(job.ledger.decisions, (a.first, e.mean.agreement.number - 1),
                            (e.mean.agreement.last.outcome, bool(e.mean.agreement.last.equal), failed), "decision")


cdef int check_replaced(JobState job, int i, int n) except -1:
    """Check that a mean which replaces the models has the same bits on all engines."""
    mirror, slots, full = job.areas[i]
    cdef int published = (<Store>job.stores[i]).published
    for c in range(n):
        if full[published, c] == 2:
            job.ledger.same(job.ledger.means, (job.actors[i].first, job.actors[i].mean, c), slots[published, c].tolist(), "mean of chunk")
    return 0


cdef int check_over(JobState job, int i) except -1:
    """Check an engine that has left: its time to leave, its departure, exchanges, buffers and transfers."""
    cdef Actor* a = &job.actors[i]
    cdef Core* e = a.core
    if job.net.now_s > e.membership.leave_by + 10:
        job.fail("promise 6 (ends)", f"engine {i} took {job.net.now_s - a.done_at:.1f} s to leave")
    wrong = (wrong_leave(i, a.first, e, job.net.now_s, departure_is_known(job, i), job.ledger)
             or wrong_sets(i, e) or wrong_link(i, e))
    if wrong is not None:
        promise, what = wrong
        job.fail(promise, what)
    if (e.pairs.running == NULL and e.control.outgoing == NULL and not e.control.listening.in_use
            and not e.mean.running and e.mean.letters == NULL and e.mean.abandoned == NULL and not e.mean.listening.in_use
            and open_transfers(job.net, i)):
        job.fail("invariant (no transfer left)", f"engine {i} has left with {open_transfers(job.net, i)} "
                 "transfers posted")
    return 0


cdef object wrong_sets(int i, Core* e):
    """Check that each set of buffers in shared memory is free or used by an exchange.

    Return as `wrong_exchanges`."""
    cdef Exchange* x = e.pairs.running
    cdef int k, taken = 0
    while x != NULL:
        taken += x.set >= 0
        x = x.next_one
    for k in range(SETS):
        taken -= e.pairs.taken[k]
    return ("invariant (buffers)", f"engine {i}: {-taken} sets of buffers are taken "
            "by no exchange") if taken else None


cdef object wrong_link(int i, Core* e):
    """Check that exchanges through shared memory do not count as use of the link. Return as `wrong_exchanges`."""
    if e.mailbox.counters.link_s and all([mapped(e, peer) != NULL for peer in range(e.wire.size) if peer != e.wire.rank]):
        return ("invariant (link)", f"engine {i} shares memory with all of its peers, and has used its link for "
                f"{e.mailbox.counters.link_s:.3g} s")
    return None


cdef object wrong_leave(int i, int first, Core* e, double now_s, bint known, Ledger ledger):
    """Check that its peers know the departure of an engine that left, and that its exchanges have finished.

    Exchanges with silent peers may be unfinished; they are recorded in the ledger. Return as
    `wrong_exchanges`.
    """
    cdef Exchange* x = e.pairs.running
    late = e.membership.leave_by and now_s > e.membership.leave_by
    early = now_s < e.membership.leave_by - e.leave_deadline_s / 2     # also waits for silent peers
    if not is_unheard(e, now_s) and not known:
        return ("invariant (departure)", f"engine {i} has left, and an engine that stays does not know that")
    while x != NULL:
        if x.phase != IDLE:
            peer = first + x.peer
            ledger.abandoned.add((i if x.active else peer, peer if x.active else i, x.number))
        if x.phase != BROKEN and (not late and not x.parked and e.membership.states[x.peer] == ALIVE
                                  or early and x.phase != IDLE and e.membership.states[x.peer] < LEFT):
            return ("invariant (nothing under way)", f"engine {i} has left with an exchange with {x.peer} in phase "
                    f"{x.phase}")
        x = x.next_one
    return None


cdef bint is_unheard(Core* e, double now_s) noexcept:
    """Whether an engine may have left although a peer has not answered (departures.pxi)."""
    return 2 * now_s > e.membership.said_at + e.membership.leave_by


cdef bint departure_is_known(JobState job, int i):
    """Whether all engines that stay know the departure of engine i, or have failed for it."""
    cdef int j, first = job.actors[i].first
    cdef Actor* a
    for j in range(first, first + job.actors[i].size):
        a = &job.actors[j]
        if (j != i and not (a.dead or a.over or a.absent or a.core.membership.departing)
                and a.core.membership.states[i - first] < LEFT and job.actors[i].core.membership.states[j - first] < FAILED):
            return False
    return True


cdef int check_end(JobState job) except -1:
    """Check the whole job at the end of the run."""
    cdef int i, j, first
    for i in range(job.n):
        first = job.actors[i].first
        if not job.actors[i].dead and job.actors[i].step < job.actors[i].steps:
            job.fail("promise 4 (survives)", f"engine {i} has ended after step {job.actors[i].step} of "
                      f"{job.actors[i].steps}")
        for j in range(first, first + job.actors[i].size):
            if (job.actors[i].core.membership.states[j - first] == FAILED and not job.actors[j].dead
                    and not job.actors[j].over and (i, j) not in job.suspected):
                job.fail(ONE_DECISION, f"engine {i} takes engine {j} for failed, which lives")
    if job.admission is not None:
        members, newest = job.admission.group()
        check_all_or_none(job, members, newest)
    dead = [bool(job.actors[i].dead) for i in range(job.n)]
    job.ledger.check_halves(dead, job.suspected)
    if job.means is None or not any(dead):
        check_mean(job)
    return 0


cdef int check_mean(JobState job) except -1:
    """Check that only local updates and one-sided merges have changed the sum of all models.

    The models of crashed engines are included."""
    total = np.zeros_like(job.expected)
    for i in range(job.n):
        if job.seats[job.actors[i].process] == i:
            add_model(job, i, total)
    rounding = 1e-9 if job.dtype == FLOAT64 else 4e-3
    off = np.abs(total - job.expected).max(axis=1)
    for c in range(len(total)):
        if not off[c] <= rounding + job.ledger.allowed(c):
            job.fail(NOTHING_LOST, f"the sum of chunk {c} is off by {off[c]:.3g}, allowed are "
                      f"{rounding + job.ledger.allowed(c):.3g}")
    return 0


cdef int check_joined(JobState job, members, values) except -1:
    """Check that a joining super learner gets the mean of the models, which leaves the mean of all unchanged.

    For 16-bit parameters without pending rounding errors, as in every mean of parameters."""
    total = np.zeros_like(job.expected)
    for i in members:
        if job.dtype == FLOAT16:
            total += job.models[i]
        else:
            add_model(job, i, total)
    off = np.abs(total - len(members) * values).max()
    if not off <= (1e-9 if job.dtype == FLOAT64 else 4e-3):
        job.fail(NOTHING_LOST, f"the model of a joining super learner is not the mean of {len(members)} "
                 "models; their sum is off by "
                 f"{off:.3g}")
    return 0


cdef int check_all_or_none(JobState job, members, int first) except -1:
    """Check that of the living members of an admission all have switched to the engines from `first` on, or none."""
    over, stayed = [], []
    for p in members:
        i = job.seats[p]
        if job.actors[i].came and not job.actors[i].dead:
            (over if job.actors[i].first == first else stayed).append(p)
    if over and stayed:
        job.fail(ONE_DECISION, f"members {over} have switched to new engines with a joining super learner, "
                 f"and {stayed} have not")
    return 0


cdef int check_moved(JobState job, int i) except -1:
    """Check that an engine which its trainer replaces has no exchange and no pending correction.

    Rounding errors of 16-bit parameters may be pending: they stay in the memory that both engines use."""
    cdef Core* e = job.actors[i].core
    cdef Exchange* x = e.pairs.running
    cdef int c
    while x != NULL:
        if x.phase in (ASKED, RUNNING, CLOSING) and e.membership.states[x.peer] < LEFT:
            job.fail("invariant (rest)", f"engine {i} is replaced while it has an exchange with {x.peer}")
        x = x.next_one
    for c in range(len(job.models[i])):
        if job.dtype != FLOAT16 and np.any(pending(job, i, c)):
            job.fail(NOTHING_LOST, f"engine {i} is replaced while a correction of chunk {c} is pending")
    return 0


cdef int add_model(JobState job, int i, total) except -1:
    """Add a model, with the corrections that it lacks, to `total`."""
    cdef Core* e = job.actors[i].core
    cdef int c
    cdef int64_t step
    buffer = np.zeros(job.models[i].shape[1], job.wide())
    cdef uintptr_t address = buffer.ctypes.data
    for c in range(len(job.models[i])):
        if c < e.memory.nchunks and chunk_at(e.memory, c).step >= 0:
            if job.every > 1:           # the mirror may lack updates
                total[c] += job.models[i][c] + pending(job, i, c)
                continue
            if memory_snapshot_as(e.memory, c, FLOAT64 if job.dtype == FLOAT64 else FLOAT32, False,
                                  <void*>address, &step):
                buffer[:] = np.where(np.isnan(buffer), job.models[i][c] + pending(job, i, c), buffer)
            total[c] += buffer
        else:
            total[c] += job.models[i][c]
    return 0


cdef object pending(JobState job, int i, int c):
    """Return the pending corrections of a chunk, for a model whose mirror is not finite, or is older."""
    cdef Store chunks = job.stores[i]
    mirror, slots, full = job.areas[i]
    cdef int opened = chunks.memory.open, published = chunks.published
    pending = slots[opened, c] * (full[opened, c] != 0)
    if not chunk_at(&chunks.memory, c).absorbed:
        pending = pending + slots[published, c] * (full[published, c] != 0)
    return pending


cdef void tell_event(JobState job, int i, Event* v):
    names = {EVENT_MERGED: f"merges chunk {v.chunk} with {v.peer}", EVENT_PARKED: f"parks {v.peer}, which is silent",
             EVENT_MEAN: "has the mean of all"}
    job.tell(i, names.get(v.kind, f"exchange {v.number} with {v.peer} is over"))
    job.timeline.append((job.actors[i].process, v.kind, v.began, v.ended, {"peer": v.peer, "bytes": v.nbytes, "step": v.step}))
