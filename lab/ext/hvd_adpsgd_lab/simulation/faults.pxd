# Faults of a simulated job, and when engines notice that a process has ended.
from hvd_adpsgd_lab.simulation.state cimport JobState

cdef int struck(JobState job, int which) except -1
cdef void report(JobState job, int who)
cdef void dialed_again(JobState job, int at)
cdef void notice(JobState job, int i, int who)
