# The newcomers of a simulated job, admitted one after the other.

from hvd_adpsgd_lab.simulation.state cimport JobState

cdef enum:
    AWAY = 0                # stages of a member: it has not reached the step of the admission
    RESTS = 1               # its engine is paused; it waits for decision 0
    MAKES = 2               # it waits for its new engine, the giver also for that of the newcomer
    VOTED = 3               # it waits for decision 1
    OVER = 4                # it uses the new engine, or keeps the old one
    WAITS = 5               # stages of the newcomer: no member has asked it to make its engine
    ASKED = 6               # it waits for its engine, and for decision 1
    IN = 7                  # all members use the new engines; it waits for their mean
    TRAINS = 8              # it has the mean
    OUT = 9                 # it has given up

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
