# cython: language_level=3
# Why compiled: it goes through millions of states.
"""Every interleaving of a few engines: a depth-first search through the states of a small job.

The engines are those that train. Their state is not copied: a path of choices leads to a state, and is taken again
from the beginning for each of its other ways on. What has been seen is known by a digest of 64 bits of all that an
engine, its store, its trainer and the network can depend on. Time passes when nothing else can happen, and a given
number of times before.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from hvd_adpsgd.simulation.ledger import BrokenPromise
from hvd_adpsgd.simulation.small_job import KINDS

from hvd_adpsgd.simulation.choices cimport *
from hvd_adpsgd.simulation.deeds cimport happen
from hvd_adpsgd.simulation.digests cimport Seen, add_seen, mixed
from hvd_adpsgd.simulation.small_digest cimport digest_job
from hvd_adpsgd.simulation.small_job cimport SmallJob
from hvd_adpsgd.simulation.small_promises cimport check_end, check_state

SURVIVES = "promise 4 (survives)"
ENDS_ALL = "promise 6 (ends)"

cdef enum:
    SAMPLE = 64             # one of so many states is compared when it is reached again


cdef class Explorer(SmallJob):
    """The search through the states of a job; arguments as of SmallJob."""

    cdef Seen seen
    cdef int at                 # position of the choice of the last state
    cdef readonly int64_t states
    cdef readonly int64_t transitions
    cdef int64_t runs
    cdef readonly int64_t compared
    cdef dict nexts

    def __cinit__(self, *args, **kwargs):
        self.nexts = {}

    def __dealloc__(self):
        free(self.seen.slots)

    cdef int run(self) except -1:
        """Take the path again, and go on until a state has been seen before."""
        cdef Choices* c = &self.choices
        cdef int known
        self.reset()
        self.at = -1
        self.runs += 1
        while True:
            if c.next_one == c.count:
                known = self.arrived()
                if known < 0:
                    return 0
            self.at = c.next_one
            c.next_one += 1
            self.between.optional = False
            happen(self, &c.made[self.at])

    cdef int arrived(self) except -2:
        """In a state at the end of the path: -1 if nothing new begins here."""
        cdef Choices* c = &self.choices
        cdef uint64_t digest = digest_job(self)
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
            check_state(self)
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
            check_end(self)
        return 0 if self.open_state(digest) else -1

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

    cdef int check_cycle(self, uint64_t digest) except -1:
        """No state leads back to itself: then whoever waits does so for ever, or the search has forgotten something."""
        cdef int k
        for k in range(self.at):
            if self.choices.made[k].state and self.choices.made[k].digest == digest:
                self.fail(ENDS_ALL, f"a way leads back to a state: {self.describe()}")
        return 0

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

    @property
    def deepest(self):
        """Choices of the longest path."""
        return self.choices.deepest

    def told(self):
        """The story of the path."""
        self.story = <Line*>calloc(MOST_LINES, sizeof(Line))
        try:
            self.run()
        except BrokenPromise:
            pass
        return [line_of(&self.story[i], self.scripts) for i in range(self.between.lines)]


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


cdef object line_of(Line* line, scripts):
    if line.deed == TAKES or line.deed == SENDS:
        way = "from" if line.deed == TAKES else "to"
        what = f"{KINDS[line.what]} {line.number}" if line.what else "a chunk"
        return f"  {line.who}   {DEEDS[line.deed]} {what} {way} {line.peer}"
    if line.deed == MERGES:
        return f"  {line.who}   merges chunk {line.what} of exchange {line.number} with {line.peer}"
    return f"  {line.who} {DEEDS[line.deed]}{f' {line.peer}' if line.peer >= 0 else ''}"
