# Few verbs over MPI (open, post, test, give up; revoke, shrink) and the classification of its errors.
from libc.stdint cimport int64_t
from mpi4py cimport libmpi as mpi

cdef enum:
    TAG_CONTROL = 1
    TAG_DATA = 2          # TAG_DATA + 2 * (exchange mod TAG_SPAN) + side
    TAG_SPAN = 8192

cdef enum Failure:
    FAILURE_NONE = 0
    FAILURE_PEER = 1   # the peer's process has failed: surviving ranks continue
    FAILURE_PENDING = 2   # a wildcard receive reported a failed rank; it stays posted
    FAILURE_FATAL = 3     # MPI itself is unusable
    FAILURE_LAYOUT = 4    # a message was longer than this side expects

cdef struct Transport:
    mpi.MPI_Comm comm
    int rank
    int size

cdef struct Arrival:
    int source
    int nbytes

cdef int transport_open(Transport* t, mpi.MPI_Comm comm) noexcept nogil
cdef int post_receive(Transport* t, void* buffer, int nbytes, int source, int tag,
                      mpi.MPI_Request* request) noexcept nogil
cdef int post_agreement(mpi.MPI_Comm comm, int* flag, mpi.MPI_Request* request) noexcept nogil
cdef void revoke(mpi.MPI_Comm comm) noexcept nogil
cdef int shrink(mpi.MPI_Comm* comm) noexcept nogil
cdef int post_send(Transport* t, const void* buffer, int nbytes, int peer, int tag,
                   mpi.MPI_Request* request) noexcept nogil
cdef int test(mpi.MPI_Request* request, bint* done, Arrival* arrival) noexcept nogil
cdef void give_up(mpi.MPI_Request* request) noexcept nogil
cdef bint let_go(mpi.MPI_Request* request) noexcept nogil
cdef Failure classify(int code) noexcept nogil
cdef int acknowledge_failures(Transport* t, char* failed) noexcept nogil
cdef int data_tag(int exchange, bint upper_asks) noexcept nogil
