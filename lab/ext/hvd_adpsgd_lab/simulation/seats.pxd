# Creation of the engines of a simulated job, and of the memory that they work on.
from libc.stdint cimport int64_t

from hvd_adpsgd_lab.simulation.state cimport JobState

cdef struct Make:           # options of an engine, without its schedule and its model
    double weight
    double rate
    bint offered_only
    int dtype
    int wire_type
    int64_t lane_nbytes
    bint in_node            # its super learner has several learners
    double deadline_s
    double leave_deadline_s

cdef int make_engine(JobState job, schedule, model, Make* how, int before=*) except -1
cdef int share_memory(JobState job, int first, int size, int64_t lane_nbytes) except -1
cdef int show_models(JobState job, int first, int size) except -1
