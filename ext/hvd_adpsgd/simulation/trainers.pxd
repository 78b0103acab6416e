# Trainers of a simulated job.
from hvd_adpsgd.simulation.state cimport Actor, JobState

cdef int act(JobState job, int i) except -1
cdef void watch(JobState job, int i)
cdef void give_up(JobState job, int i)
