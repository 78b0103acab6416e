# The sum over all leaders, by MPI's own all-reduce or by a butterfly of messages.
from libc.stdint cimport int64_t
from mpi4py cimport libmpi as mpi

cdef struct Network:
    mpi.MPI_Comm comm
    int rank
    int size
    bint butterfly
    int stages              # of the butterfly, folding included
    int folded              # learners that only give to a neighbour and take from it

cdef struct Sum:            # one in flight
    int count
    bint double_precision
    int tag
    int stage
    bint torn               # a peer's sum has another length
    char* total
    char* incoming
    mpi.MPI_Request outgoing
    mpi.MPI_Request arriving    # or MPI's own all-reduce

cdef struct Step:           # what a learner does in a stage
    int peer             # NOBODY: nothing
    bint sends
    bint receives
    bint adds               # what it receives; else it takes it as it is

cdef int network_open(Network* n, mpi.MPI_Comm comm, bint butterfly) noexcept nogil
cdef Step step_of(Network* n, int stage) noexcept nogil
cdef int sum_post(Network* n, Sum* s, const void* mine, int count, bint double_precision,
                  int number) noexcept nogil
cdef int sum_test(Network* n, Sum* s, bint* done) noexcept nogil
cdef bint sum_drained(Sum* s) noexcept nogil
cdef int64_t sum_nbytes_sent(Network* n, int64_t nbytes) noexcept nogil
