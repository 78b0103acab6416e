# cython: language_level=3
# Why compiled: it reads the state of the engines in each of millions of states.
"""Checks of the promises and invariants of a small job: in every state, when an engine ends, at the end."""

from libc.stdint cimport int64_t

from hvd_adpsgd_lab.simulation.ledger import NOTHING_LOST, ONE_DECISION

from hvd_adpsgd.engine.core cimport BYE, BYE_SEEN, FAILED, LEFT, RUNNING, Core, Exchange, Message
from hvd_adpsgd.engine.store cimport chunk_at, memory_snapshot
from hvd_adpsgd.engine.wire cimport CONTROL
from hvd_adpsgd_lab.simulation.choices cimport Underway, Wires, content_of, open_transfers
from hvd_adpsgd_lab.simulation.ledger cimport Half
from hvd_adpsgd_lab.simulation.promises cimport wrong_exchanges, wrong_leave, wrong_sets
from hvd_adpsgd_lab.simulation.small_job cimport SmallJob

SURVIVES = "promise 4 (survives)"


cdef int check_state(SmallJob job) except -1:
    """Check the invariants that must hold in every state."""
    cdef Core* e
    cdef int i
    for i in range(job.n):
        if job.between.dead[i]:
            continue
        e = job.learners[i].core
        if e.mailbox.fault:
            job.fail("no fault", f"engine {i} has latched fault {e.mailbox.fault}, code {e.mailbox.fault_code}, peer "
                      f"{e.mailbox.fault_peer}")
        if not job.between.over[i]:
            check_exchanges(job, i, e)
            check_peers(job, i, e)
            check_transfers(job, i, e)
            if job.learners[i].credit != e.mailbox.given.credit:
                job.fail("invariant (credit)", f"engine {i} has credit {e.mailbox.given.credit} after "
                          f"{job.learners[i].begun} exchanges; it must be {job.learners[i].credit}")
    check_sum(job)
    return 0


cdef int check_exchanges(SmallJob job, int i, Core* e) except -1:
    """Check the exchanges of an engine as promises.pyx does; at most `lanes` chunks may be in flight."""
    cdef Exchange* x = e.pairs.running
    wrong = wrong_exchanges(i, e) or wrong_sets(i, e)
    if wrong is not None:
        promise, what = wrong
        job.fail(promise, what)
    while x != NULL:
        if x.phase == RUNNING and x.next - x.done > e.pairs.lanes:
            job.fail("invariant (lanes)", f"engine {i} has {x.next - x.done} chunks in flight to {x.peer}")
        x = x.next_one
    return 0


cdef int check_transfers(SmallJob job, int i, Core* e) except -1:
    """Check that without an exchange the wire uses no buffer of an engine, except for control messages."""
    cdef Wires* f = &job.between
    cdef int k, count = f.ends[i].nposted - 1
    if e.pairs.running != NULL:
        return 0
    for k in range(f.nmessages):
        count += f.messages[k].src == i and f.messages[k].sending != NULL and f.messages[k].channel != CONTROL
    if count:
        job.fail("invariant (no transfer left)", f"engine {i} has no exchange, and the wire uses "
                  f"{count} buffers of it")
    return 0


cdef int check_peers(SmallJob job, int i, Core* e) except -1:
    """Check that peers marked FAILED have failed or were suspected, and that peers marked LEFT have left."""
    cdef int j
    for j in range(job.n):
        if e.membership.states[j] == LEFT and not job.learners[j].core.membership.departing:
            job.fail("invariant (departure)", f"engine {i} knows a departure of engine {j}, which has "
                     "announced none")
        if e.membership.states[j] == FAILED and not job.between.dead[j] and not job.between.ends[i].suspects[j] \
                and not job.between.over[j]:
            job.fail(ONE_DECISION, f"engine {i} takes engine {j} for failed, which lives")
    return 0


cdef int check_sum(SmallJob job) except -1:
    """Check that only local updates and one-sided merges have changed the sum of all models."""
    cdef double total, allowed
    cdef int c
    for c in range(job.chunks):
        total = sum_of(job, c)
        allowed = job.weight * job.ledger.allowed(c)
        if not abs(total - job.expected[c]) <= allowed:
            job.fail(NOTHING_LOST, f"the sum of chunk {c} is off by {total - job.expected[c]}, allowed are "
                      f"{allowed}")
    return 0


cdef double sum_of(SmallJob job, int c) noexcept:
    cdef double total = 0, number
    cdef Core* e
    cdef int i
    cdef int64_t step
    for i in range(job.n):
        e = job.learners[i].core
        if chunk_at(e.memory, c).step >= 0:
            memory_snapshot(e.memory, c, -1, False, &number, &step)
            total += number
        else:
            total += job.parameters(i)[c]
    return total


cdef int check_over(SmallJob job, int i) except -1:
    """Check an engine that has left: its departure, exchanges and transfers."""
    cdef Core* e = job.learners[i].core
    cdef Wires* f = &job.between
    wrong = wrong_leave(i, 0, e, f.now_s[i], departure_is_known(job, i), job.ledger)
    if wrong is not None:
        promise, what = wrong
        job.fail(promise, what)
    if f.faulty:
        return 0
    if e.pairs.running != NULL or (e.control.outgoing == NULL and open_transfers(f, i) > 1):
        job.fail("invariant (no transfer left)", f"engine {i} has left with {open_transfers(f, i) - 1} "
                 "transfers posted")
    return check_unread(job, i, e)


cdef int check_unread(SmallJob job, int i, Core* e) except -1:
    """Check that a peer that has answered the BYE of an engine sends it nothing but departures."""
    cdef Underway* message
    cdef int k
    for k in range(job.between.nmessages):
        message = &job.between.messages[k]
        if (message.dst == i and e.membership.states[message.src] < LEFT and e.membership.answered[message.src]
                and not tells_departures(message)):
            job.fail("invariant (departure)", f"engine {i} has left, and a message of {message.src} is on its way "
                      "to it")
    return 0


cdef bint departure_is_known(SmallJob job, int i) noexcept:
    """Whether all engines that stay know the departure of engine i, or have failed for it."""
    cdef int j
    for j in range(job.n):
        if (j != i and job.lives(j) and not job.learners[j].core.membership.departing
                and job.learners[j].core.membership.states[i] < LEFT and job.learners[i].core.membership.states[j] < FAILED):
            return False
    return True


cdef int check_end(SmallJob job) except -1:
    """Check, after the end of all engines, that scripts are done and that no merge is one-sided.

    Merges may be one-sided if the other side has failed."""
    cdef Wires* f = &job.between
    cdef Half* half
    cdef int64_t h
    cdef int i
    for i in range(job.n):
        if not f.dead[i] and job.learners[i].place < len(job.scripts[i]):
            job.fail(SURVIVES, f"engine {i} has ended before its trainer")
    count = {}
    for h in range(job.ledger.count):
        half = &job.ledger.halves[h]
        key = (half.asker, half.server, half.number)
        if f.ends[half.asker].suspects[half.server] or f.ends[half.server].suspects[half.asker]:
            job.ledger.abandoned.add(key)
        count[key] = count.get(key, 0) + 1
        if count[key] > job.lanes:
            job.fail(NOTHING_LOST, f"engine {half.by} alone has merged {count[key]} chunks of exchange "
                      f"{half.number} of {half.asker} with {half.server}")
    job.ledger.check_halves([bool(f.dead[i]) for i in range(job.n)])
    return 0


cdef bint tells_departures(Underway* m) noexcept nogil:
    cdef int kind = (<const Message*>content_of(m)).kind
    return m.channel == CONTROL and (kind == BYE or kind == BYE_SEEN)
