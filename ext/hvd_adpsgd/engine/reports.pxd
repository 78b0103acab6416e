# What super learners say of themselves, as far as this engine has heard.
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.membership cimport Membership
from hvd_adpsgd.engine.mailbox cimport Mailbox

cdef enum:
    REPORT_NBYTES = 200     # of a report's text
    REPORTS = 16            # in one message

cdef struct Report:
    int64_t version         # counts the reports of its super learner; 0: none
    int rank
    int nbytes
    char text[REPORT_NBYTES]

cdef struct Known:          # the newest report of one super learner, in a list: those heard last come first
    Report report
    double heard
    Known* newer
    Known* older

cdef struct Reports:
    int own
    int size
    Known* known            # by rank; NULL: this engine takes no part
    Known* newest
    double every_s
    double next_at
    uint64_t chance

cdef bint open_reports(Reports* r, int own, int size, double every_s) noexcept
cdef void close_reports(Reports* r) noexcept
cdef bint note_report(Reports* r, Mailbox* p, Report* told, double heard) noexcept nogil
cdef int gather_reports(Reports* r, Mailbox* p, Report* into) noexcept nogil
cdef int choose_listener(Reports* r, Membership* m) noexcept nogil
