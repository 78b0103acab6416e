# cython: language_level=3
# Why compiled: every chunk that an engine merges passes through it.
"""A ledger that checks promises 1 and 8: chunks that each side has merged, and all means and decisions."""

from libc.math cimport sqrt
from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc

from hvd_adpsgd.engine.core cimport LANES
from hvd_adpsgd.engine.mailbox cimport Event

NOTHING_LOST = "promise 1 (nothing lost)"
REPORTS_ERRORS = "promise 7 (reports errors)"
ONE_DECISION = "promise 8 (one decision)"


class BrokenPromise(Exception):
    """A promise or an invariant does not hold; the message names it, and what shows that."""

    def __init__(self, promise, what):
        super().__init__(f"{promise}: {what}")
        self.promise = promise


cdef class Ledger:
    """Chunks that only one side of an exchange has merged so far, and results that all engines must share."""

    def __cinit__(self):
        self.means, self.decisions, self.abandoned = {}, {}, set()

    def __dealloc__(self):
        free(self.halves)

    cdef int merged(self, int i, int peer, Event* event) except -1:
        """Record a chunk that engine i has merged; check that both sides merge it once, and equally."""
        cdef Half half
        cdef Half* other
        half.asker, half.server = (i, peer) if event.asked else (peer, i)
        half.number, half.chunk, half.by, half.square = event.number, event.chunk, i, event.square
        other = self.other_half(&half)
        if other == NULL:
            self.keep(&half)
            return 0
        where = f"chunk {half.chunk} of exchange {half.number} of {half.asker} with {half.server}"
        if other.by == i:
            raise BrokenPromise(NOTHING_LOST, f"engine {i} has merged {where} twice")
        if other.square != half.square:
            raise BrokenPromise(NOTHING_LOST, f"{where}: the two sides have merged different models (squared "
                                f"distances {other.square!r} and {half.square!r})")
        self.count -= 1
        other[0] = self.halves[self.count]
        return 0

    cdef Half* other_half(self, Half* half) noexcept:
        cdef int64_t h
        cdef Half* other
        for h in range(self.count):
            other = &self.halves[h]
            if (other.asker == half.asker and other.server == half.server and other.number == half.number
                    and other.chunk == half.chunk):
                return other
        return NULL

    cdef void keep(self, Half* half) noexcept:
        if self.count == self.room:
            self.room = max(64, 2 * self.room)
            self.halves = <Half*>realloc(self.halves, self.room * sizeof(Half))
        self.halves[self.count] = half[0]
        self.count += 1

    cdef int check_halves(self, object dead, object suspected=()) except -1:
        """Check, at the end of a run, that both sides have merged each chunk.

        A side may lack the chunks in flight if it has crashed, was silent to the end, or one of the two sides
        has taken the other for failed (`suspected`: pairs of engine and peer)."""
        cdef int64_t h
        cdef Half* half
        count = {}
        for h in range(self.count):
            half = &self.halves[h]
            where = f"exchange {half.number} of {half.asker} with {half.server}"
            if not (dead[half.asker] or dead[half.server] or (half.asker, half.server) in suspected
                    or (half.asker, half.server, half.number) in self.abandoned):
                raise BrokenPromise(NOTHING_LOST, f"only engine {half.by} has merged chunk {half.chunk} of {where}, "
                                    "and both engines live")
            key = (half.asker, half.server, half.number, half.by)
            count[key] = count.get(key, 0) + 1
            if count[key] > LANES:
                raise BrokenPromise(NOTHING_LOST, f"engine {half.by} alone has merged more than {LANES} chunks of {where}")
        return 0

    cdef double allowed(self, int chunk) noexcept:
        """Return the largest error of the sum of a chunk over all models that one-sided merges can cause."""
        cdef int64_t h
        cdef double total = 0
        for h in range(self.count):
            if self.halves[h].chunk == chunk:
                total += sqrt(self.halves[h].square)
        return total

    cdef int same(self, dict seen, object key, object found, str what) except -1:
        """Check that a result equals that of the first engine that found it."""
        first = seen.setdefault(key, found)
        if first != found:
            raise BrokenPromise(ONE_DECISION, f"{what} {key} is {found!r} on one engine and {first!r} on another")
        return 0
