# cython: language_level=3
# Why compiled: it runs on the engine's thread, without the GIL.
"""The exact mean of all models: one sum per chunk (butterfly.pyx), LANES sums in flight.

Each chunk carries two more numbers: how many super learners contribute (a model that is not finite does
not), and the sum of a number derived from the layout, which shows whether all average the same tensors.

With ULFM the engines agree at the end of a mean that each of them has all of it. If a super learner failed
meanwhile, the survivors shrink the communicator and repeat the mean from its first chunk, over their current
models: a chunk that some of them had merged already is averaged once more.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport malloc
from mpi4py cimport libmpi as mpi

from hvd_adpsgd.engine.store cimport memory_merge_mean, memory_share, memory_sum_nbytes
from hvd_adpsgd.engine.exchange cimport handle_failure, mark_failed_peers
from hvd_adpsgd.engine.state cimport *
from hvd_adpsgd.engine.butterfly cimport network_open, sum_drained, sum_nbytes_sent, sum_post, sum_test
from hvd_adpsgd.engine.transport cimport post_agreement, revoke, shrink, test


cdef bint reserve_mean(State* e) noexcept nogil:
    """Allocate LANES chunks: each once in its own type, and three times in the type of sums."""
    cdef Mean* m = &e.mean
    cdef int i
    cdef int64_t sums = 2 * e.lane_nbytes + 16      # a 16-bit chunk doubles
    if m.buffers != NULL:
        return True
    m.lane_nbytes = e.lane_nbytes + 3 * sums        # a multiple of 4, as the lane is
    m.buffers = <char*>malloc(LANES * m.lane_nbytes + sizeof(int))
    if m.buffers == NULL:
        return False
    for i in range(LANES):
        m.shares[i].own = m.buffers + i * m.lane_nbytes
        m.shares[i].mine = m.shares[i].own + e.lane_nbytes
        m.shares[i].sum.total = m.shares[i].mine + sums
        m.shares[i].sum.incoming = m.shares[i].sum.total + sums
    m.agreed = <int*>(m.buffers + LANES * m.lane_nbytes)
    return True


cdef bint begin_mean(State* e) noexcept nogil:
    cdef Mean* m = &e.mean
    if m.running or m.finished >= load(&m.wanted) or e.fault != FAULT_NONE:
        return False
    if not reserve_mean(e):
        latch(e, FAULT_MEMORY, 0, NOBODY)
        return False
    m.running = True
    m.nchunks = e.generations[e.ngenerations - 1].nchunks
    m.began = now()
    m.nbytes = 0
    begin_sums(m)
    return True


cdef void begin_sums(Mean* m) noexcept nogil:
    m.stage = SUMMING
    m.next = 0
    m.done = 0
    m.square = 0
    m.moved = now()


cdef double layout_mark(State* e, int chunk) noexcept nogil:
    """A whole number below 4094: its sum over n <= 4099 super learners is exact in float32."""
    cdef uint64_t number = e.generations[e.ngenerations - 1].fingerprint
    cdef uint64_t modulus = 4093
    return 1.0 + <double>((number + <uint64_t>chunk * 31) % modulus)


cdef void put_number(Share* s, char* where, int i, double value) noexcept nogil:
    if s.itemsize == 8:
        (<double*>where)[s.count + i] = value
    else:
        (<float*>where)[s.count + i] = <float>value


cdef double get_number(Share* s, char* where, int i) noexcept nogil:
    return (<double*>where)[s.count + i] if s.itemsize == 8 else (<float*>where)[s.count + i]


cdef bint start_share(State* e) noexcept nogil:
    """Contribute the next chunk."""
    cdef Mean* m = &e.mean
    cdef Share* s = &m.shares[m.next % LANES]
    cdef int code
    if m.next >= m.nchunks or s.busy:
        return False
    m.nbytes += memory_sum_nbytes(e.memory, m.next, &s.count, &s.itemsize)
    s.void = memory_share(e.memory, m.next, e.offered_only, s.own, s.mine, &s.step)
    put_number(s, s.mine, 0, 0 if s.void else 1)
    put_number(s, s.mine, 1, layout_mark(e, m.next))
    s.began = now()
    s.busy = True
    m.next += 1
    s.summing = True
    code = sum_post(&m.network, &s.sum, s.mine, <int>s.count + 2, s.itemsize == 8, m.next)
    if code != mpi.MPI_SUCCESS:
        break_mean(e, code)
        return False
    return True


cdef bint advance_share(State* e, int lane) noexcept nogil:
    """Merge the chunk of a lane if its sum has arrived."""
    cdef Mean* m = &e.mean
    cdef Share* s = &m.shares[lane]
    cdef int chunk = m.done                 # sums are merged in order
    cdef bint arrived = False
    cdef double square, learners, began = now()
    cdef int code
    if not s.busy:
        return False
    if s.summing:                           # also out of order: MPI progresses only what is tested
        code = sum_test(&m.network, &s.sum, &arrived)
        if code != mpi.MPI_SUCCESS:
            break_mean(e, code)
            return True
        s.summing = not arrived
    if s.summing or chunk % LANES != lane:
        return arrived
    learners = get_number(s, s.sum.total, 0)
    square = -2.0
    if get_number(s, s.sum.total, 1) != m.network.size * layout_mark(e, chunk):
        latch(e, FAULT_LAYOUT, 0, NOBODY)
    elif not s.void and learners > 0:
        square = memory_merge_mean(e.memory, chunk, m.replace, learners, s.sum.total, s.mine)
    if square == -1.0:
        return False                        # the slot is held (store.pyx): try again later
    if square >= 0:
        m.square += square
        e.counters.chunks += 1
        record(e, 2, NOBODY, began, now(), s.count * s.itemsize, s.step)
    else:
        e.counters.void_chunks += 1
    s.busy = False
    m.done += 1
    return True


cdef bint advance_mean(State* e) noexcept nogil:
    """Do what can be done now for the mean of all. True if anything was."""
    cdef Mean* m = &e.mean
    cdef bint moved = begin_mean(e)
    if not m.running or e.fault != FAULT_NONE:
        return moved
    if m.stage == SUMMING:
        moved |= advance_sums(e)
    elif m.stage == DRAINING:
        moved |= drain_sums(e)
    else:
        moved |= advance_agreement(e)
    if moved:
        m.moved = now()
    elif m.running:
        require_everybody(e)
    return moved


cdef bint advance_sums(State* e) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef bint moved = False
    cdef int i
    for i in range(LANES):
        if e.fault == FAULT_NONE and m.stage == SUMMING:
            moved |= advance_share(e, i)
    while e.fault == FAULT_NONE and m.stage == SUMMING and start_share(e):
        moved = True
    if e.fault == FAULT_NONE and m.stage == SUMMING and m.done == m.nchunks:
        conclude(e)
        return True
    return moved


cdef void conclude(State* e) noexcept nogil:
    """This engine has all sums. With ULFM, ask whether every engine has them."""
    if e.mean.survives:
        agree(e, True)
    else:
        finish_mean(e)


cdef void agree(State* e, bint good) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef int code
    m.stage = AGREEING
    m.agreed[0] = good
    code = post_agreement(m.comm[0], m.agreed, &m.agreement)
    if code != mpi.MPI_SUCCESS:
        latch(e, FAULT_MPI, code, NOBODY)


cdef bint advance_agreement(State* e) noexcept nogil:
    """End the mean if every engine has it, else repeat it among the survivors. The same on all."""
    cdef Mean* m = &e.mean
    cdef bint done = False
    cdef int code = test(&m.agreement, &done, NULL)
    if not done:
        return False
    if code == mpi.MPI_SUCCESS and m.agreed[0]:
        finish_mean(e)
        return True
    mark_failed_peers(e)
    code = shrink(m.comm)
    if code == mpi.MPI_SUCCESS:
        code = network_open(&m.network, m.comm[0], m.network.butterfly)
    if code != mpi.MPI_SUCCESS:
        latch(e, FAULT_MPI, code, NOBODY)
    begin_sums(m)
    return True


cdef bint drain_sums(State* e) noexcept nogil:
    """Wait for the requests of a broken mean, then vote no.

    MPI may write to their buffers until they complete; the repeated mean would read what it wrote."""
    cdef Mean* m = &e.mean
    cdef bint moved = False, busy = False
    cdef int i
    for i in range(LANES):
        if m.shares[i].busy and sum_drained(&m.shares[i].sum):
            m.shares[i].busy = False
            moved = True
        busy |= m.shares[i].busy
    if not busy:
        agree(e, False)
        return True
    return moved


cdef void finish_mean(State* e) noexcept nogil:
    cdef Mean* m = &e.mean
    cdef double ended = now()
    m.running = False
    e.counters.means += 1
    e.counters.mean_s += ended - m.began
    e.counters.mean_square = m.square
    e.counters.bytes_sent += sum_nbytes_sent(&m.network, m.nbytes)
    e.counters.bytes_received += sum_nbytes_sent(&m.network, m.nbytes)
    record(e, 4, NOBODY, m.began, ended, m.nbytes, e.step)
    store(&m.finished, m.finished + 1)


cdef void require_everybody(State* e) noexcept nogil:
    """A mean waits for slow super learners without bound, but not for one that has left or failed.

    With ULFM a failed one is shrunk away, and so is one that has left once its process has ended."""
    cdef int peer = find_gone(e)
    cdef double patience = e.deadline_s         # its last messages may still arrive
    if e.mean.survives:
        patience += 2 * e.leave_deadline_s
    if peer != NOBODY and now() - e.mean.moved > patience:
        latch(e, FAULT_GONE, 0, peer)


cdef int find_gone(State* e) noexcept nogil:
    cdef int peer
    for peer in range(e.transport.size):
        if e.peers[peer] == LEFT or (e.peers[peer] == FAILED and not e.mean.survives):
            return peer
    return NOBODY


cdef void break_mean(State* e, int code) noexcept nogil:
    """A sum has failed here: revoke the communicator, so that no peer waits for its part of it."""
    cdef Mean* m = &e.mean
    if m.survives:
        revoke(m.comm[0])
        m.stage = DRAINING
    else:                                       # without ULFM nothing can go on without the failed one
        handle_failure(e, code, NOBODY)
        latch(e, FAULT_GONE, code, find_gone(e))
