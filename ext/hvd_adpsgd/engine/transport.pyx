# cython: language_level=3
# Why compiled: the engine's thread reaches MPI through these few calls without the GIL.
"""Messages between leaders over MPI communicators, and what to do when one has failed."""

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
    static int adpsgd_agree(MPI_Comm comm, int* flag, MPI_Request* request) {
      return MPIX_Comm_iagree(comm, flag, request);
    }
    static int adpsgd_revoke(MPI_Comm comm) { return MPIX_Comm_revoke(comm); }
    static int adpsgd_shrink(MPI_Comm comm, MPI_Comm* smaller) {
      return MPIX_Comm_shrink(comm, smaller);
    }
    static const int adpsgd_has_ulfm = 1;
    #else
    static int adpsgd_failure_class(int cls) { (void)cls; return 3; }
    static int adpsgd_acknowledge(MPI_Comm comm, MPI_Group* failed) {
      (void)comm; *failed = MPI_GROUP_EMPTY; return MPI_SUCCESS;
    }
    static int adpsgd_agree(MPI_Comm comm, int* flag, MPI_Request* request) {
      (void)comm; (void)flag; *request = MPI_REQUEST_NULL; return MPI_SUCCESS;
    }
    static int adpsgd_revoke(MPI_Comm comm) { (void)comm; return MPI_ERR_OTHER; }
    static int adpsgd_shrink(MPI_Comm comm, MPI_Comm* smaller) {
      (void)comm; (void)smaller; return MPI_ERR_OTHER;
    }
    static const int adpsgd_has_ulfm = 0;
    #endif
    """
    int adpsgd_failure_class(int cls)
    int adpsgd_acknowledge(mpi.MPI_Comm comm, mpi.MPI_Group* failed)
    int adpsgd_agree(mpi.MPI_Comm comm, int* flag, mpi.MPI_Request* request)
    int adpsgd_revoke(mpi.MPI_Comm comm)
    int adpsgd_shrink(mpi.MPI_Comm comm, mpi.MPI_Comm* smaller)
    const int adpsgd_has_ulfm

HAS_ULFM = bool(adpsgd_has_ulfm)


cdef int transport_open(Transport* t, mpi.MPI_Comm comm) noexcept nogil:
    """Use `comm`, whose errors must be returned (MPI_ERRORS_RETURN). Returns an MPI code."""
    t.comm = comm
    cdef int code = mpi.MPI_Comm_rank(comm, &t.rank)
    return code if code != mpi.MPI_SUCCESS else mpi.MPI_Comm_size(comm, &t.size)


cdef int post_receive(Transport* t, void* buffer, int nbytes, int source, int tag,
                      mpi.MPI_Request* request) noexcept nogil:
    request[0] = mpi.MPI_REQUEST_NULL       # so it stays if MPI refuses
    if source < 0:
        source = mpi.MPI_ANY_SOURCE
    return mpi.MPI_Irecv(buffer, nbytes, mpi.MPI_BYTE, source, tag, t.comm, request)


cdef int post_agreement(mpi.MPI_Comm comm, int* flag, mpi.MPI_Request* request) noexcept nogil:
    """flag = 1 if all of `comm` said 1. The same outcome, code included, on all that live."""
    request[0] = mpi.MPI_REQUEST_NULL
    return adpsgd_agree(comm, flag, request)


cdef void revoke(mpi.MPI_Comm comm) noexcept nogil:
    """Nobody waits in `comm` any longer; only agreeing and shrinking still work there."""
    adpsgd_revoke(comm)


cdef int shrink(mpi.MPI_Comm* comm) noexcept nogil:
    """Go on with those of `comm` that live; all of them come here. Blocks until they do."""
    cdef mpi.MPI_Comm smaller
    cdef int code = adpsgd_shrink(comm[0], &smaller)
    if code != mpi.MPI_SUCCESS:
        return code
    mpi.MPI_Comm_set_errhandler(smaller, mpi.MPI_ERRORS_RETURN)
    mpi.MPI_Comm_free(comm)
    comm[0] = smaller
    return mpi.MPI_SUCCESS


cdef int post_send(Transport* t, const void* buffer, int nbytes, int peer, int tag,
                   mpi.MPI_Request* request) noexcept nogil:
    request[0] = mpi.MPI_REQUEST_NULL
    return mpi.MPI_Isend(<void*>buffer, nbytes, mpi.MPI_BYTE, peer, tag, t.comm, request)


cdef int test(mpi.MPI_Request* request, bint* done, Arrival* arrival) noexcept nogil:
    """One look at a request. A request that failed counts as done; its code is returned."""
    cdef mpi.MPI_Status status
    cdef int flag = 0
    cdef int code = mpi.MPI_Test(request, &flag, &status)
    if flag and classify(code) == FAILURE_PENDING:
        # Told of a loss, it has arrived all the same. Open MPI keeps the mark, and the request.
        code = mpi.MPI_Request_free(request)
    done[0] = flag != 0 or code != mpi.MPI_SUCCESS
    if flag and code == mpi.MPI_SUCCESS and arrival != NULL:
        arrival.source = status.MPI_SOURCE
        mpi.MPI_Get_count(&status, mpi.MPI_BYTE, &arrival.nbytes)
    return code


cdef void give_up(mpi.MPI_Request* request) noexcept nogil:
    """Withdraw a receive that nobody will answer; it stays if MPI may still write to its buffer."""
    cdef int flag = 0
    if request[0] != mpi.MPI_REQUEST_NULL and mpi.MPI_Cancel(request) == mpi.MPI_SUCCESS:
        mpi.MPI_Test(request, &flag, mpi.MPI_STATUS_IGNORE)


cdef bint let_go(mpi.MPI_Request* request) noexcept nogil:
    """Whether MPI is done with a request, well or not, and with its buffer."""
    cdef bint done = True
    if request[0] == mpi.MPI_REQUEST_NULL:
        return True
    test(request, &done, NULL)
    if done and request[0] != mpi.MPI_REQUEST_NULL:     # Open MPI keeps one that failed
        mpi.MPI_Request_free(request)
    return done


cdef Failure classify(int code) noexcept nogil:
    """What an MPI return code means for the exchange it came from."""
    cdef int cls = 0
    if code == mpi.MPI_SUCCESS:
        return FAILURE_NONE
    if mpi.MPI_Error_class(code, &cls) != mpi.MPI_SUCCESS:
        return FAILURE_FATAL
    if cls == mpi.MPI_ERR_TRUNCATE:
        return FAILURE_LAYOUT
    return <Failure>adpsgd_failure_class(cls)


cdef int acknowledge_failures(Transport* t, char* lost) noexcept nogil:
    """Acknowledge every failure MPI knows of; set lost[r] = 1 for each failed rank r."""
    cdef mpi.MPI_Group failed, everyone
    cdef int count = 0, i, one, rank
    cdef int code = adpsgd_acknowledge(t.comm, &failed)
    if code != mpi.MPI_SUCCESS or failed == mpi.MPI_GROUP_EMPTY:
        return code
    mpi.MPI_Group_size(failed, &count)
    mpi.MPI_Comm_group(t.comm, &everyone)
    for i in range(count):
        one = i
        mpi.MPI_Group_translate_ranks(failed, 1, &one, everyone, &rank)
        if 0 <= rank < t.size:
            lost[rank] = 1
    mpi.MPI_Group_free(&everyone)
    mpi.MPI_Group_free(&failed)
    return mpi.MPI_SUCCESS


cdef int data_tag(int exchange, bint upper_asks) noexcept nogil:
    """Tag of one exchange's chunks. Of two peers at most one asks at a time, so the tag needs
    the asker's own exchange number and which of the two ranks asked."""
    return TAG_DATA + 2 * (exchange % TAG_SPAN) + (1 if upper_asks else 0)
