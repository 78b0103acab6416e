# The state of a simulated job that its modules share: engines with their trainers, and a record of the run.
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd.engine.loop cimport Rhythm
from hvd_adpsgd_lab.simulation.coverage cimport NMESSAGES, NSTATES
from hvd_adpsgd_lab.simulation.ledger cimport Ledger
from hvd_adpsgd_lab.simulation.network cimport Net, Network

cdef enum Happening:        # kinds of calendar entries, besides ARRIVAL
    TURN = 1                # an engine takes a turn; `what` is the number of the turn
    ACT = 2                 # a trainer acts
    STRIKE = 3              # a fault happens
    REPORT = 4              # the wire of `who` notices that the engine `what` has failed
    LETTER = 5              # a process reads a letter about an admission; 6 and 7: streams.pxd

cdef enum Doing:            # what a trainer does next
    STEP = 0                # begin a step
    MEET = 1                # end the step: the all-reduce of its super learner is over
    WAIT = 2                # wait for its round
    REST = 3                # wait until the engine has paused
    DONE_STEPS = 4          # nothing: all steps are done
    BEGIN_MEAN = 5          # begin a mean: the engine has paused
    FRESH = 6               # wait for snapshots in flight, because of max_staleness
    COME = 7                # pause the engine for the admission of a joining super learner (admission.pyx)
    TAKE_IN = 8             # apply the corrections: the engine has paused
    AWAIT_ALL = 9           # wait for the decisions of the admission

cdef enum:                  # codes of kernels.h
    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 3

cdef double NEVER

cdef struct Actor:          # an engine with its trainer
    Core* core
    Rhythm rhythm
    int first               # index of the engine of rank 0 among its peers
    int size                # engines in its group, itself included
    int process
    bint came               # its trainer has reached the step at which a super learner is admitted
    bint absent             # its process has not yet started this engine
    int successor           # the engine with which its trainer continues; -1: none
    bint dead               # it has crashed
    bint over               # it has left
    bint stopped            # its process is stopped
    bint act_missed         # its trainer was to act while the process was stopped
    int64_t turns           # number of the turn that is in the calendar
    double turn_at          # when that turn is
    double busy_until       # until when the engine works on chunks
    int64_t step            # the step of its trainer
    int64_t steps           # steps that its trainer is to do
    double step_s           # seconds of a step
    double slowed           # factor of step_s
    double spread           # largest random deviation of step_s, as a fraction of it
    double node_s           # seconds of the all-reduce in its super learner; 0: a single learner
    int doing               # what the trainer does next, a Doing
    int after               # what the trainer does after REST
    bint watches            # the trainer waits (WAIT, REST, FRESH) and checks after every turn
    bint pauses             # the trainer pauses averaging before its next step
    bint broken             # the super learner leaves because it has failed
    bint unfit              # the next model offered is not finite
    int64_t meets_at        # the step before which it comes to the admission, where each has its own
    int extend_at           # step at which chunks are added; -1: none
    int extend_by           # how many, each as a parameter group; 0: all, as one group
    int64_t round_met[2]    # exchanges finished with the peers of the round when it began
    int round_peers[2]      # peers of the round; -1: none
    bint in_round
    bint settling           # the mean or correction of the round is applied before the next update
    int64_t mean            # number of the mean that the trainer waits for; 0: none
    double done_at          # when the trainer had done its steps
    double step_began
    double credit           # the credit that the engine must have
    int64_t begun           # exchanges that have begun
    int64_t decided         # decisions that were checked
    int64_t changes         # changes of the membership that were checked
    double over_at          # when the engine left
    double patience         # until when the trainer waits for old snapshots in flight
    bint overdue            # the trainer no longer waits for old chunks, so max_staleness is not checked
    bint gave_up            # the trainer has raised an error


cdef class JobState:
    cdef readonly Network network
    cdef Net* net
    cdef int n                  # engines
    cdef int processes          # one for each super learner, those that may join included
    cdef list seats             # [process]: the engine that its trainer uses; -1: none yet
    cdef int64_t admits_at      # the step before which a super learner is admitted; -1: none
    cdef bint own_steps         # see Job.expect
    cdef object newcomers       # the super learners that may join, a Newcomers; None: none joins
    cdef object admission       # the newest Admission of one of them
    cdef int admissions         # its number, from 0 on
    cdef uint64_t chance        # state of the random generator
    cdef Actor* actors
    cdef list loops
    cdef list stores
    cdef list models            # [engine]: array (chunks, elements) of its parameters
    cdef list areas             # [engine]: mirror, slots, and what the slots hold
    cdef list kept              # memory that engines on one host share, kept alive
    cdef list given             # [process]: its EngineOptions, and whether its super learner has several learners
    cdef list lives             # [engine]: the Live of each chunk, with which peers read its model; or None
    cdef list hosts             # [engine]: number of its host; None: no engines share memory
    cdef list followers         # [engine]: the store of another learner of its super learner, or None
    cdef list late              # [engine]: the slot that this learner is to apply, and its leader's result
    cdef list tables            # see Job
    cdef int period             # steps from round to round
    cdef int warm_up            # steps without rounds
    cdef object means           # None, "replace" or "add": see Job
    cdef bint after             # see Job
    cdef bint gossips           # there are pairwise exchanges besides means
    cdef Ledger ledger
    cdef double slack           # see Job
    cdef object expected        # by chunk: what the sum over all models would be without exchanges
    cdef list faults            # [(kind, process, arguments)]
    cdef set suspected          # (engine, peer): the engine's wire takes the living peer for failed
    cdef dict left_at           # (engine, peer) -> when the engine learned that the peer has left
    cdef dict parked_at         # (engine, peer) -> when the engine last parked an exchange with the peer
    cdef dict asked             # (engine, peer) -> number of the engine's last active exchange that is over
    cdef public dict met        # counts faults, by kind and by what the engine was doing
    cdef int64_t coverage[NSTATES * NMESSAGES]
    cdef public int64_t happened    # events so far
    cdef readonly int living    # engines that have neither crashed nor left
    cdef int nchunks
    cdef int later              # chunks that the fault EXTEND adds
    cdef int dtype
    cdef double ends            # virtual time at which the run ends
    cdef public double leave_deadline_s
    cdef double detect_s        # see Job
    cdef bint still
    cdef object local           # see Job
    cdef public bint halted     # `run_for` returns before the next event
    cdef double look_s
    cdef double chunk_s
    cdef object config          # the options of training, a Config
    cdef int every              # steps between two copies of a chunk without a correction to the mirror
    cdef dict moved             # [process]: by step, the sum of its updates so far, for checks of the mirror
    cdef set rare               # numbers of the chunks that are in every `rare_period`th exchange only
    cdef int rare_period
    cdef public object steer    # called with (job, engine) after each offer, to change its share; or None
    cdef bint checks
    cdef public object story    # of a traced job: [(seconds, process, event)]
    cdef public object timeline # of a traced job: [(process, kind or text, began, ended, numbers)]

    cdef void turn_at(self, int i, double at)
    cdef void turn_soon(self, int i)
    cdef void again(self, int i, double seconds)
    cdef int fail(self, promise, what) except -1
    cdef void note(self, what)
    cdef void tell(self, int i, what)
    cdef object wide(self)
    cdef object area_for(self, model, int nslots)
    cdef void add_chunks(self, int rank, int first, int last)
    cdef int lay_out(self, loop, int nchunks, uint64_t fingerprint) except -1
