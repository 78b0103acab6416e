# A wire and clocks for a few engines; an explorer chooses every order of events that they leave open.
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.core cimport Core
from hvd_adpsgd.engine.wire cimport AnyClock, AnyWire, Transfer

cdef enum:
    MOST_ENGINES = 4
    MOST_MESSAGES = 128     # messages in flight at once, at most
    MOST_POSTED = 32        # receives that one engine has posted, at most
    MOST_NBYTES = 64        # bytes of a message, at most
    MOST_LINES = 65536      # lines of a story, at most
    STATES = 8              # states of an exchange in `coverage`
    MESSAGES = 8            # kinds of events in `coverage`
    NOT_YET = 0             # values of a transfer's handle
    COMPLETE = 1
    OVERLONG = 2
    GIVEN = 3               # the receiver has the message, but the send is not yet known to be complete

cdef enum Completion:       # when a send is complete
    AT_POST = 0             # at once: the message is copied
    AT_RECEIPT = 1          # at receipt: the receiver reads the sender's buffer; control messages are copied
    AT_ANY_TIME = 2         # before, at or after the receipt

cdef struct Choice:
    int taken               # the option that is taken
    int options             # how many options there are
    bint state              # chooses the next event in a state; else how a call of the wire ends
    # of a choice with `state`:
    uint64_t digest         # of the state
    int timed               # in options from this one on time passes,
    int deadlines           # ... and from this one on so much that deadlines may have passed
    bint early_retry        # a retry may become due although another event is possible
    bint early_deadline     # a deadline may pass although another event is possible
    bint moved              # an event that must happen leads to another state
    bint waited             # time that passes leads to another state
    bint rests              # no event need happen any more
    bint again              # the state was reached before: compare its next states with those found first
    uint64_t nexts          # digest of the next states

cdef struct Choices:        # the path of a run: its choices from the beginning
    Choice* made            # array of the choices
    int count               # length of the path
    int room                # length of the array
    int next_one            # choices before this position have been taken in this run
    int deepest             # length of the longest path so far

cdef struct Underway:       # a message in flight: sent, and not received
    int src
    int dst
    int channel
    int nbytes
    Transfer* sending       # NULL: the send is complete
    const void* source      # the sender's buffer; NULL: `copy` holds the message
    char copy[MOST_NBYTES]

cdef struct Posted:         # a pending receive
    Transfer* transfer
    void* buffer
    int nbytes
    int src
    int channel

cdef struct End:            # what one engine sees of the network
    Posted posted[MOST_POSTED]
    int nposted
    char down[MOST_ENGINES]         # peers that its wire takes for failed
    char told[MOST_ENGINES]         # peers that next_failed has returned
    char suspects[MOST_ENGINES]     # peers that its wire takes for failed although they live

cdef enum Deed:             # kinds of events in the story of a run
    TURN = 0                # an engine takes a turn
    TRAINER = 1             # a trainer takes the next step of its script
    CRASH = 2
    RETRY = 3               # so much time passes that a retry is due
    DEADLINE = 4            # so much time passes that deadlines may be over
    TAKES = 5               # an engine receives a message
    SENDS = 6
    FINDS_DOWN = 7          # a wire notices the failure of a peer
    MERGES = 8
    ENDS = 9

cdef struct Line:           # an event of the story
    int deed                # a Deed
    int who                 # engine
    int peer                # -1: none
    int what                # kind of message, or chunk
    int64_t number          # number of the exchange, or channel

cdef struct Wires:          # the network of all engines, and which of them have crashed or ended
    int n
    Choices* choices
    Completion completion
    End ends[MOST_ENGINES]
    Underway messages[MOST_MESSAGES]        # in the order in which they were sent
    int nmessages
    char dead[MOST_ENGINES]         # engines that have crashed
    char over[MOST_ENGINES]         # engines that have left
    double now_s[MOST_ENGINES]      # the time of each engine's clock
    bint ends_are_found     # wires also report peers that have left as failed
    int suspicions          # how many more living engines may be taken for failed
    bint optional           # an event that need not happen has happened since this was cleared
    bint faulty             # there was a crash, a suspicion, or a deadline passed early
    const char* misuse      # how an engine has broken the wire's contract; NULL: not
    Core* cores[MOST_ENGINES]
    int64_t coverage[STATES * MESSAGES]     # by state of the exchange, and message kind or failure (0)
    Line* story             # NULL: no story is recorded
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
