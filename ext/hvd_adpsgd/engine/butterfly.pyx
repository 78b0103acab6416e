# cython: language_level=3
# Why compiled: the engine's thread sums without the GIL.
"""The sum of all ranks' numbers over a communicator, in one of two ways.

MPI's own non-blocking all-reduce, or a butterfly of pairwise exchanges (recursive doubling):

    rank       0     1     2     3
    stage 1    0+1   0+1   2+3   2+3        peer: rank XOR 1
    stage 2    all   all   all   all        peer: rank XOR 2

log2 n stages for n a power of two. Otherwise n - p ranks, p the largest power of two up to n, first send
their numbers to a neighbour and receive the sum from it in the end: two stages more. Both peers add the
same two numbers, and floating-point addition commutes, so all ranks have the same bits.

Source: Su and Chen, arXiv:1507.01239 (the butterfly); Thakur, Rabenseifner and Gropp, IJHPCA 2005
    (recursive doubling, and folding for other n).
"""

from libc.math cimport NAN
from libc.string cimport memcpy
from mpi4py cimport libmpi as mpi

from hvd_adpsgd.engine.transport cimport FAILURE_LAYOUT, Arrival, classify, test

cdef enum:
    NOBODY = -1
    STAGES = 64             # tags of one sum
    NUMBERS = 256           # sums with tags of their own; far more than are in flight at once


cdef int network_open(Network* n, mpi.MPI_Comm comm, bint butterfly) noexcept nogil:
    """Sum over `comm`, whose errors must be returned. Returns an MPI code."""
    cdef int power = 1, code
    n.comm = comm
    n.butterfly = butterfly
    n.stages = 2
    code = mpi.MPI_Comm_rank(comm, &n.rank)
    if code == mpi.MPI_SUCCESS:
        code = mpi.MPI_Comm_size(comm, &n.size)
    if code != mpi.MPI_SUCCESS:
        return code
    while 2 * power <= n.size:
        power *= 2
        n.stages += 1
    n.folded = n.size - power
    return mpi.MPI_SUCCESS


cdef Step step_of(Network* n, int stage) noexcept nogil:
    """What this rank does in a stage: 0 folds, the last unfolds, those between are the butterfly.

    Of the first 2 * folded ranks every even one folds into the next."""
    cdef Step step
    cdef bint paired = n.rank < 2 * n.folded, gives = n.rank % 2 == 0
    cdef bint last = stage == n.stages - 1
    cdef int place
    step.peer = NOBODY
    if stage == 0 or last:
        if paired:
            step.peer = n.rank + 1 if gives else n.rank - 1
        step.sends = gives != last
        step.receives = not step.sends
        step.adds = not last
        return step
    step.sends = step.receives = step.adds = True
    if not (paired and gives):
        place = n.rank // 2 if paired else n.rank - n.folded
        place ^= 1 << (stage - 1)
        step.peer = 2 * place + 1 if place < n.folded else place + n.folded
    return step


cdef int sum_post(Network* n, Sum* s, const void* mine, int count, bint double_precision,
                  int number) noexcept nogil:
    """s.total = the sum of all ranks' `mine`; all post their sums in the same order.

    s.total and s.incoming have room for `count` numbers. If a peer's sum has another length, the last
    number becomes NaN on all ranks. Returns an MPI code."""
    s.outgoing = mpi.MPI_REQUEST_NULL
    s.arriving = mpi.MPI_REQUEST_NULL
    s.count = count
    s.double_precision = double_precision
    if not n.butterfly:
        return mpi.MPI_Iallreduce(<void*>mine, s.total, count, kind(s), mpi.MPI_SUM, n.comm,
                                  &s.arriving)
    s.tag = (number % NUMBERS) * STAGES
    s.stage = -1
    s.torn = False
    memcpy(s.total, mine, nbytes(s))
    return enter_next(n, s)


cdef int sum_test(Network* n, Sum* s, bint* done) noexcept nogil:
    """Test once. Returns an MPI code; after an error the sum must be drained."""
    cdef int code = mpi.MPI_SUCCESS
    done[0] = False
    if not n.butterfly:
        return test(&s.arriving, done, NULL)
    while s.stage < n.stages:
        if not stage_over(s, &code):
            return code
        combine(n, s)
        code = enter_next(n, s)
        if code != mpi.MPI_SUCCESS:
            return code
    done[0] = True
    return code


cdef bint sum_drained(Sum* s) noexcept nogil:
    """After a failure: whether MPI no longer uses the buffers."""
    cdef bint sent = True, received = True
    if s.outgoing != mpi.MPI_REQUEST_NULL:
        test(&s.outgoing, &sent, NULL)
    if s.arriving != mpi.MPI_REQUEST_NULL:
        test(&s.arriving, &received, NULL)
    return sent and received


cdef int64_t sum_nbytes_sent(Network* n, int64_t nbytes) noexcept nogil:
    """Bytes that this rank sends for `nbytes` of numbers; for MPI's own all-reduce, taken as `nbytes`."""
    cdef int stage
    cdef int64_t sent = 0
    cdef Step step
    if not n.butterfly:
        return nbytes
    for stage in range(n.stages):
        step = step_of(n, stage)
        if step.peer != NOBODY and step.sends:
            sent += nbytes
    return sent


# ---- a stage -------------------------------------------------------------------------------

cdef int enter_next(Network* n, Sum* s) noexcept nogil:
    """Post the messages of the next stage in which this rank takes part."""
    cdef Step step
    s.stage += 1
    while s.stage < n.stages:
        step = step_of(n, s.stage)
        if step.peer != NOBODY:
            return post_step(n, s, step)
        s.stage += 1
    return mpi.MPI_SUCCESS


cdef int post_step(Network* n, Sum* s, Step step) noexcept nogil:
    cdef int code = mpi.MPI_SUCCESS
    if step.receives:
        code = mpi.MPI_Irecv(s.incoming, s.count, kind(s), step.peer, s.tag + s.stage, n.comm,
                             &s.arriving)
    if step.sends and code == mpi.MPI_SUCCESS:
        code = mpi.MPI_Isend(s.total, s.count, kind(s), step.peer, s.tag + s.stage, n.comm,
                             &s.outgoing)
    return code


cdef bint stage_over(Sum* s, int* code) noexcept nogil:
    """Whether both messages of the stage are complete.

    Only then may `total` change: MPI reads it until the send is complete."""
    cdef bint sent = True, received = True
    cdef Arrival arrival
    if s.arriving != mpi.MPI_REQUEST_NULL:
        code[0] = test(&s.arriving, &received, &arrival)
        if classify(code[0]) == FAILURE_LAYOUT or (
                code[0] == mpi.MPI_SUCCESS and received and arrival.nbytes != nbytes(s)):
            s.torn = True
            code[0] = mpi.MPI_SUCCESS
    if code[0] == mpi.MPI_SUCCESS and s.outgoing != mpi.MPI_REQUEST_NULL:
        code[0] = test(&s.outgoing, &sent, NULL)
    return code[0] == mpi.MPI_SUCCESS and sent and received


cdef void combine(Network* n, Sum* s) noexcept nogil:
    """Add what has arrived to the sum, or take it as the sum (in the last stage)."""
    cdef Step step = step_of(n, s.stage)
    if step.receives and not step.adds:
        memcpy(s.total, s.incoming, nbytes(s))
    elif step.receives and s.double_precision:
        add_doubles(<double*>s.total, <const double*>s.incoming, s.count)
    elif step.receives:
        add_floats(<float*>s.total, <const float*>s.incoming, s.count)
    if s.torn and s.double_precision:
        (<double*>s.total)[s.count - 1] = NAN
    elif s.torn:
        (<float*>s.total)[s.count - 1] = NAN


cdef void add_doubles(double* total, const double* more, int count) noexcept nogil:
    cdef int i
    for i in range(count):
        total[i] += more[i]


cdef void add_floats(float* total, const float* more, int count) noexcept nogil:
    cdef int i
    for i in range(count):
        total[i] += more[i]


cdef mpi.MPI_Datatype kind(Sum* s) noexcept nogil:
    return mpi.MPI_DOUBLE if s.double_precision else mpi.MPI_FLOAT


cdef int nbytes(Sum* s) noexcept nogil:
    return s.count * (8 if s.double_precision else 4)
