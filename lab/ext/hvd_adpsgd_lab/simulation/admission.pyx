# cython: language_level=3
# Why compiled: it creates and starts engines through their C structs.
"""Admission of joining super learners in a simulated job: all members switch to new engines, or none does.

The joining super learner is called newcomer here; newcomers.pyx lets several join one after the other. The steps
are those of joining/admission.py and joining/reconnect.py, with real engines, the real agreement, and the real
decision (joining/decision.py):

    each member                                             the newcomer
    before the same step: pauses its engine, and
    applies all corrections
    decision 0: the members. The giver, the lowest
    of them, has the mean of their models
    makes an engine for them and the newcomer              makes its engine when the giver asks
    decision 1: all have theirs, and no process was lost
    leaves its old engine and continues with the new one   gets that decision and the mean, and begins

Members are processes, which may crash or stop between any two of these steps. Letters between two processes
arrive in order; failures are noticed as the engines' wires notice them. The newcomer gives up if it does not
receive the decision within its deadline, or if the giver is lost before it has sent the model.
"""

from libc.stdint cimport uintptr_t

from dataclasses import replace

import numpy as np

from hvd_adpsgd.joining.decision import MOVE_S, all_switch

from hvd_adpsgd.engine.loop cimport begin_turns
from hvd_adpsgd_lab.simulation.chance cimport between, happens, uniform
from hvd_adpsgd_lab.simulation.network cimport LATE, cut_until, enter
from hvd_adpsgd_lab.simulation.newcomers cimport (
    AWAY, IN, MAKES, OUT, OVER, RESTS, TRAINS, VOTED, Admission, Newcomers, open_next)
from hvd_adpsgd_lab.simulation.promises cimport check_joined, check_moved
from hvd_adpsgd_lab.simulation.seats cimport make_engine, share_memory
from hvd_adpsgd_lab.simulation.state cimport (AWAIT_ALL, COME, DONE_STEPS, LETTER, REPORT, STEP, TAKE_IN, Actor, JobState)
from hvd_adpsgd_lab.simulation.trainers cimport absorb, begin_rest, follow, leave_job, refresh

cdef enum:
    AGREES = 0              # kinds of letters: a message of the agreement
    LOST = 1                # the sender's process has ended
    INVITED = 2             # to the newcomer: make your engine
    READY = 3               # from the newcomer: its engine is made
    IS_IN = 4               # to the newcomer: all members switch to the new engines
    GIFT = 5                # to the newcomer: step and mean
    NO_MORE = 6             # to the sender itself: its deadline is over
    PACKED = 7              # to the giver itself: the gift can be sent

cdef double REFUSED = 0.05  # probability that a member cannot make its engine; 0 where a model is trained


# ---- members -------------------------------------------------------------------------------

cdef int come(JobState job, int i) except -1:
    """Act for a trainer that is at the step of the admission: pause its engine; once that rests, vote."""
    cdef Actor* a = &job.actors[i]
    cdef Admission m = job.admission
    if a.doing == COME:
        a.came = True
        a.after = TAKE_IN
        begin_rest(job, i)
    elif a.doing == TAKE_IN:
        if job.local is not None:
            job.local.before_pause(a.process)
        for _ in range(2):              # the published corrections, and those merged since
            job.stores[i].publish()
            absorb(job, i, a.step - 1)
        if job.local is not None:
            job.local.after_pause(a.process)
            refresh(job, i, a.step - 1)
        a.doing = AWAIT_ALL
        m.states[a.process] = RESTS
        say(job, a.process, True)
    return 0


cdef int say(JobState job, int p, bint flag) except -1:
    """Vote in the current decision: for decision 0 at rest, for decision 1 ready to switch."""
    cdef Admission m = job.admission
    if m.states[p] == MAKES:
        m.states[p] = VOTED
        if flag:
            m.ready.add(p)
    m.agreements[p].vote(flag)
    return act_on(job, p)


cdef int act_on(JobState job, int p) except -1:
    """Send the agreement's messages, and act on a decision that has been made."""
    cdef Admission m = job.admission
    agreement = m.agreements[p]
    for peer, message in agreement.take_outgoing():
        post(job, p, m.order[peer], AGREES, message)
    if m.states[p] == RESTS and agreement.number == 1:
        prepare(job, p, staying(job, decided(job, agreement, 0)))
    elif m.states[p] == VOTED and agreement.number == 2:
        decision = decided(job, agreement, 1)
        living = staying(job, decision)
        m.states[p] = OVER
        conclude(job, p, all_switch(decision.flag, living, m.members), m.ready.intersection(living))
        open_next(job)
    return 0


cdef object decided(JobState job, agreement, number):
    """Return a decision, after a check that it is the same on all members."""
    decision = agreement.decision(number)
    if agreement.excluded:
        job.fail("promise 8 (one decision)", f"member {agreement.me} lives, and is excluded from an admission")
    job.ledger.same(job.ledger.decisions, ("admission", job.admissions, number), tuple(decision), "decision")
    return decision


cdef list staying(JobState job, decision):
    """Return the members that a decision does not declare failed."""
    cdef Admission m = job.admission
    return [p for i, p in enumerate(m.order) if i not in decision.failed]


cdef int prepare(JobState job, int p, list members) except -1:
    """Act on decision 0: make the new engine of a member; the giver also invites the newcomer."""
    cdef Admission m = job.admission
    if m.members is None:
        m.members = members
        m.giver = members[0]
        make_engines(job)
    begin(job, m.places[p])
    m.states[p] = MAKES
    if p != m.giver:
        refused = happens(&job.net.chance, REFUSED) and job.local is None
        return say(job, p, not refused)
    m.values = np.mean([job.models[job.seats[q]].astype(np.float64) for q in m.members], axis=0)
    if m.newcomer_lost:
        return say(job, p, False)
    post(job, p, m.newcomer, INVITED, None)
    post_later(job, p, NO_MORE, job.leave_deadline_s)
    return 0


cdef int make_engines(JobState job) except -1:
    """Make the new engines of all members and the newcomer; each is absent until its process starts it."""
    cdef Admission m = job.admission
    cdef Newcomers them = job.newcomers
    cdef int first = job.n, q, at
    cdef Actor* a
    them.ranks[m.newcomer:] = [m.number]
    by_rank = {them.ranks[q]: q for q in (*m.members, m.newcomer)}
    numbers = sorted(by_rank)
    plans = them.plan(numbers, max(them.size, m.number + 1))
    m.first = first
    if job.hosts is not None:
        job.hosts += [job.hosts[number % them.n] for number in numbers]
    for place, (schedule, weight, table) in enumerate(plans):
        at = first + place
        q = by_rank[numbers[place]]
        job.network.place(at, first, len(numbers), q)
        options, in_node = job.given[q % them.n]     # newcomers have the options of the first members
        is_new = q == m.newcomer
        model = job.models[job.seats[q]] if not is_new else new_model(job, q, m.number)
        make_engine(job, schedule, model, replace(options, weight=weight), in_node, -1 if is_new else job.seats[q])
        if job.tables is not None:
            job.tables.append(table)
        a = &job.actors[at]
        a.absent = a.came = True
        m.places[q] = at
    job.n += len(numbers)
    if job.hosts is not None:
        share_memory(job, first, len(numbers), options.chunk_nbytes)
    job.seats[m.newcomer] = m.places[m.newcomer]
    job.actors[m.places[m.newcomer]].dead = m.newcomer_lost
    return 0


cdef object new_model(JobState job, int process, int number):
    """Return the array for the model of a newcomer."""
    cdef Newcomers them = job.newcomers
    return np.zeros_like(job.models[0]) if them.model is None else them.model(process, number)


cdef void begin(JobState job, int at):
    """Start the new engine of a process."""
    cdef Actor* a = &job.actors[at]
    cdef int i
    a.absent = False
    job.living += 1
    begin_turns(a.core, &a.rhythm)
    job.turn_soon(at)
    for i in range(a.first, a.first + a.size):
        if job.actors[i].dead:
            enter(job.net, job.net.now_s + between(&job.chance, 0, job.detect_s), REPORT, at, <void*><uintptr_t>i)


cdef int conclude(JobState job, int p, bint goes_over, set ready) except -1:
    """Act on decision 1: all members switch to the new engines, or all keep the old ones."""
    cdef Newcomers them = job.newcomers
    cdef Admission m = job.admission
    if goes_over:
        if not ready.issuperset(m.members):
            job.fail("promise 8 (one decision)", f"members {m.members} switch to new engines; only "
                     f"{sorted(ready)} are ready and alive")
        job.note("join | all go over" if p == m.giver else "join | a member goes over")
        if p == m.giver:
            if job.checks:
                check_joined(job, [job.seats[q] for q in m.members], m.values)
            if job.local is not None:
                job.local.gives(p)
            them.size = max(them.size, m.number + 1)
            post(job, p, m.newcomer, IS_IN, None)
            m.gift = job.actors[job.seats[p]].step, m.values
            post_later(job, p, PACKED, transfer_s(job, job.seats[p]))
        go_over(job, p)
    else:
        job.note("join | a member goes on as it was")
        go_on(job, p)
    return 0


cdef double transfer_s(JobState job, int i):
    """Return how long the model of engine i takes to the newcomer: a random time where no model is trained."""
    if job.local is None:
        return between(&job.chance, 0, 2 * job.actors[i].step_s)
    return job.models[i].nbytes * job.net.rules.bytes_scale / job.net.rules.bytes_per_s


cdef int go_over(JobState job, int p) except -1:
    cdef Admission m = job.admission
    cdef int i = job.seats[p], at = m.places[p]
    cdef Actor* old = &job.actors[i]
    cdef Actor* a = &job.actors[at]
    if job.late[i] is not None:
        follow(job, i)
    check_moved(job, i)
    a.step, a.steps, a.step_s, a.slowed, a.spread, a.node_s = (old.step, old.steps, old.step_s, old.slowed, old.spread,
                                                               old.node_s)
    a.broken, a.unfit = old.broken, old.unfit
    a.doing = STEP
    job.seats[p] = at
    old.successor = at                  # continues the steps when the old engine has ended
    leave_old(job, i)
    return 0


cdef void go_on(JobState job, int p):
    """Continue with the old engine; the new one, which has exchanged nothing, ends."""
    cdef Admission m = job.admission
    cdef int i = job.seats[p]
    leave_old(job, m.places[p])
    job.loops[i].pause(False)
    job.actors[i].doing = STEP
    job.again(i, between(&job.chance, 20e-6, 200e-6))


cdef void leave_old(JobState job, int i):
    """End an engine whose process uses another one."""
    cdef Actor* a = &job.actors[i]
    cdef Newcomers them = job.newcomers
    a.steps = a.step
    a.doing = DONE_STEPS
    a.done_at = job.net.now_s
    them.left.append((i, a.process))
    a.core.mailbox.given.leave_within = MOVE_S
    leave_job(job, i, False)


# ---- the newcomer --------------------------------------------------------------------------

cdef int arrive_at(JobState job, int kind, content) except -1:
    """Process a letter to the newcomer."""
    cdef Admission m = job.admission
    cdef Newcomers them = job.newcomers
    cdef int at = job.seats[m.newcomer], old
    cdef Actor* a = &job.actors[at]
    if m.joiner == OUT:
        return 0
    if kind == INVITED:
        m.joiner = MAKES
        begin(job, at)
        post(job, m.newcomer, m.giver, READY, None)
        post_later(job, m.newcomer, NO_MORE, 2 * job.leave_deadline_s)
    elif kind == IS_IN:
        m.joiner = IN
    elif kind == GIFT:
        m.joiner = TRAINS
        step, values = content
        job.models[at][...] = values
        if job.checks:
            job.expected += job.models[at]
        if job.local is not None:
            job.local.joins(m.newcomer)
        old = 0 if job.local is None else min(m.number, them.n - 1)     # the first with its rank
        a.step, a.step_s, a.spread, a.node_s = (step, job.actors[old].step_s, job.actors[old].spread,
                                                job.actors[old].node_s)
        a.steps = max([job.actors[i].steps for i in job.seats if i >= 0])
        a.doing = STEP
        job.note("join | the newcomer begins")
        job.again(at, between(&job.chance, 20e-6, 200e-6))
        open_next(job)
    elif (kind == NO_MORE and m.joiner in (AWAY, MAKES)) or (kind == LOST and m.joiner != TRAINS):
        m.joiner = OUT
        job.note("join | the newcomer gives up")
        if not a.absent:
            a.done_at = job.net.now_s
            a.doing = DONE_STEPS
            leave_job(job, at, True)
        if job.local is not None:
            job.local.stays_out(m.number)
        open_next(job)
    return 0


cdef void lose_newcomer(JobState job, int process):
    """Crash the newcomer's process before it has an engine."""
    cdef Admission m = job.admission
    if process != m.newcomer:
        return
    job.note("crash | newcomer")
    m.newcomer_lost = True


# ---- letters -------------------------------------------------------------------------------

cdef void post(JobState job, int src, int dst, int kind, content):
    """Send a letter, which arrives after all earlier letters between the same two processes."""
    cdef double at = job.net.now_s
    cdef double cut = cut_until(job.net, src, dst)
    at += job.net.rules.latency_s * (1 + job.net.rules.jitter * uniform(&job.net.chance))
    if happens(&job.net.chance, job.net.rules.late):
        at += LATE * job.net.rules.latency_s * uniform(&job.net.chance)
    if cut > job.net.now_s:
        at += cut - job.net.now_s
    deliver(job, src, dst, kind, content, at)


cdef void post_later(JobState job, int p, int kind, double seconds):
    """Send a letter to the process itself, which arrives after `seconds`."""
    cdef Admission m = job.admission
    m.letters.append((p, p, kind, None))
    enter(job.net, job.net.now_s + seconds, LETTER, job.admissions, <void*><uintptr_t>(len(m.letters) - 1))


cdef void deliver(JobState job, int src, int dst, int kind, content, double at):
    cdef Admission m = job.admission
    at = max(at, m.arrives.get((src, dst), 0.0) + 1e-9)
    m.arrives[src, dst] = at
    m.letters.append((src, dst, kind, content))
    enter(job.net, at, LETTER, job.admissions, <void*><uintptr_t>(len(m.letters) - 1))


cdef int read_letter(JobState job, int admission, int which) except -1:
    """Let a process read a letter; those of earlier admissions, which are over, change nothing."""
    cdef Admission m = job.admission
    if admission != job.admissions or m.letters[which] is None:
        return 0
    src, dst, kind, content = m.letters[which]
    cdef Actor* a = &job.actors[job.seats[dst]]
    if a.stopped:
        m.held.setdefault(dst, []).append(which)
        return 0
    m.letters[which] = None
    if a.dead or a.over:
        return 0
    job.tell(job.seats[dst], f"reads letter {kind} of {src}")
    if dst == m.newcomer:
        return arrive_at(job, kind, content)
    if kind == AGREES:
        m.agreements[dst].receive(m.place_of[src], content)
    elif kind == LOST and src != m.newcomer and m.place_of[src] not in m.agreements[dst].suspected:
        m.agreements[dst].failed(m.place_of[src])
    elif kind == PACKED:
        post(job, dst, m.newcomer, GIFT, m.gift)
    elif dst == m.giver and kind in (READY, NO_MORE, LOST) and m.states[dst] == MAKES:
        return say(job, dst, kind == READY)
    return act_on(job, dst)


cdef void read_held(JobState job, int process):
    """Deliver the letters that arrived while a process was stopped, because it continues."""
    cdef Admission m = job.admission
    if m is not None:
        for which in m.held.pop(process, ()):
            enter(job.net, job.net.now_s, LETTER, job.admissions, <void*><uintptr_t><int>which)


cdef void lose_letters(JobState job, int process):
    """Lose letters of a crashed process: of those to each receiver, a random initial part arrives."""
    cdef Admission m = job.admission
    if m is None:
        return
    lost = {q: happens(&job.net.chance, 0.5) for q in (*m.order, m.newcomer)}
    for which, letter in enumerate(m.letters):
        if letter is None or letter[0] != process:
            continue
        lost[letter[1]] = lost[letter[1]] or happens(&job.net.chance, 0.3)
        if lost[letter[1]] and which not in m.held.get(letter[1], ()):
            m.letters[which] = None
    open_next(job)


cdef void tell_lost(JobState job, int i, int who):
    """Send LOST from the process of engine `who`, which has ended, to the process of engine i."""
    cdef Admission m = job.admission
    cdef int p = job.actors[i].process, q = job.actors[who].process
    if m is None or p == q or not all(each in m.place_of or each == m.newcomer for each in (p, q)):
        return
    if p == m.newcomer or q == m.newcomer or m.states[p] != OVER:
        deliver(job, q, p, LOST, None, job.net.now_s)
