# cython: language_level=3
# Why compiled: it takes the turns of the engines millions of times.
"""The events of a small job: turns of engines, steps of trainers, crashes, and time that passes."""

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd.engine.loop cimport OVER, Rest, end_turns, turn
from hvd_adpsgd.engine.core cimport FAILED, Membership
from hvd_adpsgd.engine.mailbox cimport EVENT_MERGED, Event
from hvd_adpsgd.engine.store cimport Store
from hvd_adpsgd_lab.simulation.choices cimport *
from hvd_adpsgd_lab.simulation.digests cimport TICK_S
from hvd_adpsgd_lab.simulation.promises cimport take_credit
from hvd_adpsgd_lab.simulation.small_digest cimport digest_job
from hvd_adpsgd_lab.simulation.small_job cimport Learner, SmallJob
from hvd_adpsgd_lab.simulation.small_promises cimport check_over

SURVIVES = "promise 4 (survives)"


cdef int happen(SmallJob job, Choice* made) except -1:
    cdef int timed, deadlines, who, deed
    cdef bint moved = made.moved, rushed
    cdef int taken = made.taken
    job.list_options(&timed, &deadlines)
    deed, who = job.deeds[taken], job.actors[taken]
    tell(&job.between, deed, who, -1, 0, 0)
    if deed == TURN:
        take_turn(job, who)
    elif deed == TRAINER:
        act(job, who)
    elif deed == CRASH:
        job.crashes_left -= 1
        job.between.optional = True
        kill(&job.between, who)
    elif deed == RETRY:
        job.retries_left -= moved
        job.learners[who].core.pairs.ask_after = 0
    else:
        rushed = moved or deadlines > timed
        job.deadlines_left -= rushed
        pass_deadline(job, who, rushed)
    if job.between.misuse != NULL:
        job.fail("the wire's contract", f"engine {who}: {job.between.misuse.decode()}")
    return 0


cdef int pass_deadline(SmallJob job, int who, bint rushed) except -1:
    if not rushed and not job.between.faulty and not waits_in_vain(job, who):
        before = digest_job(job)
        job.between.now_s[who] += TICK_S
        if digest_job(job) != before:
            job.fail(SURVIVES, f"engine {who} waits for a deadline, although no peer was silent or has "
                     f"failed: {job.describe()}")
    else:
        job.between.now_s[who] += TICK_S
    job.learners[who].rushed += rushed
    job.between.faulty |= job.learners[who].rushed > 1    # one is half of its time to leave: only CUT
    return 0


cdef bint waits_in_vain(SmallJob job, int i) noexcept:
    """Whether an engine that leaves waits for answers only of peers that have ended."""
    cdef Membership* m = &job.learners[i].core.membership
    cdef int peer
    for peer in range(m.size if m.departing else 0):
        if not m.answered[peer] and m.states[peer] < FAILED and not m.ended[peer] and not job.between.over[peer]:
            return False
    return m.departing


cdef int take_turn(SmallJob job, int i) except -1:
    cdef Learner* a = &job.learners[i]
    cdef Core* e = a.core
    cdef Rest rest = turn(e, &a.rhythm)
    cdef Event* event
    while e.mailbox.events_read < e.mailbox.events_written:
        event = &e.mailbox.events[e.mailbox.events_read]
        if event.kind == EVENT_MERGED:
            tell(&job.between, MERGES, i, event.peer, event.chunk, event.number)
            job.ledger.merged(i, event.peer, event)
        e.mailbox.events_read += 1
    e.mailbox.events_read = e.mailbox.events_written = 0
    take_credit(e, &a.begun, &a.credit)
    if rest == OVER:
        tell(&job.between, ENDS, i, -1, 0, 0)
        check_over(job, i)
        end_turns(e)
        end(&job.between, i)
    return 0


cdef int act(SmallJob job, int i) except -1:
    """Take the next step of a trainer's script."""
    cdef Learner* a = &job.learners[i]
    cdef Core* e = a.core
    cdef Store chunks = job.stores[i]
    cdef int deed = (<bytes>job.scripts[i])[a.place]
    a.place += 1
    if deed == c"o":
        end_step(job, i)
    elif deed == c"p":
        chunks.publish()
    elif deed == c"z" or deed == c"r":
        job.loops[i].pause(deed == c"z")
    else:
        e.mailbox.given.broken = deed == c"b"
        e.mailbox.given.leaving = True
    return 0


cdef int end_step(SmallJob job, int i) except -1:
    cdef Learner* a = &job.learners[i]
    cdef Store chunks = job.stores[i]
    cdef double* parameters = job.parameters(i)
    cdef int c
    for c in range(job.chunks):
        parameters[c] += 64.0 * (i + 1)
        job.expected[c] += 64.0 * (i + 1)
    chunks.absorb(job.spans, job.addresses[i], chunks.published, a.step)
    job.loops[i].offer(a.step, True)
    a.credit = min(a.credit + 1.0, 1.0)
    a.step += 1
    return 0
