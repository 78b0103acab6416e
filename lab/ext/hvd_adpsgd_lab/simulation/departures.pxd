# The check that all engines of a simulated job learn of each departure.
from hvd_adpsgd_lab.simulation.state cimport JobState

cdef void departed(JobState job, int who, bint unheard)
cdef void disturbed(JobState job, double until)
cdef double message_s(JobState job)
cdef int check_departures(JobState job) except -1
