# cython: language_level=3
# Why compiled: it gives the engines their orders through C structs.
"""The trainers of a simulated job: their steps, rounds, means and pauses, and their departures."""

from libc.stdint cimport int64_t

import numpy as np

from hvd_adpsgd.engine.core cimport Core, generation
from hvd_adpsgd.engine.core cimport LEFT
from hvd_adpsgd.engine.mailbox cimport MET, count_of, load
from hvd_adpsgd.engine.store cimport Memory, Store, chunk_at
from hvd_adpsgd_lab.simulation.chance cimport between, draw
from hvd_adpsgd_lab.simulation.promises cimport check_replaced, check_versions, versions_of
from hvd_adpsgd_lab.simulation.state cimport (BEGIN_MEAN, COME, DONE_STEPS, FLOAT16, FLOAT64, FRESH, MEET, REST, STEP, WAIT, Actor, Doing,
                                          JobState)


cdef int act(JobState job, int i) except -1:
    cdef Actor* a = &job.actors[i]
    if a.doing == REST:
        if a.after == STEP:
            job.loops[i].pause(False)
        a.doing = a.after
        job.again(i, between(&job.chance, 50e-6, 500e-6))
    elif a.doing == BEGIN_MEAN:
        begin_mean(job, i)
        go_on(job, i)
    elif a.doing == WAIT:
        a.in_round = False
        a.doing = STEP
        a.settling = job.means == "replace" or (job.tables is not None and job.after)
        if job.means is not None and job.gossips and not a.settling:
            job.loops[i].pause(False)
        job.again(i, between(&job.chance, 20e-6, 200e-6))
    elif a.doing == STEP or a.doing == FRESH:
        begin_step(job, i)
    elif a.doing == MEET:
        a.doing = STEP
        end_step(job, i)
    return 0


cdef void wait_for(JobState job, int i, Doing what):
    """Let a trainer wait (WAIT, REST or FRESH); every turn of its engine may end the wait."""
    job.actors[i].doing = what
    job.actors[i].watches = True
    watch(job, i)


cdef void watch(JobState job, int i):
    cdef Actor* a = &job.actors[i]
    if (round_over(job, a) if a.doing == WAIT else fresh(job, i) or job.net.now_s > a.patience if a.doing == FRESH
            else load(&a.core.mailbox.at_rest)):
        a.watches = False
        job.again(i, between(&job.chance, 20e-6, 200e-6))


cdef bint is_called(JobState job, Actor* a):
    """Whether this is the step before which the trainer comes to an admission."""
    if job.own_steps:
        return job.admits_at >= 0 and a.step >= a.meets_at
    return a.step == job.admits_at


cdef void begin_step(JobState job, int i):
    """Begin a step: publish the corrections, then the gradient all-reduce of the super learner.

    If the trainer must first wait, pause, admit a super learner, or leave, do that instead."""
    cdef Actor* a = &job.actors[i]
    if a.in_round:
        wait_for(job, i, WAIT)
    elif a.pauses:
        a.pauses = False
        a.after = STEP
        begin_rest(job, i)
    elif a.doing == STEP and is_called(job, a) and not a.came and not a.settling:
        a.doing = COME
        job.again(i, 0)
    elif a.step >= a.steps and not a.settling:
        a.doing = DONE_STEPS
        a.done_at = job.net.now_s
        leave_job(job, i, a.broken)
    elif a.doing != FRESH and not fresh(job, i):
        a.patience = job.net.now_s + a.core.pairs.deadline_s
        wait_for(job, i, FRESH)
    else:
        a.overdue |= not fresh(job, i)
        job.stores[i].publish()
        a.doing = MEET
        job.again(i, a.node_s * between(&job.chance, 0.5, 1.5))


cdef bint fresh(JobState job, int i):
    """Whether no snapshot in flight is too old for the step to be published."""
    cdef Actor* a = &job.actors[i]
    return load(&a.core.mailbox.in_flight_step) >= job.loops[i].oldest_step(a.step, job.config)


cdef void begin_rest(JobState job, int i):
    job.loops[i].pause(True)
    job.turn_soon(i)
    wait_for(job, i, REST)


cdef void end_step(JobState job, int i):
    """End a step: update the model, apply corrections, offer the model, and begin a round if one is due."""
    cdef Actor* a = &job.actors[i]
    cdef bint fit = True
    cdef int first
    if a.settling:
        settle(job, i)
        return
    update(job, i)
    first = len(job.stores[i])
    if a.extend_at == a.step:
        job.add_chunks(i, first, last_added(job, a))
    absorb(job, i, a.step, job.every)
    check_mirror(job, i)
    if job.local is not None:
        job.local.after_corrections(a.process)
    if a.extend_at == a.step:
        lay_out_groups(job, i, first)
        a.extend_at = -1
    if a.unfit:
        a.unfit = False
        job.areas[i][0][0, 0] = np.nan          # in the mirror, until the next step
        fit = job.tables is not None
    offer(job, i, fit)
    begin_round(job, i)
    a.step += 1
    if a.doing == STEP:
        begin_step_later(job, i)


cdef int lay_out_groups(JobState job, int i, int first) except -1:
    """Lay out the chunks from `first` on; the fingerprint of a layout is one of all that it holds."""
    cdef Actor* a = &job.actors[i]
    cdef int total = len(job.stores[i]), each = 1 if a.extend_by else total - first
    while first < total:
        first += each
        job.lay_out(job.loops[i], first, 31 * generation(a.core).fingerprint + a.extend_by + 1)
    return 0


cdef int last_added(JobState job, Actor* a):
    """Return the number of chunks after an extension."""
    cdef int most = job.nchunks + job.later
    return min(most, a.core.memory.nchunks + a.extend_by) if a.extend_by else most


cdef void offer(JobState job, int i, bint fit):
    cdef Actor* a = &job.actors[i]
    cdef double rate = a.core.mailbox.rate
    job.loops[i].offer(a.step, fit)
    if a.core.reports.known != NULL:
        job.loops[i].report(f"{i} says {a.step}".encode())
    a.credit = min(a.credit + rate, max(rate, 1.0))
    if job.story is not None:
        job.tell(i, f"offers step {a.step}")
        job.timeline.append((a.process, "step", a.step_began, job.net.now_s, {"step": a.step}))
        a.step_began = job.net.now_s
    if job.steer is not None:
        job.steer(job, i)
    job.turn_at(i, job.net.now_s + between(&job.chance, 0, 50e-6))


cdef int absorb(JobState job, int i, int64_t step, int every=1) except -1:
    cdef Store chunks = job.stores[i]
    cdef int n = chunks.memory.nchunks
    model = job.models[i]
    versions = versions_of(job, i)
    if job.means == "replace" and job.checks:
        check_replaced(job, i, n)
    wanted = None
    if every > 1:
        wanted = np.zeros(n, np.uint8)
        job.loops[i].mark_next(wanted)
    if job.followers[i] is None:
        chunks.absorb(spans_of(n, model.shape[1]), addresses_of(model, n), chunks.published, step, (0,), every, every, step, wanted)
        return 0 if versions is None else check_versions(job, i, versions)
    follow(job, i)
    behind = model.copy()
    chunks.absorb(spans_of(n, model.shape[1]), addresses_of(model, n), chunks.published, step, (0,), every, every, step, wanted)
    if versions is not None:
        check_versions(job, i, versions)
    job.late[i] = behind, n, chunks.published, model.copy()
    return 0


cdef int check_mirror(JobState job, int i) except -1:
    """Check that the mirror lacks updates since its steps, and no correction, where not each step copies all."""
    cdef Memory* m = &(<Store>job.stores[i]).memory
    cdef int c
    cdef double allowed = 1e-9 if job.dtype == FLOAT64 else 4e-3 if job.dtype != FLOAT16 else 1    # updates are rounded
    if job.every == 1 or not job.checks or job.local is not None:
        return 0
    mirror, moved = job.areas[i][0], job.moved.get(job.actors[i].process, {})
    now = moved.get(job.actors[i].step, 0.0)
    for c in range(m.nchunks):
        lacks = now - moved.get(chunk_at(m, c).step, 0.0)
        off = np.abs(job.models[i][c] - mirror[c] - lacks).max()
        if off > allowed:           # a model that is not offered is not a number
            job.fail("invariant (mirror)", f"the mirror of engine {i} is off by {off:.3g} in chunk {c}, beside {lacks:g} of "
                     f"updates since step {chunk_at(m, c).step}")
    return 0


cdef void refresh(JobState job, int i, int64_t step):
    """Copy a changed model to the mirror."""
    cdef Store chunks = job.stores[i]
    model = job.models[i]
    chunks.absorb(spans_of(chunks.memory.nchunks, model.shape[1]), addresses_of(model, chunks.memory.nchunks), -1, step)


cdef int follow(JobState job, int i) except -1:
    """Let another learner of the super learner apply the slot of the last step, as late as possible.

    Check that its parameters are those of its leader."""
    if job.late[i] is None:
        return 0
    model, n, slot, leaders = job.late[i]
    job.followers[i].absorb(spans_of(n, model.shape[1]), addresses_of(model, n), slot, 0)
    if model.tobytes() != leaders.tobytes():
        job.fail("promise 5 (same in the super learner)", f"a late learner of super learner {i} has applied another correction "
                 "than its leader")
    return 0


cdef void begin_step_later(JobState job, int i):
    cdef Actor* a = &job.actors[i]
    a.doing = STEP
    job.again(i, a.step_s * a.slowed * (1 + a.spread * between(&job.chance, -1, 1)))


cdef int settle(JobState job, int i) except -1:
    """Apply the mean or the correction of a round that is over, before the next gradient."""
    cdef Actor* a = &job.actors[i]
    a.settling = False
    absorb(job, i, a.step - 1)
    if job.local is not None and job.after:
        job.local.after_round(a.process)
        refresh(job, i, a.step - 1)
    if job.means is None:
        a.step -= 1
        offer(job, i, True)
        a.step += 1
    elif job.gossips:
        job.loops[i].pause(False)       # not earlier: the slot must hold the mean without corrections
    if job.after or job.checks:         # in checked jobs also otherwise: recorded seeds depend on these times
        begin_step_later(job, i)
    else:                               # the gradient was computed during the round
        job.again(i, between(&job.chance, 20e-6, 200e-6))
    return 0


cdef int update(JobState job, int i) except -1:
    """Update a model: by `local`, else by a random number that sums of models represent exactly."""
    if job.local is not None:
        job.local.update(job.actors[i].process, job.actors[i].step)
        return 0
    if job.still:
        return 0
    model = job.models[i]
    change = ((draw(&job.chance) & 0xFF) - 127.5) / 256
    before = model.astype(np.float64) if job.checks and job.dtype == FLOAT16 else None
    model += model.dtype.type(change)
    if job.checks:
        job.expected += change if before is None else model - before      # 16 bits round the update
    if job.checks and job.every > 1:
        moved = job.moved.setdefault(job.actors[i].process, {})
        moved[job.actors[i].step] = moved.get(job.actors[i].step - 1, 0.0) + change
    return 0


cdef int begin_round(JobState job, int i) except -1:
    cdef Actor* a = &job.actors[i]
    if (a.step + 1) % job.period or a.step < job.warm_up or (job.means is None and job.tables is None):
        return 0
    if job.local is not None and job.after:
        job.local.before_round(a.process)
    if job.means is not None and job.gossips:
        a.after = BEGIN_MEAN
        begin_rest(job, i)
        return 0
    if job.means is not None:
        begin_mean(job, i)
    else:
        begin_pairs(job, i, (a.step + 1) // job.period - 1)
    go_on(job, i)
    return 0


cdef void go_on(JobState job, int i):
    """After the beginning of a round: wait for it at once, or continue with the step."""
    if job.after:
        wait_for(job, i, WAIT)
    else:
        job.actors[i].doing = STEP
        if job.gossips:                # else the step in which the round began continues
            begin_step_later(job, i)


cdef void begin_pairs(JobState job, int i, int64_t number):
    cdef Actor* a = &job.actors[i]
    cdef int k
    table = job.tables[i]
    row = table[number % len(table)]
    for k in range(2):
        a.round_peers[k] = row[k]
        a.round_met[k] = load(count_of(&a.core.mailbox, MET, a.round_peers[k])) if row[k] >= 0 else 0
    job.loops[i].begin_round(number + 1, row[0])
    a.in_round = True


cdef void begin_mean(JobState job, int i):
    cdef Actor* a = &job.actors[i]
    a.mean = job.loops[i].begin_mean(job.means == "replace")
    a.in_round = True
    job.turn_soon(i)


cdef bint round_over(JobState job, Actor* a):
    cdef int k, peer
    if job.means is not None:
        return load(&a.core.mean.finished) >= a.mean
    for k in range(2):
        peer = a.round_peers[k]
        if peer >= 0 and load(count_of(&a.core.mailbox, MET, peer)) == a.round_met[k] and a.core.membership.states[peer] < LEFT:
            return False
    return True


cdef void leave_job(JobState job, int i, bint broken):
    cdef Core* e = job.actors[i].core
    e.mailbox.given.broken = broken
    e.mailbox.given.leaving = True
    job.turn_at(i, job.net.now_s + between(&job.chance, 0, 1e-3))


cdef void give_up(JobState job, int i):
    """Let a trainer raise an error and leave as failed.

    A mean lacks a peer that left early, or a peer has taken this super learner for failed."""
    cdef Actor* a = &job.actors[i]
    a.gave_up = True
    a.steps = a.step
    a.doing = DONE_STEPS
    a.done_at = job.net.now_s
    leave_job(job, i, True)


_spans = {}


def spans_of(n, count):
    """Return the spans of n chunks, each a whole tensor."""
    if (n, count) not in _spans:
        _spans[n, count] = np.array([[c, 0, c, 0, count] for c in range(n)], np.int64)
    return _spans[n, count]


def addresses_of(model, n):
    """Return the addresses of the n tensors of a model."""
    return model.ctypes.data + np.arange(n, dtype=np.uintp) * np.uintp(model.strides[0])
