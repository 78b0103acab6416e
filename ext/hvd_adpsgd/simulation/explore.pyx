# cython: language_level=3
# Why compiled: it takes the turns of the engines millions of times, and reads their state after each.
"""Every interleaving of a few engines: a depth-first search through the states of a small job.

The engines are those that train. Their state is not copied: a path of choices leads to a state, and is taken again
from the beginning for each of its other ways on. What has been seen is known by a digest of 64 bits of all that an
engine, its store, its trainer and the network can depend on.

In each state one of these happens: an engine takes a turn (in which its wire makes further choices), a trainer takes
the next step of its script, an engine crashes, or time passes for an engine. Time is abstract: retries are due, the
patience of an engine with the answers to its goodbye is over, or so much passes that deadlines may be over. It passes
when nothing else can happen, and a given number of times before.
"""

from libc.math cimport sqrt
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import numpy as np

from hvd_adpsgd.simulation.ledger import NOTHING_LOST, ONE_DECISION, BrokenPromise

from hvd_adpsgd.engine.core cimport (ASKED, BROKEN, BYE, BYE_SEEN, CLOSING, IDLE, LANES, NEWS, RUNNING, SETS, STAMP, Core,
                                     Exchange, Message)
from hvd_adpsgd.engine.loop cimport OVER, Loop, Rest, Rhythm, begin_turns, end_turns, turn
from hvd_adpsgd.engine.membership cimport ALIVE, FAILED, LEFT, SUSPECT, Listener, Membership, has_departed, listener_of
from hvd_adpsgd.engine.port cimport EVENT_MERGED, NO_STEP, Event, load
from hvd_adpsgd.engine.store cimport Store, chunk_at, memory_snapshot
from hvd_adpsgd.engine.wire cimport CONTROL
from hvd_adpsgd.simulation.choices cimport *
from hvd_adpsgd.simulation.digests cimport (LANE_NBYTES, PAUSE_S, TICK_S, Seen, add_seen, digest_engine,
                                            digest_memory, digest_messages, is_recent, mixed, mixed_bytes)
from hvd_adpsgd.simulation.ledger cimport Half, Ledger
from hvd_adpsgd.simulation.leftovers cimport take_back
from hvd_adpsgd.simulation.promises cimport wrong_exchanges, wrong_leave

SURVIVES = "promise 4 (survives)"
ENDS_ALL = "promise 6 (ends)"

cdef enum:
    MOST_MERGES = 64        # in one turn
    SLOTS = 3               # of a store whose node has several learners
    FLOAT64 = 1             # code of kernels.h
    SAMPLE = 64             # one of so many states is compared when it is reached again

cdef double DEADLINE_S = 1.0


cdef struct Learner:
    Core* core
    Rhythm rhythm
    int place               # in its script
    int64_t step
    double credit           # as it must be
    int64_t begun           # exchanges
    int rushed              # deadlines that have passed while something else could happen


# ---- the job -------------------------------------------------------------------------------

cdef class Explorer:
    """A job of two to four engines, and the search through its states.

    Args:
        scripts: of each trainer: what it does, in this order, at any time. `o`: the step's update, corrections and
            offer of the model; `p`: the open slot is published, and the all-reduce of the node begins; the next `o`
            ends it; `z`: averaging is paused; `r`: it continues, once the engine is at rest; `l`: it leaves; `b`:
            ... as failed.
        schedules: of each engine: whom it asks.
        chunks: of the model; each is one number.
        lanes: chunks of an exchange in flight.
        weight: of an exchange.
        completion: 0: sends are complete at once; 1: with their receipt; 2: at any time.
        shared: snapshots are in memory that all share.
        shown: ... and models are, and read where they lie.
        crashes, suspicions: at most so many.
        retries, deadlines: how often such time passes while something else can happen.
        ends: the end of an engine that has left is reported to the others.
    """

    cdef int n
    cdef Wires between
    cdef Choices choices
    cdef Seen seen
    cdef Learner learners[MOST_ENGINES]
    cdef list wires
    cdef list clocks
    cdef list loops
    cdef list stores
    cdef list scripts
    cdef list schedules
    cdef object areas           # (engines, 5, chunks): mirror, slots, parameters
    cdef object full            # (engines, 3, chunks)
    cdef object common          # (engines, bytes), or None
    cdef object seen_lives      # (engines, bytes): Live of each chunk, or None
    cdef object spans
    cdef list addresses
    cdef double* numbers
    cdef Ledger ledger
    cdef double* expected       # sum over engines of each chunk, without exchanges
    cdef int chunks
    cdef int lanes
    cdef double weight
    cdef int crashes
    cdef int suspicions
    cdef int retries
    cdef int deadlines
    cdef int crashes_left
    cdef int retries_left
    cdef int deadlines_left
    cdef int at                 # position of the choice of the last state
    cdef int deeds[4 * MOST_ENGINES]
    cdef int actors[4 * MOST_ENGINES]
    cdef readonly int64_t states
    cdef readonly int64_t transitions
    cdef readonly int64_t runs
    cdef readonly int64_t ends
    cdef readonly int64_t compared
    cdef dict nexts
    cdef Line* story

    def __cinit__(self, scripts, schedules, int chunks=2, int lanes=1, double weight=0.5, int completion=0,
                  bint shared=False, bint shown=False, int crashes=0, int suspicions=0, int retries=0, int deadlines=0, bint ends=False):
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
        self.seen_lives = np.zeros((self.n, Store.live_nbytes(chunks)), np.uint8) if shown else None
        self.numbers = <double*><uintptr_t>self.areas.ctypes.data
        self.spans = np.array([[c, 0, c, 0, 1] for c in range(chunks)], np.int64)
        self.addresses = [self.areas[i, SLOTS + 1].ctypes.data + 8 * np.arange(chunks, dtype=np.uintp)
                          for i in range(self.n)]
        self.expected = <double*>calloc(chunks, sizeof(double))
        self.ledger = Ledger()
        self.nexts = {}
        self.loops, self.stores = [], []

    def __dealloc__(self):
        free(self.choices.made)
        free(self.seen.slots)
        free(self.expected)
        free(self.story)

    # ---- a run -----------------------------------------------------------------------------

    cdef int reset(self) except -1:
        """The job before anything has happened."""
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
        if self.seen_lives is not None:
            self.seen_lives.fill(0)
        memset(self.expected, 0, self.chunks * sizeof(double))
        for i in range(self.n):
            f.now_s[i] = 1.0                # not 0, which a goodbye takes for "not leaving"
            self.add(i)
        self.choices.next_one = 0
        self.at = -1
        self.runs += 1
        return 0

    cdef int add(self, int i) except -1:
        cdef Learner* a = &self.learners[i]
        cdef Store chunks = Store(SLOTS)
        cdef Loop loop = Loop(self.wires[i], self.clocks[i], chunks, self.schedules[i], self.weight, 1.0, -1, False,
                              DEADLINE_S, DEADLINE_S, LANE_NBYTES, False)
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
            at = self.common.ctypes.data
            size = self.common.shape[1]
            loop.share(at + i * size, [at + j * size if j != i else 0 for j in range(self.n)])
        if self.seen_lives is not None:
            lives = [each.ctypes.data for each in self.seen_lives]
            areas = [each.ctypes.data for each in self.areas]
            chunks.show(lives[i], areas[i])
            loop.show(*[[at * (j != i) for j, at in enumerate(each)] for each in (lives, areas)])
        self.loops.append(loop)
        self.stores.append(chunks)
        memset(a, 0, sizeof(Learner))
        a.core = self.between.cores[i] = &loop.core
        a.core.pairs.lanes = self.lanes
        a.core.port.events = <Event*>calloc(MOST_MERGES, sizeof(Event))     # each turn's; the engine frees them
        begin_turns(a.core, &a.rhythm)
        return 0

    cdef inline double* parameters(self, int i) noexcept:
        return self.numbers + ((SLOTS + 2) * i + SLOTS + 1) * self.chunks

    cdef void drop(self):
        """End the engines, and free what they keep for their wires."""
        cdef int i
        for i in range(len(self.loops)):
            take_back(self.learners[i].core)
        self.loops.clear()
        self.stores.clear()

    cdef int run(self) except -1:
        """Take the path again, and go on until a state has been seen before."""
        cdef Choices* c = &self.choices
        cdef int known
        self.reset()
        while True:
            if c.next_one == c.count:
                known = self.arrived()
                if known < 0:
                    return 0
            self.at = c.next_one
            c.next_one += 1
            self.between.optional = False
            self.happen(&c.made[self.at])

    cdef int arrived(self) except -2:
        """In a state at the end of the path: -1 if nothing new begins here."""
        cdef Choices* c = &self.choices
        cdef uint64_t digest = self.digest()
        cdef Choice* before = &c.made[self.at] if self.at >= 0 else NULL
        if before != NULL:
            self.transitions += not before.again
            before.nexts += mixed(37, digest)
            if digest == before.digest:
                if not self.advance(self.at):       # nothing has changed: the next way on begins here, too
                    return -1
                c.next_one = self.at
                return 0
            if before.taken < before.timed and not self.between.optional:
                before.moved = True
            before.waited |= before.taken >= before.timed
            self.check()
            if before.again:
                return -1
        if not add_seen(&self.seen, digest):
            self.check_cycle(digest)
            if digest % SAMPLE or digest not in self.nexts:
                return -1
            if not self.open_state(digest):
                return -1
            c.made[c.count - 1].again = True
            return 0
        self.states += 1
        if self.rests():
            self.ends += 1
            self.check_end()
        return 0 if self.open_state(digest) else -1

    cdef bint rests(self) noexcept:
        """Whether every trainer has done its script, and no engine is about to leave or in an exchange.

        But one that is parked may wait for ever, for a peer that takes this side for failed."""
        cdef Core* e
        cdef Exchange* x
        cdef int i
        for i in range(self.n):
            e = self.learners[i].core
            if not self.lives(i):
                continue
            if e.port.given.leaving or self.learners[i].place < len(self.scripts[i]):
                return False
            x = e.pairs.running
            while x != NULL:
                if not (x.parked and self.between.ends[x.peer].suspects[i]):
                    return False
                x = x.next_one
        return True

    cdef bint open_state(self, uint64_t digest):
        """The choice of what happens next. False if nothing can: all have ended."""
        cdef Choice* made
        cdef int timed, deadlines, options
        options = self.list_options(&timed, &deadlines)
        if options == 0:
            return False
        made = open_choice(&self.choices, options)
        made.state = True
        made.digest = digest
        made.timed = timed
        made.deadlines = deadlines
        made.early_retry = self.retries_left > 0
        made.early_deadline = self.deadlines_left > 0
        made.rests = self.rests()
        return True

    cdef int list_options(self, int* timed, int* deadlines) noexcept:
        """What can happen: turns and trainers, crashes, retries, deadlines."""
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
            if self.lives(i) and awaits_answers(e):
                self.deeds[count], self.actors[count] = PAUSE, i
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
        return script[a.place] != c"r" or load(&a.core.port.at_rest)

    # ---- what happens ----------------------------------------------------------------------

    cdef int happen(self, Choice* made) except -1:
        cdef int timed, deadlines, who, deed
        cdef bint moved = made.moved, rushed
        cdef int taken = made.taken
        self.list_options(&timed, &deadlines)
        deed, who = self.deeds[taken], self.actors[taken]
        tell(&self.between, deed, who, -1, 0, 0)
        if deed == TURN:
            self.take_turn(who)
        elif deed == TRAINER:
            self.act(who)
        elif deed == CRASH:
            self.crashes_left -= 1
            self.between.optional = True
            kill(&self.between, who)
        elif deed == RETRY:
            self.retries_left -= moved
            self.learners[who].core.pairs.ask_after = 0
        elif deed == PAUSE:
            self.retries_left -= moved
            self.between.now_s[who] += PAUSE_S
        else:
            rushed = moved or deadlines > timed
            self.deadlines_left -= rushed
            self.pass_deadline(who, rushed)
        if self.between.misuse != NULL:
            self.fail("the wire's contract", f"engine {who}: {self.between.misuse.decode()}")
        return 0

    cdef int pass_deadline(self, int who, bint rushed) except -1:
        if not rushed and not self.between.faulty and not self.is_unheard(who):
            before = self.digest()
            self.between.now_s[who] += TICK_S
            if self.digest() != before:
                self.fail(SURVIVES, f"engine {who} waits for a deadline, and nothing was silent or has failed: "
                          f"{self.describe()}")
        else:
            self.between.now_s[who] += TICK_S
        self.learners[who].rushed += rushed
        self.between.faulty |= self.learners[who].rushed > 1        # once is half of its time to leave: CUT, no more
        return 0

    cdef bint is_unheard(self, int i) noexcept:
        """Whether an engine has said goodbye to those only that are over, and waits in half of its time to leave."""
        cdef Membership* m = &self.learners[i].core.membership
        cdef int k, peer
        if not m.said_goodbye or m.end_at > 0:
            return False
        for k in range(m.nlisteners):
            peer = m.listeners[k].peer
            if m.states[peer] <= SUSPECT and not (m.mute[peer] and self.between.over[peer]):
                return False
        return True

    cdef int take_turn(self, int i) except -1:
        cdef Learner* a = &self.learners[i]
        cdef Core* e = a.core
        cdef Rest rest = turn(e, &a.rhythm)
        cdef Event* event
        while e.port.events_read < e.port.events_written:
            event = &e.port.events[e.port.events_read]
            if event.kind == EVENT_MERGED:
                tell(&self.between, MERGES, i, event.peer, event.chunk, event.number)
                self.ledger.merged(i, event)
            e.port.events_read += 1
        e.port.events_read = e.port.events_written = 0
        self.take_credit(a)
        if rest == OVER:
            tell(&self.between, ENDS, i, -1, 0, 0)
            self.check_over(i)
            end_turns(e)
            end(&self.between, i)
        return 0

    cdef int act(self, int i) except -1:
        """The next step of the script."""
        cdef Learner* a = &self.learners[i]
        cdef Core* e = a.core
        cdef Store chunks = self.stores[i]
        cdef int deed = (<bytes>self.scripts[i])[a.place]
        a.place += 1
        if deed == c"o":
            self.end_step(i)
        elif deed == c"p":
            chunks.publish()
        elif deed == c"z" or deed == c"r":
            self.loops[i].pause(deed == c"z")
        else:
            e.port.given.broken = deed == c"b"
            e.port.given.leaving = True
        return 0

    cdef int end_step(self, int i) except -1:
        cdef Learner* a = &self.learners[i]
        cdef Store chunks = self.stores[i]
        cdef double* parameters = self.parameters(i)
        cdef int c
        for c in range(self.chunks):
            parameters[c] += 64.0 * (i + 1)
            self.expected[c] += 64.0 * (i + 1)
        chunks.absorb(self.spans, self.addresses[i], chunks.published, a.step)
        self.loops[i].offer(a.step, True)
        a.credit = min(a.credit + 1.0, 1.0)
        a.step += 1
        return 0

    # ---- the search ------------------------------------------------------------------------

    def explore(self, progress=None, int64_t every=20000):
        """Every state.

        Args:
            progress: called with this, after so many runs each.

        Raises:
            BrokenPromise: with the story of the path that leads there.
        """
        cdef bint more = True
        try:
            while more:
                self.run()
                more = self.advance(0)
                if progress is not None and self.runs % every == 0:
                    progress(self)
        except BrokenPromise as broken:
            what = str(broken).removeprefix(f"{broken.promise}: ")
            raise BrokenPromise(broken.promise, "\n".join([what, *self.told()])) from None
        finally:
            self.drop()

    cdef bint advance(self, int least) except -1:
        """The next path that differs from this one at `least` or later; False if there is none."""
        cdef Choices* c = &self.choices
        cdef Choice* last
        while c.count > least:
            last = &c.made[c.count - 1]
            if last.taken + 1 < last.options and permitted(last):
                last.taken += 1
                return True
            c.count -= 1
            if last.state and last.digest % SAMPLE == 0:
                self.compare(last)
            if last.state and not last.moved and not last.waited and not last.rests:
                self.fail(SURVIVES, f"nothing can happen: {self.describe()}")
        return False

    cdef int compare(self, Choice* state) except -1:
        """Of a sample: a state reached on another way has the same next ones, so the digest has forgotten nothing."""
        cdef uint64_t found = state.nexts
        if not state.again:
            self.nexts[state.digest] = found
        else:
            self.compared += 1
            if self.nexts.pop(state.digest) != found:
                self.fail("the explorer", "two ways lead to one digest, and go on to different ones")
        return 0

    cdef uint64_t digest(self) noexcept:
        cdef uint64_t h = 23
        cdef Wires* f = &self.between
        cdef Core* e
        cdef int i
        for i in range(self.n):
            h = mixed(h, (<uint64_t>self.learners[i].place << 2) + (f.dead[i] << 1) + f.over[i])
            h = mixed(h, self.learners[i].rushed)
            e = self.learners[i].core
            if not f.dead[i]:
                h = mixed_bytes(h, self.parameters(i), self.chunks * sizeof(double))
                h = mixed(h, digest_memory(e))
            if self.lives(i):
                h = mixed(h, digest_engine(e))
            h = mixed_bytes(mixed_bytes(h, f.ends[i].down, self.n), f.ends[i].told, self.n)
            h = mixed_bytes(h, f.ends[i].suspects, self.n)
        h = mixed(h, (<uint64_t>f.suspicions << 16) + (self.crashes_left << 8) + f.faulty)
        h = mixed(h, (<uint64_t>self.retries_left << 8) + self.deadlines_left)
        h = mixed(mixed(h, digest_messages(f)), self.digest_ledger())
        return mixed(h, self.digest_common()) if self.common is not None else h

    cdef uint64_t digest_ledger(self) noexcept:
        cdef uint64_t total = 0, h
        cdef Half* half
        cdef int64_t i
        for i in range(self.ledger.count):
            half = &self.ledger.halves[i]
            h = mixed(mixed(29, (<uint64_t>half.asker << 8) + half.server), (<uint64_t>half.number << 16) + half.chunk)
            total += mixed_bytes(mixed(h, half.by), &half.square, sizeof(double))
        return total

    cdef uint64_t digest_common(self) noexcept:
        """Shared memory of exchanges; after a failure also that which a late reader may find."""
        cdef int64_t nbytes = 2 * LANES * (LANE_NBYTES + STAMP)
        cdef uint64_t h = 31
        cdef int i, s
        for i in range(self.n):
            for s in range(SETS):
                if self.between.faulty or self.learners[i].core.pairs.taken[s]:
                    h = mixed_bytes(mixed(h, s), self.learners[i].core.pairs.shared + s * nbytes, nbytes)
        return h

    # ---- promises --------------------------------------------------------------------------

    cdef int fail(self, promise, what) except -1:
        raise BrokenPromise(promise, what)

    cdef int check(self) except -1:
        """In every state: what must hold whatever has happened."""
        cdef Core* e
        cdef int i
        for i in range(self.n):
            if self.between.dead[i]:
                continue
            e = self.learners[i].core
            if e.port.fault:
                self.fail("no fault", f"engine {i} has latched fault {e.port.fault}, code {e.port.fault_code}, peer "
                          f"{e.port.fault_peer}")
            if not self.between.over[i]:
                self.check_exchanges(i, e)
                self.check_peers(i, e)
                self.check_transfers(i, e)
                if self.learners[i].credit != e.port.given.credit:
                    self.fail("invariant (credit)", f"engine {i} has {e.port.given.credit} after "
                              f"{self.learners[i].begun} exchanges; due is {self.learners[i].credit}")
        self.check_sum()
        return 0

    cdef int check_exchanges(self, int i, Core* e) except -1:
        """As in every job; and no more chunks in flight than are wanted, and no set of buffers without an exchange."""
        cdef Exchange* x = e.pairs.running
        cdef int k, taken = 0
        wrong = wrong_exchanges(i, e)
        if wrong is not None:
            promise, what = wrong
            self.fail(promise, what)
        while x != NULL:
            taken += x.set >= 0
            if x.phase == RUNNING and x.next - x.done > e.pairs.lanes:
                self.fail("invariant (lanes)", f"engine {i} has {x.next - x.done} chunks in flight to {x.peer}")
            x = x.next_one
        for k in range(SETS):
            taken -= e.pairs.taken[k]
        if taken:
            self.fail("invariant (buffers)", f"engine {i}: {-taken} sets are taken and of no exchange")
        return 0

    cdef int check_transfers(self, int i, Core* e) except -1:
        """Without an exchange the wire has no chunk and no buffer of this engine, but the one for control messages."""
        cdef Wires* f = &self.between
        cdef int k, count = f.ends[i].nposted - 1
        if e.pairs.running != NULL:
            return 0
        for k in range(f.nmessages):
            count += f.messages[k].src == i and f.messages[k].sending != NULL and f.messages[k].channel != CONTROL
        if count:
            self.fail("invariant (no transfer left)", f"engine {i} has no exchange, and the wire uses "
                      f"{count} buffers of it")
        return 0

    cdef int check_peers(self, int i, Core* e) except -1:
        """Who is taken for failed has failed, or was suspected; who is taken for one that left has said goodbye."""
        cdef int j
        for j in range(self.n):
            if j != i and has_departed(e.membership.departed, j) and not self.learners[j].core.membership.said_goodbye:
                self.fail("invariant (goodbye)", f"engine {i} takes {j} for one that has left; it has not said so")
            if e.membership.states[j] == FAILED and not self.between.dead[j] and not self.between.ends[i].suspects[j] \
                    and not self.between.over[j]:
                self.fail(ONE_DECISION, f"engine {i} takes {j} for failed, which lives")
        return 0

    cdef void take_credit(self, Learner* a) noexcept:
        """Every exchange takes one when it begins, whoever asked."""
        cdef Core* e = a.core
        cdef Exchange* x = e.pairs.running
        cdef int64_t begun = (e.port.counters.exchanges_active + e.port.counters.exchanges_passive
                              + e.port.counters.broken)
        while x != NULL:
            begun += x.phase == RUNNING or x.phase == CLOSING
            x = x.next_one
        while a.begun < begun:
            a.begun += 1
            a.credit = max(a.credit - 1.0, -2.0)

    cdef int check_sum(self) except -1:
        """The sum of all models has moved by local updates only, but for chunks that one side has merged so far."""
        cdef double total, allowed
        cdef int64_t h
        cdef int c
        for c in range(self.chunks):
            total = self.sum_of(c)
            allowed = 0
            for h in range(self.ledger.count):
                if self.ledger.halves[h].chunk == c:
                    allowed += self.weight * sqrt(self.ledger.halves[h].square)
            if not abs(total - self.expected[c]) <= allowed:
                self.fail(NOTHING_LOST, f"the sum of chunk {c} is off by {total - self.expected[c]}, allowed are "
                          f"{allowed}")
        return 0

    cdef double sum_of(self, int c) noexcept:
        cdef double total = 0, number
        cdef Core* e
        cdef int i
        cdef int64_t step
        for i in range(self.n):
            e = self.learners[i].core
            if chunk_at(e.memory, c).step >= 0:
                memory_snapshot(e.memory, c, -1, False, False, &number, NULL, &step)
                total += number
            else:
                total += self.parameters(i)[c]
        return total

    cdef int check_cycle(self, uint64_t digest) except -1:
        """No state leads back to itself: then whoever waits does so for ever, or the search has forgotten something."""
        cdef int k
        for k in range(self.at):
            if self.choices.made[k].state and self.choices.made[k].digest == digest:
                self.fail(ENDS_ALL, f"a way leads back to a state: {self.describe()}")
        return 0

    cdef int check_over(self, int i) except -1:
        """Who has left in time is known to have left, and holds nothing."""
        cdef Core* e = self.learners[i].core
        cdef Wires* f = &self.between
        wrong = wrong_leave(i, e, f.now_s[i], self.goodbye_is_known(i), self.ledger)
        if wrong is not None:
            promise, what = wrong
            self.fail(promise, what)
        if f.faulty:
            return 0
        if e.pairs.running != NULL or (e.control.outgoing == NULL and open_transfers(f, i) > 1):
            self.fail("invariant (no transfer left)", f"engine {i} has left with {open_transfers(f, i) - 1} posted")
        return self.check_unread(i, e)

    cdef int check_unread(self, int i, Core* e) except -1:
        """From who has answered its goodbye, nothing but departures is on its way to an engine that ends."""
        cdef Underway* message
        cdef Listener* listener
        cdef int k
        for k in range(self.between.nmessages):
            message = &self.between.messages[k]
            listener = listener_of(&e.membership, message.src)
            if (message.dst == i and listener != NULL and listener.acknowledged >= e.membership.owed
                    and not tells_departures(message)):
                self.fail("invariant (goodbye)", f"engine {i} has left, and a message of {message.src} is on its way "
                          "to it")
        return 0

    cdef bint goodbye_is_known(self, int i) noexcept:
        """Whether some engine knows of it, or none is there that answers."""
        cdef Membership* m = &self.learners[i].core.membership
        cdef int j
        cdef bint alone = True
        for j in range(self.n):
            if j != i and has_departed(self.learners[j].core.membership.departed, i):
                return True
            if j != i and self.lives(j):
                alone = alone and (m.states[j] > SUSPECT or m.mute[j])
        return alone

    cdef int check_end(self) except -1:
        """All have ended: trainers have taken every step, and no chunk has one side only, unless the other failed."""
        cdef Wires* f = &self.between
        cdef Half* half
        cdef int64_t h
        cdef int i
        for i in range(self.n):
            if not f.dead[i] and self.learners[i].place < len(self.scripts[i]):
                self.fail(SURVIVES, f"engine {i} has ended before its trainer")
        count = {}
        for h in range(self.ledger.count):
            half = &self.ledger.halves[h]
            key = (half.asker, half.server, half.number)
            if f.ends[half.asker].suspects[half.server] or f.ends[half.server].suspects[half.asker]:
                self.ledger.abandoned.add(key)
            count[key] = count.get(key, 0) + 1
            if count[key] > self.lanes:
                self.fail(NOTHING_LOST, f"engine {half.by} alone has merged {count[key]} chunks of exchange "
                          f"{half.number} of {half.asker} with {half.server}")
        self.ledger.check_halves([bool(f.dead[i]) for i in range(self.n)])
        return 0

    def covering(self):
        """How often each control message, and each failure, came in each state of the exchange with that peer."""
        return {(STATE_NAMES[i // MESSAGES], KINDS[i % MESSAGES]): self.between.coverage[i]
                for i in range(STATES * MESSAGES) if self.between.coverage[i]}

    @property
    def deepest(self):
        """Choices of the longest path."""
        return self.choices.deepest

    # ---- what has happened -----------------------------------------------------------------

    def describe(self):
        """Each engine in a line."""
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

    def told(self):
        """The story of the path."""
        self.story = <Line*>calloc(MOST_LINES, sizeof(Line))
        try:
            self.run()
        except BrokenPromise:
            pass
        return [line_of(&self.story[i], self.scripts) for i in range(self.between.lines)]


cdef bint has_peers(Core* e) noexcept nogil:
    cdef int i
    for i in range(e.wire.size):
        if i != e.wire.rank and e.membership.states[i] == ALIVE:
            return True
    return False


cdef bint awaits_answers(Core* e) noexcept nogil:
    """Whether it makes a difference that a pause passes: for answers to what listeners were told, or before the end."""
    cdef Membership* m = &e.membership
    cdef int i
    for i in range(m.nlisteners):
        if m.listeners[i].acknowledged < m.listeners[i].sent and is_recent(e, m.listeners[i].told_at):
            return True
    return m.end_at > e.clock.now(e.clock)


cdef bint tells_departures(Underway* m) noexcept nogil:
    cdef int kind = (<const Message*>content_of(m)).kind
    return m.channel == CONTROL and (kind == BYE or kind == NEWS or kind == BYE_SEEN)


cdef bint permitted(Choice* made) noexcept nogil:
    """Whether a state has its next option: time passes when nothing else can happen, or when it is to."""
    cdef int option = made.taken + 1
    if not made.state or option < made.timed:
        return True
    if option < made.deadlines:
        return not made.moved or made.early_retry
    return (not made.moved and made.deadlines == made.timed) or made.early_deadline


DEEDS = ("takes a turn", "trainer", "crashes", "retries are due", "time passes", "takes", "sends", "finds down",
         "merges", "has left", "has no more patience")
STATE_NAMES = ("none", "asked", "running", "held", "parked", "closing", "closing, parked", "broken")
KINDS = ("failure", "ASK", "YES", "NO", "BYE", "NEWS", "BYE_SEEN", "CUT", "CUT_SEEN")


cdef object line_of(Line* line, scripts):
    if line.deed == TAKES or line.deed == SENDS:
        way = "from" if line.deed == TAKES else "to"
        what = f"{KINDS[line.what]} {line.number}" if line.what else "a chunk"
        return f"  {line.who}   {DEEDS[line.deed]} {what} {way} {line.peer}"
    if line.deed == MERGES:
        return f"  {line.who}   merges chunk {line.what} of exchange {line.number} with {line.peer}"
    return f"  {line.who} {DEEDS[line.deed]}{f' {line.peer}' if line.peer >= 0 else ''}"
