# The events of a small job.
from hvd_adpsgd.simulation.choices cimport Choice
from hvd_adpsgd.simulation.small_job cimport SmallJob

cdef int happen(SmallJob job, Choice* made) except -1
