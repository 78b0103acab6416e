# cython: language_level=3
# Why compiled: the engine's thread calls MPI through these functions without the GIL.
"""The wire over an MPI communicator whose errors are returned (MPI_ERRORS_RETURN).

A channel is a tag. Each wire over a communicator has a range of tags of its own, so that a new wire needs no
new communicator, which could not be made any more once a rank has failed. The wire finds failed peers as ULFM
reports them: by the return code of a transfer, and, once per second, by the communicator's group of failed
ranks, because a transfer that only waits may return no error.
"""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from mpi4py cimport libmpi as mpi

from hvd_adpsgd.engine.wire cimport *

cdef extern from * nogil:
    """
    #include <mpi.h>
    #if defined(OPEN_MPI)
    #include <mpi-ext.h>
    #endif
    #if defined(OMPI_HAVE_MPI_EXT_FTMPI) || defined(MPIX_ERR_PROC_FAILED)
    static int adpsgd_failure_class(int cls) {
      if (cls == MPIX_ERR_PROC_FAILED) return 1;
      if (cls == MPIX_ERR_PROC_FAILED_PENDING) return 2;
      if (cls == MPIX_ERR_REVOKED) return 3;
      return 3;
    }
    static int adpsgd_acknowledge(MPI_Comm comm, MPI_Group* failed) {
      int code = MPIX_Comm_failure_ack(comm);
      return code == MPI_SUCCESS ? MPIX_Comm_failure_get_acked(comm, failed) : code;
    }
    #else
    static int adpsgd_failure_class(int cls) { (void)cls; return 3; }
    static int adpsgd_acknowledge(MPI_Comm comm, MPI_Group* failed) {
      (void)comm; *failed = MPI_GROUP_EMPTY; return MPI_SUCCESS;
    }
    #endif
    """
    int adpsgd_failure_class(int cls)
    int adpsgd_acknowledge(mpi.MPI_Comm comm, mpi.MPI_Group* failed)

cdef enum Failure:
    FAILURE_NONE = 0
    FAILURE_PEER = 1        # the peer's process has failed: surviving ranks continue
    FAILURE_PENDING = 2     # a wildcard receive reported a failed rank; it stays posted
    FAILURE_FATAL = 3       # MPI itself is unusable
    FAILURE_LAYOUT = 4      # a message was longer than this side expects

cdef struct Arrival:
    int source
    int nbytes

cdef struct Links:
    mpi.MPI_Comm comm
    int size
    char* failed            # by rank: MPI has reported the rank as failed
    char* told              # by rank: mpi_next_failed has returned the rank
    int base                # first tag of this wire
    bint news               # a transfer has failed: ask MPI for its failed ranks


# ---- MPI's calls ---------------------------------------------------------------------------

cdef int post_receive(Links* links, void* buffer, int nbytes, int source, int tag,
                      mpi.MPI_Request* request) noexcept nogil:
    request[0] = mpi.MPI_REQUEST_NULL       # remains the value if MPI_Irecv fails
    if source < 0:
        source = mpi.MPI_ANY_SOURCE
    return mpi.MPI_Irecv(buffer, nbytes, mpi.MPI_BYTE, source, tag, links.comm, request)


cdef int post_send(Links* links, const void* buffer, int nbytes, int peer, int tag,
                   mpi.MPI_Request* request) noexcept nogil:
    request[0] = mpi.MPI_REQUEST_NULL
    return mpi.MPI_Isend(<void*>buffer, nbytes, mpi.MPI_BYTE, peer, tag, links.comm, request)


cdef int test(mpi.MPI_Request* request, bint* done, Arrival* arrival) noexcept nogil:
    """Test a request once, and return MPI's code. A failed request counts as done."""
    cdef mpi.MPI_Status status
    cdef int flag = 0
    cdef int code = mpi.MPI_Test(request, &flag, &status)
    if flag and classify(code) == FAILURE_PENDING:
        # The message arrived after MPI had marked this receive with a peer's failure. Open MPI keeps the
        # mark and the request: without the free, every later test would report the failure again.
        code = mpi.MPI_Request_free(request)
    done[0] = flag != 0 or code != mpi.MPI_SUCCESS
    if flag and code == mpi.MPI_SUCCESS and arrival != NULL:
        arrival.source = status.MPI_SOURCE
        mpi.MPI_Get_count(&status, mpi.MPI_BYTE, &arrival.nbytes)
    return code


cdef bint let_go(mpi.MPI_Request* request) noexcept nogil:
    """Return whether MPI no longer uses a request and its buffer, whether the request succeeded or not."""
    cdef bint done = True
    if request[0] == mpi.MPI_REQUEST_NULL:
        return True
    test(request, &done, NULL)
    if done and request[0] != mpi.MPI_REQUEST_NULL:     # Open MPI keeps a failed request
        mpi.MPI_Request_free(request)
    return done


cdef Failure classify(int code) noexcept nogil:
    """Return the kind of failure that an MPI return code stands for."""
    cdef int cls = 0
    if code == mpi.MPI_SUCCESS:
        return FAILURE_NONE
    if mpi.MPI_Error_class(code, &cls) != mpi.MPI_SUCCESS:
        return FAILURE_FATAL
    if cls == mpi.MPI_ERR_TRUNCATE:
        return FAILURE_LAYOUT
    return <Failure>adpsgd_failure_class(cls)


cdef int acknowledge_failures(Links* links, char* failed) noexcept nogil:
    """Acknowledge every failure that MPI knows of; set failed[r] = 1 for each failed rank r."""
    cdef mpi.MPI_Group group, everyone
    cdef int count = 0, i, one, rank
    cdef int code = adpsgd_acknowledge(links.comm, &group)
    if code != mpi.MPI_SUCCESS or group == mpi.MPI_GROUP_EMPTY:
        return code
    mpi.MPI_Group_size(group, &count)
    mpi.MPI_Comm_group(links.comm, &everyone)
    for i in range(count):
        one = i
        mpi.MPI_Group_translate_ranks(group, 1, &one, everyone, &rank)
        if 0 <= rank < links.size:
            failed[rank] = 1
    mpi.MPI_Group_free(&everyone)
    mpi.MPI_Group_free(&group)
    return mpi.MPI_SUCCESS


# ---- the wire ------------------------------------------------------------------------------

cdef inline mpi.MPI_Request* request_of(Transfer* t) noexcept nogil:
    return <mpi.MPI_Request*>&t.handle


cdef Status status_of(Wire* wire, Transfer* t, int code) noexcept nogil:
    cdef Links* links = <Links*>wire.own
    cdef Failure failure = classify(code)
    t.code = code
    if failure == FAILURE_LAYOUT:
        return TOO_LONG
    if failure == FAILURE_PEER or failure == FAILURE_PENDING:
        links.news = True
        return PENDING if failure == FAILURE_PENDING else PEER_DOWN
    return WIRE_DOWN


cdef Status mpi_send(Wire* wire, Transfer* t, const void* buffer, int nbytes, int peer,
                     int channel) noexcept nogil:
    cdef Links* links = <Links*>wire.own
    cdef int code = post_send(links, buffer, nbytes, peer, links.base + channel, request_of(t))
    t.peer = peer
    t.receives = t.cancelled = False
    t.in_use = code == mpi.MPI_SUCCESS
    return PENDING if t.in_use else status_of(wire, t, code)


cdef Status mpi_receive(Wire* wire, Transfer* t, void* buffer, int nbytes, int peer,
                        int channel) noexcept nogil:
    cdef Links* links = <Links*>wire.own
    cdef int code = post_receive(links, buffer, nbytes, peer, links.base + channel, request_of(t))
    t.peer = peer
    t.receives = True
    t.cancelled = False
    t.in_use = code == mpi.MPI_SUCCESS
    return PENDING if t.in_use else status_of(wire, t, code)


cdef Status mpi_test(Wire* wire, Transfer* t) noexcept nogil:
    cdef bint done = False
    cdef Arrival arrival
    cdef int code = test(request_of(t), &done, &arrival)
    cdef Status status
    if code == mpi.MPI_SUCCESS:
        if not done:
            return PENDING
        t.in_use = False
        if t.receives:
            t.peer = arrival.source
            t.nbytes = arrival.nbytes
        return DONE
    status = status_of(wire, t, code)
    t.in_use = request_of(t)[0] != mpi.MPI_REQUEST_NULL     # Open MPI keeps a failed request
    if status == PENDING and not t.in_use:                  # a wildcard receive that MPI has ended
        return PEER_DOWN
    return status


cdef bint mpi_release(Wire* wire, Transfer* t) noexcept nogil:
    if not t.in_use:
        return True
    if t.receives and not t.cancelled:
        t.cancelled = True
        mpi.MPI_Cancel(request_of(t))
    t.in_use = not let_go(request_of(t))
    return not t.in_use


cdef int mpi_next_failed(Wire* wire, bint look) noexcept nogil:
    cdef Links* links = <Links*>wire.own
    cdef int peer
    if not look and not links.news:
        return NOBODY
    acknowledge_failures(links, links.failed)
    for peer in range(wire.size):
        if links.failed[peer] and not links.told[peer]:
            links.told[peer] = True
            links.news = True               # other ranks may have failed, too
            return peer
    links.news = False
    return NOBODY


cdef class MpiWire(AnyWire):
    """The wire of an engine over an MPI communicator, which the caller owns and keeps alive.

    Args:
        comm: mpi4py's communicator.
        address: address of the communicator's handle.
        number: number of this wire among the wires over the communicator, the same on all ranks.
    """

    CHANNELS = 1 << 19          # how many tags a wire has

    cdef Links links
    cdef object comm

    def __cinit__(self, comm, uintptr_t address, int number=0):
        cdef int code
        self.links.comm = (<mpi.MPI_Comm*>address)[0]
        code = mpi.MPI_Comm_rank(self.links.comm, &self.calls.rank)
        if code == mpi.MPI_SUCCESS:
            code = mpi.MPI_Comm_size(self.links.comm, &self.links.size)
        if code != mpi.MPI_SUCCESS:
            raise RuntimeError(f"MPI error {code} when the averaging engine's communicator was opened")
        self.comm = comm
        self.links.failed = <char*>calloc(2 * self.links.size, 1)
        if self.links.failed == NULL:
            raise MemoryError("no memory for the averaging engine's wire")
        self.links.told = self.links.failed + self.links.size
        self.links.news = False
        self.links.base = number << 19
        self.calls.own = &self.links
        self.calls.size = self.links.size
        self.calls.send = mpi_send
        self.calls.receive = mpi_receive
        self.calls.test = mpi_test
        self.calls.release = mpi_release
        self.calls.next_failed = mpi_next_failed

    def __dealloc__(self):
        free(self.links.failed)
