# A newcomer is let in: all go over to new engines, or none does.

from hvd_adpsgd.simulation.state cimport JobState

cdef class Admission:
    cdef int n              # members: processes 0 to n - 1; the newcomer is process n
    cdef object plan
    cdef int number         # of the newcomer among super learners
    cdef list agreements    # [process]
    cdef list states        # [process]: its Member; None: it has not come
    cdef object joiner      # the newcomer's Joiner
    cdef set ready          # processes that have voted to go over
    cdef list members       # processes that have come, as all have decided; None: not yet
    cdef dict places        # process -> its new engine
    cdef int giver
    cdef object values      # the mean of the members' models
    cdef object gift        # step, values
    cdef bint newcomer_lost
    cdef list letters       # (from, to, kind, content), None: lost or read
    cdef dict arrives       # (from, to) -> when the last letter does
    cdef dict held          # process that is stopped -> letters that have arrived

cdef void expect_newcomer(JobState job, int number)
cdef int come(JobState job, int i) except -1
cdef int read_letter(JobState job, int which) except -1
cdef void read_held(JobState job, int process)
cdef void lose_letters(JobState job, int process)
cdef void lose_newcomer(JobState job)
cdef void tell_lost(JobState job, int i, int who)
