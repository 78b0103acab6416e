# What the parts of a simulated job share: engines with their trainers, the calendar, what happened.
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd.engine.loop cimport Rhythm
from hvd_adpsgd.simulation.coverage cimport NMESSAGES, NSTATES
from hvd_adpsgd.simulation.ledger cimport Ledger
from hvd_adpsgd.simulation.network cimport Net, Network

cdef enum Happening:        # kinds of entries beside ARRIVAL
    TURN = 1                # an engine polls; `what` is the number of this turn
    ACT = 2                 # a trainer acts
    STRIKE = 3              # a fault
    REPORT = 4              # `who` learns that the engine `what` has failed
    LETTER = 5              # a process reads a letter about the admission of another one; 6 and 7: streams.pxd

cdef enum Doing:            # what a trainer does next
    STEP = 0
    MEET = 1                # the all-reduce of its super learner is over
    WAIT = 2                # for its round
    REST = 3                # for the engine to come to rest
    DONE_STEPS = 4
    BEGIN_MEAN = 5          # the engine is at rest
    FRESH = 6               # for the snapshots in flight: max_staleness
    COME = 7                # it lets a newcomer in (admission.pyx): its engine is to rest,
    TAKE_IN = 8             # ... which it does; corrections are applied
    AWAIT_ALL = 9           # what all decide

cdef enum:                  # codes of kernels.h
    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 3

cdef double NEVER

cdef struct Actor:
    Core* core
    Rhythm rhythm
    int first               # the engine of rank 0 among its peers
    int size                # engines that are peers
    int process
    bint came               # its trainer has been where a newcomer is let in
    bint absent             # its process has not begun it
    int successor           # the engine with which its trainer goes on; -1: none
    bint dead
    bint over
    bint stopped
    bint act_missed         # while it was stopped
    int64_t turns           # number of the turn that is in the calendar
    double turn_at
    double busy_until       # with chunks
    int64_t step
    int64_t steps
    double step_s
    double slowed           # times step_s
    double spread
    double node_s           # of the all-reduce of its super learner; 0: a learner alone
    int doing
    int after               # what it does when a pause is over
    bint watches            # for its round, or for rest: every turn may be the end of it
    bint pauses             # averaging, before its next step
    bint broken             # it leaves because it has failed
    bint unfit              # the next offer
    int extend_at           # step
    int64_t round_met[2]
    int round_peers[2]
    bint in_round
    bint settling           # the mean is applied before the next update
    int64_t mean            # number of the mean that it waits for, 0: none
    double done_at
    double step_began
    double credit           # as it must be
    int64_t begun           # exchanges
    int64_t decided
    int64_t changes         # of the membership
    double over_at
    double patience         # with old snapshots in flight, until then
    bint overdue            # ... it was longer, or chunks of a silent peer or one that left may come
    bint gave_up            # its trainer has raised


cdef class JobState:
    cdef readonly Network network
    cdef Net* net
    cdef int n                  # engines
    cdef int processes          # one for each super learner, and one for a newcomer
    cdef list seats             # [process]: the engine of its trainer; -1: it has none yet
    cdef int64_t admits_at      # the step before which all let a newcomer in; -1: none
    cdef object admission       # of the newcomer; None: there is none
    cdef uint64_t chance
    cdef Actor* actors
    cdef list loops
    cdef list stores
    cdef list models            # [engine]: chunks x elements
    cdef list areas
    cdef list kept              # memory that engines on one host share
    cdef list given             # [process]: what its engine is made of
    cdef list lives             # [engine]: what others must know to read its model where it lies; None: they do not
    cdef list hosts             # [engine]
    cdef bint shown             # those of one host read each other's models where they lie
    cdef list followers         # [engine]: the store of another learner of its super learner, or None
    cdef list late              # [engine]: what that learner has to apply, and the model that its leader has made of it
    cdef list tables
    cdef int period
    cdef int warm_up
    cdef object means           # None, "replace" or "add"
    cdef bint after
    cdef bint gossips           # pairs beside means
    cdef Ledger ledger
    cdef double slack
    cdef object expected        # sum over engines of what the models would be without exchanges
    cdef list faults
    cdef set suspected          # (engine, peer): its wire reports the peer as failed, which lives
    cdef dict left_at           # (engine, peer) -> when it learned that the peer has left
    cdef dict parked_at         # (engine, peer) -> when it parked its last exchange with it
    cdef dict asked             # (engine, peer) -> number of the last exchange that it asked for, which is over there
    cdef set unheard            # engines that have left without knowing whether a peer has their departure
    cdef double calm_from       # nothing disturbs the news of departures any more
    cdef double learned_by      # when all must know of those that have left; NEVER: nothing is to be checked
    cdef public dict met        # faults x phases that were met
    cdef int64_t coverage[NSTATES * NMESSAGES]
    cdef public int64_t happened
    cdef int living             # engines that are neither dead nor over
    cdef int nchunks
    cdef int later              # chunks added by EXTEND
    cdef int dtype
    cdef double ends
    cdef public double leave_deadline_s
    cdef double detect_s
    cdef bint still
    cdef double look_s
    cdef double chunk_s
    cdef int max_staleness  # 0: none
    cdef double reports_s   # 0: none
    cdef double exchange_share
    cdef bint checks
    cdef public object story    # of a traced job: (seconds, engine, what)
    cdef public object timeline # ... (engine, kind or text, began, ended, numbers)

    cdef void turn_at(self, int i, double at)
    cdef void turn_soon(self, int i)
    cdef void again(self, int i, double seconds)
    cdef int fail(self, promise, what) except -1
    cdef void note(self, what)
    cdef void tell(self, int i, what)
    cdef object wide(self)
    cdef object area_for(self, model, int nslots)
    cdef void add_chunks(self, int rank, int first, int last)
