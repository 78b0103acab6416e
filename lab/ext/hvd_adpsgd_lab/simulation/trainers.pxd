# The trainers of a simulated job.
from libc.stdint cimport int64_t

from hvd_adpsgd_lab.simulation.state cimport Actor, JobState

cdef int act(JobState job, int i) except -1
cdef int absorb(JobState job, int i, int64_t step, int every=*) except -1
cdef void refresh(JobState job, int i, int64_t step)
cdef int follow(JobState job, int i) except -1
cdef void begin_rest(JobState job, int i)
cdef void leave_job(JobState job, int i, bint broken)
cdef void watch(JobState job, int i)
cdef void give_up(JobState job, int i)
