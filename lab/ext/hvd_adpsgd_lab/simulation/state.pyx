# cython: language_level=3
# Why compiled: every entry of the calendar passes through it.
"""The state of a simulated job that its modules share: engines with trainers, calendar, record of the run."""

from libc.stdint cimport uint64_t, uintptr_t

import numpy as np

from hvd_adpsgd_lab.simulation.ledger import BrokenPromise

from hvd_adpsgd_lab.simulation.chance cimport between
from hvd_adpsgd_lab.simulation.network cimport enter

cdef double NEVER = 1e300


cdef class JobState:
    """The state of a Job: engines, trainers, and a record of the run."""

    cdef void turn_at(self, int i, double at):
        """Schedule the next turn of engine i at a time, unless an earlier one is scheduled."""
        cdef Actor* a = &self.actors[i]
        at = max(at, a.busy_until)
        if a.dead or a.over or a.stopped or a.absent or a.turn_at <= at:
            return
        a.turn_at = at
        a.turns += 1
        enter(self.net, at, TURN, i, <void*><uintptr_t>a.turns)

    cdef void turn_soon(self, int i):
        self.turn_at(i, self.net.now_s + between(&self.chance, 0, 15e-6 * self.slack))

    cdef void again(self, int i, double seconds):
        enter(self.net, self.net.now_s + seconds, ACT, i, NULL)

    cdef int fail(self, promise, what) except -1:
        raise BrokenPromise(promise, f"{what} (event {self.happened}, {self.net.now_s - 1:.6f} s)")

    cdef void note(self, what):
        self.met[what] = self.met.get(what, 0) + 1

    cdef void tell(self, int i, what):
        if self.story is not None:
            self.story.append((self.net.now_s - 1.0, self.actors[i].process, what))

    cdef object wide(self):
        """Return the NumPy type of corrections."""
        return np.float64 if self.dtype == FLOAT64 else np.float32

    cdef object area_for(self, model, int nslots):
        """Allocate a mirror and slots for a model, with the same distances between them on all engines."""
        wide = np.dtype(self.wide())
        area = np.zeros(8 * model.size + nslots * model.size * wide.itemsize, np.uint8)
        slots = area[8 * model.size:].view(wide).reshape(nslots, *model.shape)
        return area[:model.nbytes].view(model.dtype).reshape(model.shape), slots

    cdef void add_chunks(self, int rank, int first, int last):
        mirror, slots, full = self.areas[rank]
        cdef uintptr_t mirrors = mirror.ctypes.data
        cdef int c
        places = [slot.ctypes.data for slot in slots]
        flags = [row.ctypes.data for row in full]
        for c in range(first, last):
            at = [place + c * slots.strides[1] for place in places], [row + c for row in flags]
            self.stores[rank].add_chunk(mirrors + c * mirror.strides[0], *at, mirror.shape[1], self.dtype, c in self.rare)
            if self.followers[rank] is not None:
                self.followers[rank].add_chunk(0, *at, mirror.shape[1], self.dtype)

    cdef int lay_out(self, loop, int nchunks, uint64_t fingerprint) except -1:
        loop.extend(nchunks, fingerprint, [c for c in range(nchunks) if c in self.rare], self.rare_period)
        return 0
