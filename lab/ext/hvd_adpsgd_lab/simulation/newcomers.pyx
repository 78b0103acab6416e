# cython: language_level=3
# Why compiled: it reads and frees engines through their C structs.
"""The newcomers of a simulated job, which are admitted one after the other, as in a real job.

A newcomer is a joining super learner. Each has an Admission, the record that admission.pyx works on; the next
one begins when it is over on all its processes.
"""

from hvd_adpsgd.engine.agreement import Agreement

from hvd_adpsgd.engine.mailbox cimport HISTOGRAM, Counters
from hvd_adpsgd_lab.simulation.network cimport down_of, open_transfers
from hvd_adpsgd_lab.simulation.promises cimport check_all_or_none
from hvd_adpsgd_lab.simulation.state cimport Actor, JobState


cdef class Newcomers:
    """The super learners that may join a job, and what stays from one admission to the next; see Job.expect."""

    def __cinit__(self, int n, int most, plan, model):
        self.n = self.size = n
        self.most, self.plan, self.model = most, plan, model
        self.ranks, self.waiting, self.left = [*range(n)], [], []


cdef class Admission:
    """The admission of one newcomer.

    Args:
        order: the members, which are processes; members know each other by their place in it.
        newcomer: the process that joins.
    """

    def __cinit__(self, list order, int newcomer):
        self.order, self.newcomer, self.number = order, newcomer, -1
        self.place_of = {p: i for i, p in enumerate(order)}
        self.agreements = {p: Agreement(len(order), i) for i, p in enumerate(order)}
        self.states = dict.fromkeys(order, AWAY)
        self.joiner = AWAY
        self.ready = set()
        self.first = -1
        self.places, self.arrives, self.held, self.letters = {}, {}, {}, []

    def group(self):
        """Return the members, and the lowest index of their new engines; -1 if none is made."""
        return self.order, self.first


cdef void expect_newcomer(JobState job, int number):
    """Let a newcomer with rank `number` join, after those that wait already."""
    cdef Newcomers them = job.newcomers
    if them is None or job.later:
        return
    them.waiting.append(number)
    open_next(job)


cdef void open_next(JobState job):
    """Begin the admission of the newcomer that has waited longest, unless one is under way."""
    cdef Newcomers them = job.newcomers
    cdef Admission m = job.admission
    while them is not None and them.waiting and (m.number < 0 or is_settled(job)) and can_meet(job):
        if m.number >= 0:
            if not renew(job):
                return
            m = job.admission
        begin_admission(job, them.waiting.pop(0))


cdef bint can_meet(JobState job):
    """Whether members meet now; those that come before the same step meet also while one is stopped."""
    cdef int i
    return not job.own_steps or not any([job.actors[i].stopped and runs(job, i) for i in job.seats if i >= 0])


cdef void call_off(JobState job):
    """Call off the admission to come if a member has stopped before any has come; see `can_meet`."""
    cdef Newcomers them = job.newcomers
    cdef Admission m = job.admission
    if them is None or m.number < 0 or can_meet(job):
        return
    if any([job.actors[job.seats[p]].came and runs(job, job.seats[p]) for p in m.order]):
        return
    them.waiting.insert(0, m.number)
    m.number = job.admits_at = -1


cdef bint is_settled(JobState job):
    """Whether the admission is over on all its processes."""
    cdef Admission m = job.admission
    cdef int at = job.seats[m.newcomer]
    for p in m.order:
        if runs(job, job.seats[p]) and m.states[p] != OVER:
            return False
    return (at < 0 or not runs(job, at) or m.joiner == TRAINS
            or (m.joiner == OUT and job.actors[at].absent))


cdef bint renew(JobState job) except -1:
    """Replace an admission that is over by one for the next newcomer; return False if none may come."""
    cdef Newcomers them = job.newcomers
    cdef Admission m = job.admission
    cdef int newcomer = m.newcomer + 1, first
    if job.checks:
        check_all_or_none(job, m.order, m.first)
    else:
        free_engines(job)
    first = engines_in_use(job)
    order = [p for p in range(newcomer) if job.seats[p] >= 0 and job.actors[job.seats[p]].first == first]
    if not order:
        return False
    here = [p for p in order if runs(job, job.seats[p])]
    if newcomer >= them.n + them.most or job.n + len(here) + 1 > job.net.n:
        job.note("join | there is no room")
        return False
    job.admission = Admission(order, newcomer)
    job.admissions += 1
    job.admits_at = -1
    for p in order:
        job.actors[job.seats[p]].came = False
    know_the_failed(job)
    return True


cdef int engines_in_use(JobState job) except -2:
    """Return the lowest index of the engines that the admission has left in use; -1 if all have failed."""
    cdef Admission m = job.admission
    cdef int i
    stay = [job.seats[p] for p in m.order if m.states[p] == OVER]
    if m.joiner == TRAINS:
        stay.append(job.seats[m.newcomer])
    return next((job.actors[i].first for i in stay if not job.actors[i].dead), -1)


cdef void know_the_failed(JobState job):
    """Let each member begin with the losses of other members that its wire has reported before."""
    cdef Admission m = job.admission
    cdef int i, j
    for p in m.order:
        i = job.seats[p]
        for q in m.order:
            j = job.seats[q]
            if i != j and not runs(job, j) and down_of(&job.net.links[i], j - job.actors[i].first) != NULL:
                m.agreements[p].failed(m.place_of[q])


cdef bint runs(JobState job, int i):
    return not job.actors[i].dead and not job.actors[i].over


cdef void free_engines(JobState job):
    """Free engines that have left, as all their peers; their counts are added to those of their successors.

    Without this, long jobs with many admissions need memory without bound.
    """
    cdef Newcomers them = job.newcomers
    cdef int i, process
    still, at_work = [], set()
    for i, _ in them.left:
        if runs(job, i):
            at_work.add(job.actors[i].first)
    for i, process in them.left:
        if job.actors[i].first not in at_work and open_transfers(job.net, i) == 0:
            if job.actors[i].dead:
                continue
            add_counts(&job.actors[i].core.mailbox.counters, &job.actors[job.seats[process]].core.mailbox.counters)
            job.actors[i].core = NULL
            job.loops[i] = job.models[i] = job.stores[i] = job.areas[i] = job.followers[i] = None
        else:
            still.append((i, process))
    them.left = still


cdef void add_counts(Counters* old, Counters* new):
    cdef int k
    new.exchanges_active += old.exchanges_active
    new.exchanges_passive += old.exchanges_passive
    new.chunks += old.chunks
    new.parked += old.parked
    new.broken += old.broken
    new.void_chunks += old.void_chunks
    new.means += old.means
    new.turns += old.turns
    for k in range(HISTOGRAM):
        new.staleness[k] += old.staleness[k]


cdef void begin_admission(JobState job, int number):
    """Schedule the admission of a newcomer with rank `number`.

    It takes place two steps after the step of the foremost member, or, with `own_steps`, before the next step of
    each, if all living members have so many steps left.
    """
    cdef Admission m = job.admission
    cdef Newcomers them = job.newcomers
    seats = [job.seats[p] for p in m.order]
    living = [i for i in seats if runs(job, i)]
    at = max([job.actors[i].step for i in living], default=0) + 2
    taken = any(them.ranks[p] == number and runs(job, job.seats[p]) for p in m.order)
    if taken or any(job.actors[i].steps <= at for i in living):
        job.note("join | it does not come")
        if job.local is not None:
            job.local.stays_out(number)
        return
    m.number = number
    job.admits_at = at
    for i in living:
        job.actors[i].meets_at = job.actors[i].step + 1

