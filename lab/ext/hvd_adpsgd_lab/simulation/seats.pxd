# Creation of the engines of a simulated job, and of the memory that they work on.
from libc.stdint cimport int64_t

from hvd_adpsgd_lab.simulation.state cimport JobState

cdef int make_engine(JobState job, schedule, model, options, bint in_node, int before=*) except -1
cdef int share_memory(JobState job, int first, int size, int64_t lane_nbytes) except -1
