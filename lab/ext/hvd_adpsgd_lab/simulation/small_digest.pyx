# cython: language_level=3
# Why compiled: it reads the state of a job millions of times.
"""A digest of the state of a small job: engines, trainers, messages, and chunks merged by one side only."""

from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.core cimport LANES, SETS, STAMP, Core
from hvd_adpsgd_lab.simulation.choices cimport Wires
from hvd_adpsgd_lab.simulation.digests cimport LANE_NBYTES, digest_engine, digest_memory, digest_messages, mixed, mixed_bytes
from hvd_adpsgd_lab.simulation.ledger cimport Half
from hvd_adpsgd_lab.simulation.small_job cimport SmallJob


cdef uint64_t digest_job(SmallJob job) noexcept:
    cdef uint64_t h = 23
    cdef Wires* f = &job.between
    cdef Core* e
    cdef int i
    for i in range(job.n):
        h = mixed(h, (<uint64_t>job.learners[i].place << 2) + (f.dead[i] << 1) + f.over[i])
        h = mixed(h, job.learners[i].rushed)
        e = job.learners[i].core
        if not f.dead[i]:
            h = mixed_bytes(h, job.parameters(i), job.chunks * sizeof(double))
            h = mixed(h, digest_memory(e))
        if job.lives(i):
            h = mixed(h, digest_engine(e))
        h = mixed_bytes(mixed_bytes(h, f.ends[i].down, job.n), f.ends[i].told, job.n)
        h = mixed_bytes(h, f.ends[i].suspects, job.n)
    h = mixed(h, (<uint64_t>f.suspicions << 16) + (job.crashes_left << 8) + f.faulty)
    h = mixed(h, (<uint64_t>job.retries_left << 8) + job.deadlines_left)
    h = mixed(mixed(h, digest_messages(f)), digest_ledger(job))
    return mixed(h, digest_common(job)) if job.common is not None else h


cdef uint64_t digest_ledger(SmallJob job) noexcept:
    cdef uint64_t total = 0, h
    cdef Half* half
    cdef int64_t i
    for i in range(job.ledger.count):
        half = &job.ledger.halves[i]
        h = mixed(mixed(29, (<uint64_t>half.asker << 8) + half.server), (<uint64_t>half.number << 16) + half.chunk)
        total += mixed_bytes(mixed(h, half.by), &half.square, sizeof(double))
    return total


cdef uint64_t digest_common(SmallJob job) noexcept:
    """Return a digest of exchange buffers in use in shared memory; after a fault of all, for late readers."""
    cdef int64_t nbytes = LANES // 2 * (LANE_NBYTES + STAMP)
    cdef uint64_t h = 31
    cdef int i, s
    for i in range(job.n):
        for s in range(SETS):
            if job.between.faulty or job.learners[i].core.pairs.taken[s]:
                h = mixed_bytes(mixed(h, s), job.learners[i].core.pairs.shared + s * nbytes, nbytes)
    return h
