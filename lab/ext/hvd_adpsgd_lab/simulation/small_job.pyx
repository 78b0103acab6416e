# cython: language_level=3
# Why compiled: it makes the engines of each path anew, and reads the state of all of them in each state of
# the job.
"""A small job of which an explorer chooses each event: two to four engines with their trainers.

The possible events in a state are: an engine takes a turn (in which its wire makes further choices), a
trainer takes the next step of its script, an engine crashes, or time passes for an engine. Time is abstract:
either a retry becomes due, or an engine waits no longer for answers to its departure, or deadlines may be
over.
"""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import numpy as np

from hvd_adpsgd.engine.engine_options import EngineOptions
from hvd_adpsgd_lab.simulation.ledger import BrokenPromise

from hvd_adpsgd.engine.core cimport Core, Exchange
from hvd_adpsgd.engine.loop cimport Loop, begin_turns
from hvd_adpsgd.engine.core cimport ALIVE
from hvd_adpsgd.engine.mailbox cimport Event, load
from hvd_adpsgd.engine.store cimport Store
from hvd_adpsgd_lab.simulation.choices cimport *
from hvd_adpsgd_lab.simulation.digests cimport LANE_NBYTES
from hvd_adpsgd_lab.simulation.ledger cimport Ledger
from hvd_adpsgd_lab.simulation.leftovers cimport take_back

cdef enum:
    MOST_MERGES = 64        # merged chunks of one turn, at most
    FLOAT64 = 1             # code of kernels.h

cdef double DEADLINE_S = 1.0

STATE_NAMES = ("none", "asked", "running", "held", "parked", "closing", "closing, parked", "broken")
KINDS = ("failure", "ASK", "YES", "NO", "BYE", "BYE_SEEN", "CUT", "CUT_SEEN")


cdef class SmallJob:
    """A job of two to four engines with their trainers, of which an explorer chooses each event.

    Args:
        scripts: what each trainer does, in this order, at any time. `o`: do the step's update, apply
            corrections and offer the model; `p`: publish the open slot and begin the all-reduce of the super
            learner, which the next `o` ends; `z`: pause averaging; `r`: resume averaging, once the engine is
            at rest; `l`: leave; `b`: leave as failed.
        schedules: the peers that each engine asks, in this order.
        chunks: chunks of the model; each is one number.
        lanes: chunks of one exchange in flight at once.
        weight: weight of an exchange.
        completion: when sends are complete; 0: at once; 1: at their receipt; 2: at any time.
        shared: engines read each other's models in shared memory.
        crashes, suspicions: how many there may be.
        retries, deadlines: how often such time may pass although another event is possible.
        ends: wires report the end of an engine that has left.
    """

    def __cinit__(self, scripts, schedules, int chunks=2, int lanes=1, double weight=0.5, int completion=0,
                  bint shared=False, int crashes=0, int suspicions=0, int retries=0, int deadlines=0, bint ends=False):
        cdef int i
        self.n = len(scripts)
        self.scripts = [script.encode() for script in scripts]
        self.schedules = [np.array(schedule, np.intc) for schedule in schedules]
        self.chunks, self.lanes, self.weight = chunks, lanes, weight
        self.crashes, self.suspicions, self.retries, self.deadlines = crashes, suspicions, retries, deadlines
        self.between.n = self.n
        self.between.choices = &self.choices
        self.between.completion = <Completion>completion
        self.between.ends_are_found = ends
        self.wires = [wire_of(&self.between, i) for i in range(self.n)]
        self.clocks = [clock_of(&self.between, i) for i in range(self.n)]
        self.areas = np.zeros((self.n, SLOTS + 2, chunks))
        self.full = np.zeros((self.n, SLOTS, chunks), np.uint8)
        self.common = np.zeros((self.n, Loop.shared_nbytes(LANE_NBYTES)), np.uint8) if shared else None
        self.seen_lives = np.zeros((self.n, Store.live_nbytes(chunks)), np.uint8) if shared else None
        self.numbers = <double*><uintptr_t>self.areas.ctypes.data
        self.spans = np.array([[c, 0, c, 0, 1] for c in range(chunks)], np.int64)
        self.addresses = [self.areas[i, SLOTS + 1].ctypes.data + 8 * np.arange(chunks, dtype=np.uintp)
                          for i in range(self.n)]
        self.expected = <double*>calloc(chunks, sizeof(double))
        self.ledger = Ledger()
        self.loops, self.stores = [], []

    def __dealloc__(self):
        free(self.choices.made)
        free(self.expected)
        free(self.story)

    cdef int reset(self) except -1:
        """Set the job to its first state."""
        cdef Wires* f = &self.between
        cdef int i
        self.drop()
        memset(f.ends, 0, sizeof(f.ends))
        memset(f.dead, 0, sizeof(f.dead))
        memset(f.over, 0, sizeof(f.over))
        f.nmessages = f.lines = 0
        f.suspicions = self.suspicions
        f.optional = f.faulty = False
        f.misuse = NULL
        f.story = self.story
        self.crashes_left, self.retries_left, self.deadlines_left = self.crashes, self.retries, self.deadlines
        self.ledger.count = 0
        self.ledger.abandoned.clear()
        memset(self.numbers, 0, self.n * (SLOTS + 2) * self.chunks * sizeof(double))
        self.full.fill(0)
        if self.common is not None:
            self.common.fill(0)
            self.seen_lives.fill(0)
        memset(self.expected, 0, self.chunks * sizeof(double))
        for i in range(self.n):
            f.now_s[i] = 1.0                # not 0, which a departure takes for "not leaving"
            self.add(i)
        self.choices.next_one = 0
        return 0

    cdef int add(self, int i) except -1:
        cdef Learner* a = &self.learners[i]
        cdef Store chunks = Store(SLOTS)
        cdef Loop loop = Loop(self.wires[i], self.clocks[i], chunks, self.schedules[i],
                              EngineOptions(self.weight, chunk_nbytes=LANE_NBYTES, deadline_s=DEADLINE_S,
                                            leave_deadline_s=DEADLINE_S))
        cdef double* mirror = self.numbers + i * (SLOTS + 2) * self.chunks
        cdef uintptr_t full = self.full.ctypes.data + SLOTS * i * self.chunks
        cdef int c, s
        for c in range(self.chunks):
            chunks.add_chunk(<uintptr_t>(mirror + c),
                             [<uintptr_t>(mirror + (1 + s) * self.chunks + c) for s in range(SLOTS)],
                             [full + s * self.chunks + c for s in range(SLOTS)], 1, FLOAT64)
            self.parameters(i)[c] = 1024.0 * (1 << (3 * i + c))
            self.expected[c] += self.parameters(i)[c]
        loop.extend(self.chunks, 17)
        if self.common is not None:
            own, lives, areas = [[each.ctypes.data for each in part]
                                 for part in (self.common, self.seen_lives, self.areas)]
            chunks.show(lives[i], areas[i])
            loop.share(own[i], *[[at * (j != i) for j, at in enumerate(each)] for each in (own, lives, areas)])
        self.loops.append(loop)
        self.stores.append(chunks)
        memset(a, 0, sizeof(Learner))
        a.core = self.between.cores[i] = &loop.core
        a.core.pairs.lanes = self.lanes
        a.core.mailbox.events = <Event*>calloc(MOST_MERGES, sizeof(Event))     # freed by the engine
        begin_turns(a.core, &a.rhythm)
        return 0

    cdef double* parameters(self, int i) noexcept:
        return self.numbers + ((SLOTS + 2) * i + SLOTS + 1) * self.chunks

    cdef void drop(self):
        """Free the engines, and the buffers that they keep for their wires."""
        cdef int i
        for i in range(len(self.loops)):
            take_back(self.learners[i].core)
        self.loops.clear()
        self.stores.clear()

    # ---- possible events -------------------------------------------------------------------

    cdef bint rests(self) noexcept:
        """Whether every trainer has done its script, and no engine is leaving or has an exchange.

        A parked exchange with a peer that takes this side for failed may wait for ever, and does not
        count."""
        cdef Core* e
        cdef Exchange* x
        cdef int i
        for i in range(self.n):
            e = self.learners[i].core
            if not self.lives(i):
                continue
            if e.mailbox.given.leaving or self.learners[i].place < len(self.scripts[i]):
                return False
            x = e.pairs.running
            while x != NULL:
                if not (x.parked and self.between.ends[x.peer].suspects[i]):
                    return False
                x = x.next_one
        return True

    cdef int list_options(self, int* timed, int* deadlines) noexcept:
        """List the possible events in `deeds` and `actors`, and return how many there are.

        Turns, trainers and crashes come first, retries and pauses from index `timed` on, deadlines from
        `deadlines` on."""
        cdef Core* e
        cdef int i, count = 0
        for i in range(self.n):
            if self.lives(i):
                self.deeds[count], self.actors[count] = TURN, i
                count += 1
                if self.may_act(i):
                    self.deeds[count], self.actors[count] = TRAINER, i
                    count += 1
        for i in range(self.n):
            if self.crashes_left and self.lives(i):
                self.deeds[count], self.actors[count] = CRASH, i
                count += 1
        timed[0] = count
        for i in range(self.n):
            e = self.learners[i].core
            if self.lives(i) and e.clock.now(e.clock) < e.pairs.ask_after and has_peers(e):
                self.deeds[count], self.actors[count] = RETRY, i
                count += 1
        deadlines[0] = count
        for i in range(self.n):
            if self.lives(i):
                self.deeds[count], self.actors[count] = DEADLINE, i
                count += 1
        return count

    cdef bint lives(self, int i) noexcept:
        return not self.between.dead[i] and not self.between.over[i]

    cdef bint may_act(self, int i) noexcept:
        cdef Learner* a = &self.learners[i]
        cdef const char* script = self.scripts[i]
        if a.place == len(<bytes>self.scripts[i]):
            return False
        return script[a.place] != c"r" or load(&a.core.mailbox.at_rest)

    # ---- results and errors ----------------------------------------------------------------

    cdef int fail(self, promise, what) except -1:
        raise BrokenPromise(promise, what)

    def covering(self):
        """Return how often each control message and each failure came in each state of an exchange."""
        return {(STATE_NAMES[i // MESSAGES], KINDS[i % MESSAGES]): self.between.coverage[i]
                for i in range(STATES * MESSAGES) if self.between.coverage[i]}

    def describe(self):
        """Return the state of each engine as text."""
        cdef Exchange* x
        cdef int i
        phases = ("idle", "asked", "running", "closing", "broken")
        lines = []
        for i in range(self.n):
            x = self.learners[i].core.pairs.running
            what = []
            while x != NULL:
                what.append(f"exchange {x.number} {'with' if x.active else 'of'} {x.peer} {phases[x.phase]}"
                            f"{', parked' if x.parked else ''}, {x.done} of {x.nchunks} chunks")
                x = x.next_one
            state = "dead" if self.between.dead[i] else "over" if self.between.over[i] else "; ".join(what) or "idle"
            lines.append(f"{i}: {state}")
        return " | ".join(lines)


cdef bint has_peers(Core* e) noexcept nogil:
    cdef int i
    for i in range(e.wire.size):
        if i != e.wire.rank and e.membership.states[i] == ALIVE:
            return True
    return False
