# Admission of a joining super learner in a simulated job: all members switch to new engines, or none does.

from hvd_adpsgd_lab.simulation.state cimport JobState

cdef int come(JobState job, int i) except -1
cdef int read_letter(JobState job, int admission, int which) except -1
cdef void read_held(JobState job, int process)
cdef void lose_letters(JobState job, int process)
cdef void lose_newcomer(JobState job, int process)
cdef void tell_lost(JobState job, int i, int who)
