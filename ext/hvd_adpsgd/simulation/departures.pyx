# cython: language_level=3
# Why compiled: it reads the state of the engines.
"""All learn of a departure: within a bound, every engine that stays knows of every one that has left.

What engine/departures.pyx promises. An engine ends when a listener that stays has its departure, or no peer that may be there
has answered in half of the time that is left (`unheard`). Whoever stays and learns of a departure tells its listeners of
it, as soon as they have answered its last message: after an answer and a message, so a hop takes three messages at
most, with the turns of both sides. The first listener is the next engine that is there, so n hops reach all.

So it holds once there is calm for n hops: no engine is stopped, about to leave, or dead without its peers' knowledge, no link
is cut, and none that stays waits for the answer of a listener that has ended. (Such a one is passed over when the wire
reports its end. That several block each other so takes three departures at a time.) With calm the
departure is lost only if all engines that knew of it have crashed, or have left unheard.

A living peer that is taken for failed is told nothing: jobs with suspicions are not checked.
"""

from hvd_adpsgd.engine.membership cimport Listener, Membership, has_departed
from hvd_adpsgd.simulation.network cimport LATE, Rules
from hvd_adpsgd.simulation.state cimport NEVER, Actor, JobState

ALL_LEARN = "invariant (all learn of a departure)"

cdef double BEFORE = 64             # chunks on a link: those of two exchanges that run, and of some that are parked
cdef double TURNS_S = 200e-6        # of both sides of a hop, times the slack: woken, and a few messages before


cdef void departed(JobState job, int who, bint unheard):
    """An engine has ended. `unheard`: it could not know whether a peer has its departure."""
    if unheard:
        job.unheard.add(who)
    job.learned_by = min(job.learned_by, job.net.now_s + spread_s(job))
    disturbed(job, job.net.now_s)


cdef void disturbed(JobState job, double until):
    """There is no calm until then."""
    job.calm_from = max(job.calm_from, until)


cdef double spread_s(JobState job):
    """In which a departure reaches all, in calm."""
    return 3 * job.n * (message_s(job) + TURNS_S * max(job.slack, 1.0))


cdef double message_s(JobState job):
    """That a message takes, at most; in a stream behind the chunks before it."""
    cdef Rules* rules = &job.net.rules
    cdef double late = LATE * ((rules.late > 0) + (rules.late_control > 0))
    cdef double chunks = job.given[0]["lane_nbytes"] * rules.bytes_scale / rules.bytes_per_s
    return rules.latency_s * (1 + rules.jitter + late) + (BEFORE * chunks if job.net.streams != NULL else 0.0)


cdef int check_departures(JobState job) except -1:
    """It is time: has everybody learned?"""
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
    """Whether nobody is stopped or between its departure and its end, or waits for one that has ended."""
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
    """Every engine that stays knows of it, or none does and those that knew could tell nobody."""
    cdef int i, first = job.actors[gone].first
    cdef bint excused = gone in job.unheard
    known, unknown = [], []
    for i in range(first, first + job.actors[gone].size):
        if stays(job, i):
            (known if knows(job, i, gone) else unknown).append(i)
        elif i != gone and knows(job, i, gone):
            excused |= job.actors[i].dead or i in job.unheard
    if unknown and (known or not excused):
        job.fail(ALL_LEARN, f"engine {gone} has left at {job.actors[gone].over_at - 1:.6f} s; of those that stay, "
                 f"{known} know it and {unknown} do not")
    return 0
