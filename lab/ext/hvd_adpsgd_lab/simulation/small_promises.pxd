# Checks of the promises and invariants of a small job.
from hvd_adpsgd_lab.simulation.small_job cimport SmallJob

cdef int check_state(SmallJob job) except -1
cdef int check_over(SmallJob job, int i) except -1
cdef int check_end(SmallJob job) except -1
