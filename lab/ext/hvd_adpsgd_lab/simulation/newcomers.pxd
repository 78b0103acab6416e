# The newcomers of a simulated job, admitted one after the other.

from hvd_adpsgd_lab.simulation.state cimport JobState

cdef enum:
    AWAY = 0                # stages of an admission: a member has not come to its step, none has asked the newcomer
    RESTS = 1               # a member: its engine is paused; it waits for decision 0
    MAKES = 2               # waits for its new engine (the giver also for the newcomer's; that also for decision 1)
    VOTED = 3               # a member: it waits for decision 1
    OVER = 4                # a member: it uses the new engine, or keeps the old one
    IN = 5                  # the newcomer: all members use the new engines; it waits for their mean
    TRAINS = 6              # the newcomer: it has the mean
    OUT = 7                 # the newcomer: it has given up

cdef class Newcomers:
    cdef int n              # super learners when the job begins: processes 0 to n - 1
    cdef int most           # newcomers at most: processes n, n + 1, ..., in the order in which they join
    cdef int size           # super learners that the job is planned for, failed ones included
    cdef object plan        # see Job.expect
    cdef object model       # see Job.expect
    cdef list ranks         # [process]: its rank among the super learners
    cdef list waiting       # ranks with which newcomers wait to be admitted
    cdef list left          # (engine, process) of engines that their trainers do not use any more

cdef class Admission:
    cdef list order         # members, by their place in the agreement
    cdef dict place_of      # member -> its place
    cdef int newcomer       # the process that joins
    cdef int number         # its rank among all super learners; -1: it has not come
    cdef dict agreements    # member -> its Agreement
    cdef dict states        # member -> its stage
    cdef int joiner         # the newcomer's stage
    cdef set ready          # processes that have voted to switch to the new engines
    cdef list members       # processes that take part, as decision 0 names them; None: undecided
    cdef dict places        # process -> index of its new engine
    cdef int first          # the lowest of these indices; -1: none is made yet
    cdef int giver          # the lowest member, which sends the mean to the joining super learner
    cdef object values      # the mean of the members' models
    cdef object gift        # (step, values) that the giver sends
    cdef bint newcomer_lost # the joining process has crashed
    cdef list letters       # [(from, to, kind, content)]; None: lost or read
    cdef dict arrives       # (from, to) -> when the last letter between the two arrives
    cdef dict held          # stopped process -> letters that it has not read yet

cdef void expect_newcomer(JobState job, int number)
cdef void open_next(JobState job)
cdef void call_off(JobState job)
