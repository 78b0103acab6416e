# cython: language_level=3
# Why compiled: engines call it as their wire, through C function pointers, each on a thread of its own.
"""A wire between engines of one process, whose threads run at the same time.

A message longer than EAGER bytes is read from the sender's buffer when it is received, as a wire with shared memory or
RDMA does, so that a buffer which is changed too early is a race. One mutex orders a send before its receive; it is all
that orders the threads of two engines.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from hvd_adpsgd.engine.store cimport pthread_mutex_t
from hvd_adpsgd.engine.wire cimport NOBODY, PEER_DOWN, PENDING, DONE, TOO_LONG, AnyWire, Status, Transfer, Wire

cdef extern from "<pthread.h>" nogil:
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef enum:
    EAGER = 256

cdef struct Parcel:             # one side of a message
    Parcel* next_one
    bint sends
    int src                     # NOBODY: of a receive from anybody
    int dst
    int channel
    char* buffer                # of a send: the sender's, or `copy`
    char* copy
    int nbytes
    Status status
    int came_from               # of a completed receive

cdef struct Office:
    pthread_mutex_t lock
    int n
    Parcel** waiting            # by receiver: sends and receives without their other side, oldest first
    char* failed                # by engine
    char* told                  # [observer * n + engine]


cdef inline Parcel* parcel_of(Transfer* t) noexcept nogil:
    return <Parcel*><uintptr_t>t.handle


cdef bint fits(Parcel* a, Parcel* b) noexcept nogil:
    cdef Parcel* send = a if a.sends else b
    cdef Parcel* receive = b if a.sends else a
    return a.sends != b.sends and a.channel == b.channel and (receive.src == NOBODY or receive.src == send.src)


cdef void deliver(Parcel* send, Parcel* receive) noexcept nogil:
    receive.came_from = send.src
    receive.status = TOO_LONG if send.nbytes > receive.nbytes else DONE
    if receive.status == DONE and send.nbytes:
        memcpy(receive.buffer, send.buffer, send.nbytes)
    receive.nbytes = send.nbytes
    send.status = DONE


cdef Status post(Wire* wire, Transfer* t, Parcel* p) noexcept nogil:
    """Match it with the oldest other side, or let it wait for one."""
    cdef Office* office = <Office*>wire.own
    cdef Parcel** link = &office.waiting[p.dst]
    cdef Parcel* other
    cdef Parcel* send
    t.handle = <uint64_t><uintptr_t>p
    t.receives = not p.sends
    t.cancelled = False
    t.peer = p.dst if p.sends else p.src
    t.in_use = True
    pthread_mutex_lock(&office.lock)
    if p.sends and office.failed[p.dst]:
        t.in_use = False
        free(p.copy)
        free(p)
        pthread_mutex_unlock(&office.lock)
        return PEER_DOWN
    while link[0] != NULL and not fits(link[0], p):
        link = &link[0].next_one
    other = link[0]
    if other != NULL:
        link[0] = other.next_one
        send = p if p.sends else other
        deliver(send, other if p.sends else p)
        if send.copy != NULL:                       # nobody waits for it
            free(send.copy)
            free(send)
    elif not office.failed[wire.rank]:
        link[0] = p
    pthread_mutex_unlock(&office.lock)
    return PENDING


cdef Status thread_send(Wire* wire, Transfer* t, const void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    cdef Parcel* p = <Parcel*>calloc(1, sizeof(Parcel))
    cdef Parcel* done
    p.sends = True
    p.src = wire.rank
    p.dst = peer
    p.channel = channel
    p.nbytes = nbytes
    p.buffer = <char*>buffer
    if nbytes > EAGER:
        return post(wire, t, p)
    p.copy = <char*>malloc(max(1, nbytes))
    if nbytes:
        memcpy(p.copy, buffer, nbytes)
    p.buffer = p.copy
    done = <Parcel*>calloc(1, sizeof(Parcel))       # the sender is done with it, and its copy travels on
    done.sends = True
    done.status = DONE
    if post(wire, t, p) == PEER_DOWN:
        free(done)
        return PEER_DOWN
    t.handle = <uint64_t><uintptr_t>done
    return PENDING


cdef Status thread_receive(Wire* wire, Transfer* t, void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    cdef Parcel* p = <Parcel*>calloc(1, sizeof(Parcel))
    p.src = peer
    p.dst = wire.rank
    p.channel = channel
    p.nbytes = nbytes
    p.buffer = <char*>buffer
    return post(wire, t, p)


cdef Status thread_test(Wire* wire, Transfer* t) noexcept nogil:
    cdef Office* office = <Office*>wire.own
    cdef Parcel* p = parcel_of(t)
    cdef Status status
    pthread_mutex_lock(&office.lock)
    status = p.status
    if status == PENDING and t.peer != NOBODY and office.failed[t.peer]:
        status = PEER_DOWN                          # the wire keeps it until it is released
    pthread_mutex_unlock(&office.lock)
    if status == DONE or status == TOO_LONG:
        if t.receives:
            t.peer = p.came_from
            t.nbytes = p.nbytes
        t.in_use = False
        free(p.copy)
        free(p)
    return status


cdef bint thread_release(Wire* wire, Transfer* t) noexcept nogil:
    cdef Office* office = <Office*>wire.own
    cdef Parcel* p = parcel_of(t)
    cdef Parcel** link
    if not t.in_use:
        return True
    pthread_mutex_lock(&office.lock)
    link = &office.waiting[wire.rank if t.receives else t.peer]
    while link[0] != NULL and link[0] != p:
        link = &link[0].next_one
    if link[0] == p:
        link[0] = p.next_one
    t.in_use = False
    free(p.copy)
    free(p)
    pthread_mutex_unlock(&office.lock)
    return True


cdef int thread_next_failed(Wire* wire, bint look) noexcept nogil:
    cdef Office* office = <Office*>wire.own
    cdef int peer, found = NOBODY
    pthread_mutex_lock(&office.lock)
    for peer in range(office.n):
        if found == NOBODY and peer != wire.rank and office.failed[peer] and not office.told[wire.rank * office.n + peer]:
            office.told[wire.rank * office.n + peer] = True
            found = peer
    pthread_mutex_unlock(&office.lock)
    return found


cdef class Threads:
    """What the wires of `n` engines share."""

    cdef Office office

    def __cinit__(self, int n):
        pthread_mutex_init(&self.office.lock, NULL)
        self.office.n = n
        self.office.waiting = <Parcel**>calloc(n, sizeof(Parcel*))
        self.office.failed = <char*>calloc(n * (n + 1), 1)
        self.office.told = self.office.failed + n

    def fail(self, int engine):
        """Report an engine as failed. What it has sent or receives without a copy ends there."""
        cdef Parcel** link
        cdef int receiver
        pthread_mutex_lock(&self.office.lock)
        self.office.failed[engine] = True
        for receiver in range(self.office.n):
            link = &self.office.waiting[receiver]
            while link[0] != NULL:
                if link[0].copy == NULL and engine == (link[0].src if link[0].sends else receiver):
                    link[0] = link[0].next_one
                else:
                    link = &link[0].next_one
        pthread_mutex_unlock(&self.office.lock)

    def __dealloc__(self):
        free(self.office.waiting)
        free(self.office.failed)


cdef class ThreadWire(AnyWire):
    """The wire of engine `rank`."""

    cdef Threads threads

    def __cinit__(self, Threads threads, int rank):
        self.threads = threads
        self.calls.own = &threads.office
        self.calls.rank = rank
        self.calls.size = threads.office.n
        self.calls.send = thread_send
        self.calls.receive = thread_receive
        self.calls.test = thread_test
        self.calls.release = thread_release
        self.calls.next_failed = thread_next_failed
