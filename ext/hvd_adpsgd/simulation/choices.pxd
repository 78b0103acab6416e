# A wire and clocks for a few engines, whose open orders are choices that an explorer makes.
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd.engine.wire cimport AnyClock, AnyWire, Transfer

cdef enum:
    MOST_ENGINES = 4
    MOST_MESSAGES = 128     # on their way at once
    MOST_POSTED = 32        # receives of one engine
    MOST_NBYTES = 64        # of a message
    MOST_LINES = 65536      # of a story
    STATES = 8
    MESSAGES = 9
    NOT_YET = 0             # of a transfer's handle
    COMPLETE = 1
    OVERLONG = 2
    GIVEN = 3               # the receiver has the message, and the sender does not know

cdef enum Completion:       # when a send is complete
    AT_POST = 0             # the message is copied
    AT_RECEIPT = 1          # the receiver reads the sender's buffer; but control messages are copied
    AT_ANY_TIME = 2         # before, with or after its receipt

cdef struct Choice:
    int taken
    int options
    bint state              # what happens next, in a state; else how a call of the wire ends
    # of a state:
    uint64_t digest
    int timed               # its options from here on are time that passes,
    int deadlines           # ... from here on so much that deadlines may have passed
    bint early_retry        # time may pass also if something else can happen
    bint early_deadline
    bint moved              # something that must happen leads to another state
    bint waited             # time that passes does
    bint rests              # nothing need happen any more
    bint again              # reached on another way: its next states are compared with those found first
    uint64_t nexts          # digest of its next states

cdef struct Choices:        # of one run, from its beginning
    Choice* made
    int count
    int room
    int next_one            # position: those before it have been taken in this run
    int deepest

cdef struct Underway:       # a message that its receiver has not taken
    int src
    int dst
    int channel
    int nbytes
    Transfer* sending       # NULL: complete
    const void* source      # NULL: copied
    char copy[MOST_NBYTES]

cdef struct Posted:
    Transfer* transfer
    void* buffer
    int nbytes
    int src
    int channel

cdef struct End:            # what one engine sees of the network
    Posted posted[MOST_POSTED]
    int nposted
    char down[MOST_ENGINES]         # peers that have failed, as its wire knows
    char told[MOST_ENGINES]         # ... and next_failed has told
    char suspects[MOST_ENGINES]     # ... though they live

cdef enum Deed:             # of the story of a run
    TURN = 0
    TRAINER = 1
    CRASH = 2
    RETRY = 3               # time passes: retries are due
    DEADLINE = 4            # ... more of it: deadlines may be
    TAKES = 5
    SENDS = 6
    FINDS_DOWN = 7
    MERGES = 8
    ENDS = 9
    PAUSE = 10              # time passes: so much that the patience with answers to a departure is over

cdef struct Line:           # of the story
    int deed
    int who
    int peer
    int what
    int64_t number

cdef struct Wires:          # between all engines, and who lives
    int n
    Choices* choices
    Completion completion
    End ends[MOST_ENGINES]
    Underway messages[MOST_MESSAGES]        # in the order of their sends
    int nmessages
    char dead[MOST_ENGINES]
    char over[MOST_ENGINES]
    double now_s[MOST_ENGINES]
    bint ends_are_found     # the end of an engine that has left is reported, too
    int suspicions          # of living engines, that may still be
    bint optional           # since it was cleared: something has happened that need not happen
    bint faulty             # a crash, a suspicion, or a deadline has passed while other things could happen
    const char* misuse      # of the wire's contract, by an engine
    Core* cores[MOST_ENGINES]
    int64_t coverage[STATES * MESSAGES]     # control messages, failures (0); by state of the exchange with that peer
    Line* story             # NULL: none is kept
    int lines

cdef int choose(Choices* c, int options) noexcept nogil
cdef Choice* open_choice(Choices* c, int options) noexcept nogil
cdef void tell(Wires* f, int deed, int who, int peer, int what, int64_t number) noexcept nogil
cdef void kill(Wires* f, int who) noexcept nogil
cdef void end(Wires* f, int who) noexcept nogil
cdef int open_transfers(Wires* f, int who) noexcept nogil


cdef inline const char* content_of(Underway* m) noexcept nogil:
    if m.source == NULL:
        return &m.copy[0]
    return <const char*>m.source


cdef class ChoiceWire(AnyWire):
    pass

cdef class ChoiceClock(AnyClock):
    pass

cdef ChoiceWire wire_of(Wires* f, int rank)
cdef ChoiceClock clock_of(Wires* f, int rank)
