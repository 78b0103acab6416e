# Checks of the promises and invariants of a simulated job.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd_lab.simulation.ledger cimport Ledger
from hvd_adpsgd_lab.simulation.state cimport JobState

cdef object wrong_exchanges(int i, Core* e)
cdef object wrong_sets(int i, Core* e)
cdef object wrong_leave(int i, int first, Core* e, double now_s, bint known, Ledger ledger)
cdef int64_t take_credit(Core* e, int64_t* begun, double* credit) noexcept
cdef int check_turn(JobState job, int i) except -1
cdef int check_over(JobState job, int i) except -1
cdef int check_end(JobState job) except -1
cdef int check_replaced(JobState job, int i, int n) except -1
cdef int check_versions(JobState job, int i, before) except -1
cdef object versions_of(JobState job, int i)
cdef int check_all_or_none(JobState job, members, int first) except -1
cdef int check_joined(JobState job, members, values) except -1
cdef int check_moved(JobState job, int i) except -1
cdef int add_model(JobState job, int i, total) except -1
