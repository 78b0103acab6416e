# The sum of numbers over members of a wire, by a butterfly of messages.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.wire cimport Status, Transfer, Wire

cdef struct Network:
    Wire* wire
    int* members            # ranks on the wire, ascending
    int rank                # of this engine among the members
    int size
    int epoch               # changes when sums are given up or members leave: selects the channels
    int stages              # of the butterfly, with the first and the last one, which fold
    int folded              # members that only send their numbers to a neighbour, and receive the sum from it

cdef struct Sum:            # a sum in flight
    int count
    bint double_precision
    int channel
    int stage
    bint torn               # a peer has sent another number of bytes
    char* total
    char* incoming
    Transfer outgoing
    Transfer arriving

cdef struct Step:           # what a member does in a stage
    int peer             # rank among the members; NOBODY: this member skips the stage
    bint sends
    bint receives
    bint adds               # what is received is added to the sum; else it is the sum

cdef void network_open(Network* n) noexcept nogil
cdef void next_epoch(Network* n) noexcept nogil
cdef Step step_of(Network* n, int stage) noexcept nogil
cdef Status sum_post(Network* n, Sum* s, const void* mine, int count, bint double_precision,
                     int number) noexcept nogil
cdef Status sum_test(Network* n, Sum* s) noexcept nogil
cdef int64_t sum_nbytes_sent(Network* n, int64_t nbytes) noexcept nogil
