# cython: language_level=3
# Why compiled: it calls what the engine's thread calls.
"""What an engine's thread does with a chunk, and how it sleeps, call by call: for tests and calibration."""

from libc.stdint cimport int64_t, uint32_t, uintptr_t

from hvd_adpsgd.engine.doorbell cimport Doorbell
from hvd_adpsgd.engine.mailbox cimport load, pthread_mutex_lock, pthread_mutex_unlock
from hvd_adpsgd.engine.store cimport *
from hvd_adpsgd.engine.wire_tcp cimport TcpWire


def snapshot(Store store, int chunk, int wire, unsigned char[::1] out, bint offered_only=False):
    """Write the engine's snapshot of a chunk, in the type on the wire, to `out`.

    Returns (finite, step)."""
    cdef int64_t step = 0
    cdef int bad = memory_snapshot(&store.memory, chunk, wire, offered_only, &out[0], &step)
    return not bad, step


def share(Store store, int chunk, unsigned char[::1] out):
    """Write the engine's contribution to a mean, a chunk in the type of sums, to `out`.

    Returns whether the chunk is finite."""
    cdef int64_t step = 0
    return not memory_share(&store.memory, chunk, False, &out[0], &step)


def merge(Store store, int chunk, int wire, double weight, const unsigned char[::1] received,
          const unsigned char[::1] sent):
    """Merge as the engine does after an exchange of snapshots. Returns sum((received - sent)^2)."""
    cdef double square
    with nogil:
        square = memory_merge(&store.memory, chunk, wire, weight, &received[0], &sent[0])
    return square


def compare(Store store, uintptr_t lives, uintptr_t area, int chunk, int wire, double weight, unsigned char[::1] half):
    """Merge as the engine does with a peer's chunk in shared memory.

    Returns (Compared, our step, the peer's step, squared distance)."""
    cdef Neighbour peer = [<char*>lives, <char*>area, NULL, NULL, NULL]
    cdef int64_t step = 0, peer_step = 0
    cdef double square = 0
    cdef Compared found
    keep = bytearray(half.shape[0])
    cdef unsigned char[::1] second = keep
    with nogil:
        found = memory_compare(&store.memory, &peer, chunk, wire, False, weight, &half[0], &second[0], &step,
                               &peer_step, &square)
    return int(found), step, peer_step, square


def offer(Store store, int chunk, int wire, unsigned char[::1] out):
    """Offer a chunk as the engine does in few bits. Returns the bytes of `out`; 0: it is not finite."""
    cdef int64_t step = 0
    return memory_offer(&store.memory, chunk, wire, False, &out[0], &step)


def answer(Store store, int chunk, int wire, double weight, const unsigned char[::1] offer, unsigned char[::1] out):
    """Merge as the engine does that gets an offer, and write the answer to `out`.

    Returns its bytes, 0 if nothing was merged, and the squared distance."""
    cdef int64_t step = 0, nbytes
    cdef double square = 0
    with nogil:
        nbytes = memory_answer(&store.memory, chunk, wire, False, weight, &offer[0], offer.shape[0], &out[0], &step,
                               &square)
    return nbytes, square


def merge_answer(Store store, int chunk, int wire, double weight, const unsigned char[::1] answer):
    """Merge as the engine does that has made the offer. Returns the squared distance."""
    return memory_merge_answer(&store.memory, chunk, wire, weight, &answer[0])


def merge_half(Store store, int chunk, int wire, double weight, const unsigned char[::1] half):
    """Merge as the peer of `compare` does. Returns the squared distance."""
    return memory_merge_half(&store.memory, chunk, wire, weight, &half[0])


def merge_mean(Store store, int chunk, bint replace, double learners, const unsigned char[::1] sum,
               const unsigned char[::1] share):
    """Merge as the engine does after a mean. Returns the squared distance to the mean."""
    return memory_merge_mean(&store.memory, chunk, replace, learners, &sum[0], &share[0])


def lease(Store store, int chunk):
    """Take the lease of a chunk, as the trainer and the engine do while they change the chunk."""
    with nogil:
        pthread_mutex_lock(&chunk_at(&store.memory, chunk).lease)


def end_lease(Store store, int chunk):
    """Release the lease of a chunk; must be called by the thread that took it."""
    pthread_mutex_unlock(&chunk_at(&store.memory, chunk).lease)


def sleep(TcpWire wire, double seconds, uint32_t heard=0):
    """Sleep as an idle engine does: until `progress` has something to do, or until an order of the trainer.

    Not at all if `heard` is not 0, the number of rings of a doorbell that nobody rings."""
    cdef Doorbell silent = [0, 0]
    with nogil:
        wire.calls.wait(&wire.calls, &silent, heard, seconds)


def sleeps(TcpWire wire):
    """Whether a thread sleeps in this wire."""
    return load(&wire.sockets.waits) != 0
