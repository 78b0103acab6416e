# Admission of a joining super learner in a simulated job: all members switch to new engines, or none does.

from hvd_adpsgd.simulation.state cimport JobState

cdef class Admission:
    cdef int n              # members: processes 0 to n - 1; the joining super learner is process n
    cdef object plan        # see Job.expect
    cdef object model       # see Job.expect
    cdef int number         # rank of the joining super learner among all super learners
    cdef list agreements    # [process]: its Agreement
    cdef list states        # [process]: its Member; None: it has not reached the step of the admission
    cdef object joiner      # state of the joining super learner, a Joiner
    cdef set ready          # processes that have voted to switch to the new engines
    cdef list members       # processes that take part, as decision 0 names them; None: undecided
    cdef dict places        # process -> index of its new engine
    cdef int giver          # the lowest member, which sends the mean to the joining super learner
    cdef object values      # the mean of the members' models
    cdef object gift        # (step, values) that the giver sends
    cdef bint newcomer_lost # the joining process has crashed
    cdef list letters       # [(from, to, kind, content)]; None: lost or read
    cdef dict arrives       # (from, to) -> when the last letter between the two arrives
    cdef dict held          # stopped process -> letters that it has not read yet

cdef void expect_newcomer(JobState job, int number)
cdef int come(JobState job, int i) except -1
cdef int read_letter(JobState job, int which) except -1
cdef void read_held(JobState job, int process)
cdef void lose_letters(JobState job, int process)
cdef void lose_newcomer(JobState job)
cdef void tell_lost(JobState job, int i, int who)
