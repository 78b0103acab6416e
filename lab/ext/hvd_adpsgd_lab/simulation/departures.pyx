# cython: language_level=3
# Why compiled: it reads the state of the engines.
"""Check that within a bounded time every engine that stays knows of every engine that has left.

This is what engine/departures.pxi promises. An engine ends when a listener that stays has its departure, or
when no peer that may still run has answered within half of the time that it has to leave (`unheard`). An
engine that stays and learns of a departure sends it to each of its listeners, once that listener has answered
the last message: so a hop takes at most three messages, and the turns of both sides. The first listener is
the next running engine, so n hops reach all engines.

The bound holds after n hops of calm: no engine is stopped, about to leave, or dead without its peers'
knowledge, no link is cut, and no engine that stays waits for the answer of a listener that has ended. (The
wire reports the end of such a listener, and the next one is chosen. Several engines can block each other in
this way only if three depart at once.) Then a departure is lost only if all engines that knew of it have
crashed, or have left unheard.

A living peer that is taken for failed is sent no departures, so jobs with suspicions are not checked.
"""

from hvd_adpsgd.engine.membership cimport Listener, Membership, has_departed
from hvd_adpsgd_lab.simulation.network cimport LATE, Rules
from hvd_adpsgd_lab.simulation.state cimport NEVER, Actor, JobState

ALL_LEARN = "invariant (all learn of a departure)"

cdef double BEFORE = 64             # chunks queued on a link, at most: of running and parked exchanges
cdef double TURNS_S = 200e-6        # turns of both sides in a hop, s, to be multiplied by the slack


cdef void departed(JobState job, int who, bint unheard):
    """Record that an engine has left. `unheard`: it could not know whether a peer has its departure."""
    if unheard:
        job.unheard.add(who)
    job.learned_by = min(job.learned_by, job.net.now_s + spread_s(job))
    disturbed(job, job.net.now_s)


cdef void disturbed(JobState job, double until):
    """Record that there is no calm until that time."""
    job.calm_from = max(job.calm_from, until)


cdef double spread_s(JobState job):
    """Return the longest time, in seconds, in which a departure reaches all engines in calm."""
    return 3 * job.n * (message_s(job) + TURNS_S * max(job.slack, 1.0))


cdef double message_s(JobState job):
    """Return the longest time of a message, in seconds; in a stream it waits behind earlier chunks."""
    cdef Rules* rules = &job.net.rules
    cdef double late = LATE * ((rules.late > 0) + (rules.late_control > 0))
    cdef double slowest = rules.bytes_per_s
    cdef int i
    for i in range(job.n):
        slowest = min(slowest, job.net.links[i].bytes_per_s)
    cdef double chunks = job.given[0][0].chunk_nbytes * rules.bytes_scale / slowest
    return rules.latency_s * (1 + rules.jitter + late) + (BEFORE * chunks if job.net.streams != NULL else 0.0)


cdef int check_departures(JobState job) except -1:
    """If there was calm for long enough, check that all engines know all departures; else check later."""
    cdef int i
    if job.calm_from + spread_s(job) > job.net.now_s:
        job.learned_by = job.calm_from + spread_s(job)
        return 0
    if not calm(job):
        job.learned_by = job.net.now_s + spread_s(job)
        return 0
    job.learned_by = NEVER
    if job.suspected:
        return 0
    for i in range(job.n):
        if job.actors[i].over:
            check_known(job, i)
    return 0


cdef bint stays(JobState job, int i) noexcept:
    cdef Actor* a = &job.actors[i]
    return not (a.dead or a.over or a.absent or a.core.membership.departing)


cdef bint knows(JobState job, int i, int gone) noexcept:
    return has_departed(job.actors[i].core.membership.departed, gone - job.actors[gone].first)


cdef bint calm(JobState job) noexcept:
    """Whether no engine is stopped, is leaving, or waits for the answer of a listener that has ended."""
    cdef int i
    for i in range(job.n):
        if job.actors[i].dead or job.actors[i].over or job.actors[i].absent:
            continue
        if job.actors[i].stopped or not stays(job, i) or is_blocked(job, i):
            return False
    return True


cdef bint is_blocked(JobState job, int i) noexcept:
    cdef Membership* m = &job.actors[i].core.membership
    cdef Listener* listener
    cdef int k
    for k in range(m.nlisteners):
        listener = &m.listeners[k]
        if listener.acknowledged < listener.sent and job.actors[job.actors[i].first + listener.peer].over:
            return True
    return False


cdef int check_known(JobState job, int gone) except -1:
    """Check that all engines that stay know a departure, or none if those that knew it cannot send it on."""
    cdef int i, first = job.actors[gone].first
    cdef bint excused = gone in job.unheard
    known, unknown = [], []
    for i in range(first, first + job.actors[gone].size):
        if stays(job, i):
            (known if knows(job, i, gone) else unknown).append(i)
        elif i != gone and knows(job, i, gone):
            excused |= job.actors[i].dead or i in job.unheard
    if unknown and (known or not excused):
        job.fail(ALL_LEARN, f"engine {gone} has left at {job.actors[gone].over_at - 1:.6f} s; of the engines "
                 f"that stay, {known} know that and {unknown} do not")
    return 0
