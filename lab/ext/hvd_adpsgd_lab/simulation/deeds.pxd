# The events of a small job.
from hvd_adpsgd_lab.simulation.choices cimport Choice
from hvd_adpsgd_lab.simulation.small_job cimport SmallJob

cdef int happen(SmallJob job, Choice* made) except -1
