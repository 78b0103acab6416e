# A small job of which an explorer chooses each event: its engines and trainers, and the events that are
# possible.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd.engine.loop cimport Rhythm
from hvd_adpsgd_lab.simulation.choices cimport MOST_ENGINES, Choices, Line, Wires
from hvd_adpsgd_lab.simulation.ledger cimport Ledger

cdef enum:
    SLOTS = 3               # slots of a store whose super learner has several learners

cdef struct Learner:        # an engine with its trainer
    Core* core
    Rhythm rhythm
    int place               # position in the trainer's script
    int64_t step
    double credit           # the credit that the engine must have
    int64_t begun           # exchanges that have begun
    int rushed              # deadlines that have passed although another event was possible


cdef class SmallJob:
    cdef int n
    cdef Wires between
    cdef Choices choices
    cdef Learner learners[MOST_ENGINES]
    cdef list wires
    cdef list clocks
    cdef list loops
    cdef list stores
    cdef list scripts
    cdef list schedules
    cdef object areas           # (engines, 5, chunks): mirror, slots, parameters
    cdef object full            # (engines, 3, chunks)
    cdef object common          # (engines, bytes): their shared memory, or None
    cdef object seen_lives      # (engines, bytes): the Live of each chunk, or None
    cdef object spans
    cdef list addresses
    cdef double* numbers
    cdef Ledger ledger
    cdef double* expected       # by chunk: what the sum over engines would be without exchanges
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
    cdef int deeds[4 * MOST_ENGINES]
    cdef int actors[4 * MOST_ENGINES]
    cdef Line* story

    cdef int reset(self) except -1
    cdef int add(self, int i) except -1
    cdef double* parameters(self, int i) noexcept
    cdef void drop(self)
    cdef bint rests(self) noexcept
    cdef int list_options(self, int* timed, int* deadlines) noexcept
    cdef bint lives(self, int i) noexcept
    cdef bint may_act(self, int i) noexcept
    cdef int fail(self, promise, what) except -1
