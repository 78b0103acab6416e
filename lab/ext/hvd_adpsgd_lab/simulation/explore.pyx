# cython: language_level=3
# Why compiled: it visits millions of states.
"""Exploration of every interleaving of a few engines: a depth-first search through the states of a small job.

The engines are those that also train. Their state is not copied: a path of choices leads to a state, and is
repeated from the beginning for each further option in that state. A state is recognised by a 64-bit digest of
all that the future of an engine, its store, its trainer and the network depends on. Time passes when no other
event is possible, and a given number of times before.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from hvd_adpsgd_lab.simulation.ledger import BrokenPromise
from hvd_adpsgd_lab.simulation.small_job import KINDS

from hvd_adpsgd_lab.simulation.choices cimport *
from hvd_adpsgd_lab.simulation.deeds cimport happen
from hvd_adpsgd_lab.simulation.digests cimport Seen, add_seen, mixed
from hvd_adpsgd_lab.simulation.small_digest cimport digest_job
from hvd_adpsgd_lab.simulation.small_job cimport SmallJob
from hvd_adpsgd_lab.simulation.small_promises cimport check_end, check_state

SURVIVES = "promise 4 (survives)"
ENDS_ALL = "promise 6 (ends)"

cdef enum:
    SAMPLE = 64             # one of so many states has its next states compared when it is reached again


cdef class Explorer(SmallJob):
    """A search through all states of a small job; arguments as for SmallJob."""

    cdef Seen seen
    cdef int at                 # position in the path of the last choice with `state`
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
        """Repeat the path from the beginning, and extend it until it reaches a state that was seen before."""
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
        """Process the state at the end of the path. Return -1 if the path ends here."""
        cdef Choices* c = &self.choices
        cdef uint64_t digest = digest_job(self)
        cdef Choice* before = &c.made[self.at] if self.at >= 0 else NULL
        if before != NULL:
            self.transitions += not before.again
            before.nexts += mixed(37, digest)
            if digest == before.digest:
                if not self.advance(self.at):       # nothing has changed: take the next option at once
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
        """Append the choice of the next event to the path.

        Return False if no event is possible: all have ended."""
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
        """Check that the path does not lead back to a state on it.

        If it does, an engine can wait for ever, or the digest lacks a part of the state."""
        cdef int k
        for k in range(self.at):
            if self.choices.made[k].state and self.choices.made[k].digest == digest:
                self.fail(ENDS_ALL, f"a path leads back to a state on it: {self.describe()}")
        return 0

    def explore(self, progress=None, int64_t every=20000):
        """Visit every state.

        Args:
            progress: called with this Explorer after every `every` runs.
            every: runs between two calls of `progress`.

        Raises:
            BrokenPromise: if a promise is broken, with the story of the path that leads there.
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
        """Change the path to the next one that differs from position `least` on; False if there is none."""
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
        """Check, for a sample of states, that a state has the same next states when another path reaches it.

        If not, the digest lacks a part of the state."""
        cdef uint64_t found = state.nexts
        if not state.again:
            self.nexts[state.digest] = found
        else:
            self.compared += 1
            if self.nexts.pop(state.digest) != found:
                self.fail("the explorer", "two paths lead to states with the same digest, and their next "
                          "states differ")
        return 0

    @property
    def deepest(self):
        """The number of choices in the longest path."""
        return self.choices.deepest

    def told(self):
        """Repeat the path, and return its story as a list of lines."""
        self.story = <Line*>calloc(MOST_LINES, sizeof(Line))
        try:
            self.run()
        except BrokenPromise:
            pass
        return [line_of(&self.story[i], self.scripts) for i in range(self.between.lines)]


cdef bint permitted(Choice* made) noexcept nogil:
    """Whether the next option of a choice may be taken.

    In a state, time may pass only if no other event is possible, or if early retries or deadlines are
    left."""
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
