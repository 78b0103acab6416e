# The sum over members of a wire: a butterfly of messages, or the wire's own.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.wire cimport Status, Transfer, Wire

cdef struct Network:
    Wire* wire
    int* members            # ranks on the wire, ascending
    int rank                # of this engine among the members
    int size
    bint butterfly          # else the wire's own sum
    int epoch               # which members these are: sums of an earlier epoch are another sum
    int stages              # of the butterfly, folding included
    int folded              # learners that only give to a neighbour and take from it

cdef struct Sum:            # one in flight
    int count
    bint double_precision
    int channel
    int stage
    bint torn               # a peer's sum has another length
    char* total
    char* incoming
    Transfer outgoing
    Transfer arriving       # or the wire's own sum

cdef struct Step:           # what a learner does in a stage
    int peer             # NOBODY: nothing
    bint sends
    bint receives
    bint adds               # what it receives; else it takes it as it is

cdef void network_open(Network* n) noexcept nogil
cdef Step step_of(Network* n, int stage) noexcept nogil
cdef Status sum_post(Network* n, Sum* s, const void* mine, int count, bint double_precision,
                     int number) noexcept nogil
cdef Status sum_test(Network* n, Sum* s) noexcept nogil
cdef int64_t sum_nbytes_sent(Network* n, int64_t nbytes) noexcept nogil
