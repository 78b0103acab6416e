# The newcomers of a simulated job, admitted one after the other.

from hvd_adpsgd_lab.simulation.state cimport JobState

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
    cdef dict states        # member -> its Member; None: it has not reached the step of the admission
    cdef object joiner      # state of the joining super learner, a Joiner
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
cdef bint is_in_stage(member, stage)
