# cython: language_level=3
# Why compiled: it changes the state of engines and of the network.
"""Faults of a simulated job, and when each engine notices that a process has ended."""

from libc.stdint cimport uintptr_t

from hvd_adpsgd.engine.core cimport LEFT
from hvd_adpsgd_lab.simulation.admission cimport lose_letters, lose_newcomer, read_held, tell_lost
from hvd_adpsgd_lab.simulation.chance cimport between
from hvd_adpsgd_lab.simulation.coverage cimport phase_of
from hvd_adpsgd_lab.simulation.network cimport crash, cut_way, down_of, enter, give_up, last_arrival, report_down
from hvd_adpsgd_lab.simulation.newcomers cimport call_off, expect_newcomer, open_next
from hvd_adpsgd_lab.simulation.state cimport MEET, NEVER, REPORT, STRIKE, Actor, JobState
from hvd_adpsgd_lab.simulation.streams cimport end_connection, redial, shut

cdef double UNKNOWN_S = 5.0         # longest time from the end of an engine to the end of its process
cdef double UNREACHED_S = 2.5       # a peer that has been dialed for longer counts as failed
cdef double FLUSH_S = 0.5           # how long a process still dials connections after its engine has left

cdef enum:
    CRASH = 0
    STOP = 1
    SLOW = 2
    LEAVE = 3
    FAIL = 4
    CUT_LINK = 5
    SEVER = 6
    PARTITION = 7
    PAUSE = 8
    UNFIT = 9
    EXTEND = 10
    SUSPICION = 11
    JOIN = 12
    BREAK = 13
    LINK = 14
    SHARE = 15
    BITS = 16

_NAMES = {
    CRASH: "crash", STOP: "stop", SLOW: "slow", LEAVE: "leave", FAIL: "fail", CUT_LINK: "cut", SEVER: "sever",
    PARTITION: "partition", PAUSE: "pause", UNFIT: "unfit", EXTEND: "extend", SUSPICION: "suspect", JOIN: "join",
    BREAK: "break", LINK: "link", SHARE: "share", BITS: "bits",
}
FAULTS = tuple([_NAMES[kind] for kind in range(len(_NAMES))])


cdef int struck(JobState job, int which) except -1:
    kind, process, arguments = job.faults[which]
    cdef int who = job.seats[process] if kind != JOIN else 0
    cdef Actor* a = &job.actors[who]
    if kind == JOIN:
        expect_newcomer(job, process)
        return 0
    if kind == STOP and not arguments:
        continued(job, process)
        return 0
    if who < 0:                                 # the newcomer has no engine yet
        if kind == CRASH:
            lose_newcomer(job, process)
        return 0
    if a.dead or a.over or (kind == STOP and a.stopped):
        return 0
    job.note(f"{FAULTS[kind]} | {phase_of(a.core)}")
    job.tell(who, f"{FAULTS[kind].upper()} {' '.join(map(str, arguments))}")
    if kind == CRASH:
        crashed(job, process)
    elif kind == STOP:
        stopped(job, process)
        job.faults.append((STOP, process, ()))
        enter(job.net, job.net.now_s + arguments[0], STRIKE, len(job.faults) - 1, NULL)
    elif kind == SLOW:
        a.slowed = arguments[0]
    elif kind == LEAVE or kind == FAIL:
        a.steps = a.step
        a.broken = kind == FAIL
    elif kind in (CUT_LINK, SEVER, PARTITION):
        cut_off(job, kind, process, arguments)
    elif kind == PAUSE:
        a.pauses = job.means is None and job.tables is None
    elif kind == UNFIT:
        a.unfit = True
    elif kind == EXTEND and can_extend(job, who):
        a.extend_at = a.step + (a.doing != MEET)
        a.extend_by = arguments[0]
    elif kind == SUSPICION and job.means is None:
        suspected(job, who, job.seats[arguments[0]])
    elif kind == LINK:
        job.net.links[who].bytes_per_s = arguments[0]
    elif kind == SHARE:
        job.loops[who].move_share(arguments[0])
    elif kind == BITS:
        job.loops[who].use_format(arguments[0])
    elif kind == BREAK:
        break_connections(job, process, arguments[0], arguments[1])
    return 0


cdef bint can_extend(JobState job, int who):
    cdef Actor* a = &job.actors[who]
    return job.means is None and a.extend_at < 0 and a.step < a.steps and a.core.memory.nchunks < job.nchunks + job.later


cdef void break_connections(JobState job, int process, int other, double seconds):
    """End the connections between two processes, which dial again within `seconds`.

    If that takes longer than UNREACHED_S, one takes the other for failed (not in jobs with means)."""
    cdef int i, j
    if seconds > UNREACHED_S and job.means is None:
        job.faults.append((SUSPICION, process, (other,)))
        enter(job.net, job.net.now_s + UNREACHED_S, STRIKE, len(job.faults) - 1, NULL)
    for i in range(job.n):
        for j in range(job.n):
            if are_connected(job, i, j) and (job.actors[i].process, job.actors[j].process) in ((process, other), (other, process)):
                end_connection(job.net, i, j, seconds * between(&job.chance, 0.5, 1))


cdef bint are_connected(JobState job, int i, int j):
    """Whether two engines run, and are peers."""
    cdef Actor* a = &job.actors[i]
    cdef Actor* b = &job.actors[j]
    return i != j and a.first == b.first and not (a.dead or a.over or b.dead or b.over)


cdef void dialed_again(JobState job, int at):
    """Open the connection of stream `at` again, unless an engine is gone, or the peer is taken for failed."""
    cdef int i = at // job.net.n, j = at % job.net.n
    cdef Actor* a = &job.actors[i]
    if (a.dead or (a.over and job.net.now_s > a.over_at + FLUSH_S) or job.actors[j].dead or job.actors[j].over
            or down_of(&job.net.links[i], j - a.first) != NULL):
        return
    redial(job.net, at)


cdef void suspected(JobState job, int who, int peer):
    """Let an engine's wire take a living peer for failed and close the connection; the peer notices that."""
    if peer < 0 or job.actors[peer].dead or job.actors[peer].over or job.actors[peer].first != job.actors[who].first:
        return
    job.suspected |= {(who, peer), (peer, who)}
    notice(job, who, peer)
    enter(job.net, job.net.now_s + between(&job.chance, 0, job.detect_s), REPORT, peer, <void*><uintptr_t>who)


cdef void cut_off(JobState job, int kind, int who, arguments):
    """Delay messages between some processes until the end of a fault: cut, sever or partition."""
    cdef double until = job.net.now_s + arguments[1]
    cdef int i, j
    if kind == PARTITION:
        ours = {who, *arguments[0]}
        ways = [(i, j) for i in range(job.processes) for j in range(job.processes) if (i in ours) != (j in ours)]
    elif kind == SEVER:
        ways = [(who, arguments[0]), (arguments[0], who)]
    else:
        ways = [(who, arguments[0])]
    for i, j in ways:
        cut_way(job.net, i, j, until)


cdef void stopped(JobState job, int process):
    """Stop a process with all of its engines: an engine that its trainer no longer uses may still run."""
    cdef int i
    for i in range(job.n):
        if job.actors[i].process == process:
            job.actors[i].stopped = True
            job.actors[i].turn_at = NEVER
    call_off(job)


cdef void continued(JobState job, int process):
    cdef int i, who = job.seats[process]
    if not job.actors[who].stopped:
        return
    job.tell(who, "continues")
    for i in range(job.n):
        if job.actors[i].process == process:
            job.actors[i].stopped = False
            job.turn_soon(i)
    if job.actors[who].act_missed:
        job.actors[who].act_missed = False
        job.again(who, 0)
    read_held(job, process)
    open_next(job)


cdef int crashed(JobState job, int process) except -1:
    cdef int i
    cdef Actor* a
    for i in range(job.n):
        a = &job.actors[i]
        if a.process == process and not a.dead and not a.over:
            a.dead = True
            job.living -= not a.absent
            crash(job.net, i)
            report(job, i)
    lose_letters(job, process)
    return 0


cdef void report(JobState job, int who):
    """Schedule when each peer notices the end of an engine's process.

    The times are random; if the process ends in order, after its last messages have arrived."""
    cdef int i
    cdef double at
    cdef int first = job.actors[who].first
    for i in range(first, first + job.actors[who].size):
        if i != who and not job.actors[i].dead:
            at = job.net.now_s + between(&job.chance, 0, job.detect_s)
            if not job.actors[who].dead:
                at = max(at, last_arrival(job.net, who, i))
            enter(job.net, at, REPORT, i, <void*><uintptr_t>who)


cdef void notice(JobState job, int i, int who):
    """Let engine i notice that the process of engine `who` has ended.

    A process that ends in order waits until its departure is known (lifecycle/shutdown), at most UNKNOWN_S:
    then engine i notices its end later."""
    cdef Actor* a = &job.actors[who]
    if (not a.dead and not job.actors[i].over and job.actors[i].core.membership.states[who - a.first] < LEFT
            and job.net.now_s < a.over_at + UNKNOWN_S and (i, who) not in job.suspected):
        enter(job.net, job.net.now_s + job.detect_s, REPORT, i, <void*><uintptr_t>who)
        return
    report_down(job.net, i, who)
    if job.net.streams != NULL:
        shut(job.net, i, who)
    if a.dead or a.over:
        tell_lost(job, i, who)
    if (i, who) in job.suspected:
        give_up(job.net, i, who)
    job.turn_at(i, job.net.now_s + between(&job.chance, 0, 1e-3))
