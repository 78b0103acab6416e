# The newest status report of each super learner that has reached this engine.
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.membership cimport Membership
from hvd_adpsgd.engine.mailbox cimport Mailbox

cdef enum:
    REPORT_NBYTES = 200     # longest text of a report
    REPORTS = 16            # reports in one message, at most

cdef struct Report:
    int64_t version         # counts the reports that its super learner has made; 0: none
    int rank
    int nbytes
    char text[REPORT_NBYTES]

cdef struct Known:          # the newest report of a super learner, in a list: last received first
    Report report
    double heard            # when it was received
    Known* newer
    Known* older

cdef struct Reports:
    int own
    int size
    Known* known            # by rank; NULL: this engine sends no reports and stores none
    Known* newest           # first of the list
    double every_s          # seconds between two messages
    double next_at          # when the next message is due
    uint64_t chance         # state of the random generator that chooses peers

cdef bint open_reports(Reports* r, int own, int size, double every_s) noexcept
cdef void close_reports(Reports* r) noexcept
cdef bint note_report(Reports* r, Mailbox* p, Report* told, double heard) noexcept nogil
cdef int gather_reports(Reports* r, Mailbox* p, Report* into) noexcept nogil
cdef int choose_listener(Reports* r, Membership* m) noexcept nogil
