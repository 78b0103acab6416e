# A digest of the state of a small job.
from libc.stdint cimport uint64_t

from hvd_adpsgd_lab.simulation.small_job cimport SmallJob

cdef uint64_t digest_job(SmallJob job) noexcept
