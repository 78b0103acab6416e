# cython: language_level=3
# Why compiled: the engine's thread calls MPI through these functions without the GIL.
"""Messages between leaders over MPI communicators, and what an MPI error means."""

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
    request[0] = mpi.MPI_REQUEST_NULL       # stays so if MPI_Irecv fails
    if source < 0:
        source = mpi.MPI_ANY_SOURCE
    return mpi.MPI_Irecv(buffer, nbytes, mpi.MPI_BYTE, source, tag, t.comm, request)


cdef int post_agreement(mpi.MPI_Comm comm, int* flag, mpi.MPI_Request* request) noexcept nogil:
    """flag = 1 if all of `comm` passed 1. The same outcome, code included, on all survivors."""
    request[0] = mpi.MPI_REQUEST_NULL
    return adpsgd_agree(comm, flag, request)


cdef void revoke(mpi.MPI_Comm comm) noexcept nogil:
    """End all waiting in `comm`, on all ranks; after this only agreement and shrink work there."""
    adpsgd_revoke(comm)


cdef int shrink(mpi.MPI_Comm* comm) noexcept nogil:
    """Replace `comm` by one of its survivors. Collective over these; blocks."""
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
    """Test a request once. A failed request counts as done; its code is returned."""
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


cdef void give_up(mpi.MPI_Request* request) noexcept nogil:
    """Cancel a receive that no peer will match; it stays if MPI may still write to its buffer."""
    cdef int flag = 0
    if request[0] != mpi.MPI_REQUEST_NULL and mpi.MPI_Cancel(request) == mpi.MPI_SUCCESS:
        mpi.MPI_Test(request, &flag, mpi.MPI_STATUS_IGNORE)


cdef bint let_go(mpi.MPI_Request* request) noexcept nogil:
    """Whether MPI is done with a request, successfully or not, and with its buffer."""
    cdef bint done = True
    if request[0] == mpi.MPI_REQUEST_NULL:
        return True
    test(request, &done, NULL)
    if done and request[0] != mpi.MPI_REQUEST_NULL:     # Open MPI keeps a failed one
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


cdef int acknowledge_failures(Transport* t, char* failed) noexcept nogil:
    """Acknowledge every failure MPI knows of; set failed[r] = 1 for each failed rank r."""
    cdef mpi.MPI_Group group, everyone
    cdef int count = 0, i, one, rank
    cdef int code = adpsgd_acknowledge(t.comm, &group)
    if code != mpi.MPI_SUCCESS or group == mpi.MPI_GROUP_EMPTY:
        return code
    mpi.MPI_Group_size(group, &count)
    mpi.MPI_Comm_group(t.comm, &everyone)
    for i in range(count):
        one = i
        mpi.MPI_Group_translate_ranks(group, 1, &one, everyone, &rank)
        if 0 <= rank < t.size:
            failed[rank] = 1
    mpi.MPI_Group_free(&everyone)
    mpi.MPI_Group_free(&group)
    return mpi.MPI_SUCCESS


cdef int data_tag(int exchange, bint upper_asks) noexcept nogil:
    """Tag of one exchange's chunks. Of two peers at most one asks at a time, so the tag needs
    the asker's own exchange number and which of the two ranks asked."""
    return TAG_DATA + 2 * (exchange % TAG_SPAN) + (1 if upper_asks else 0)
