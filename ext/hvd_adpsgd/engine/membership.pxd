# Who is alive, as the engine sees it, and the peers that it tells of departures.
from libc.stdint cimport int64_t

cdef enum Peer:
    ALIVE = 0
    SUSPECT = 1
    LEFT = 2
    FAILED = 3

cdef enum:
    LISTENERS = 64          # two for each power of two below the number of super learners

cdef struct Listener:       # a peer that this engine tells of departures
    int peer
    int sent                # how many departures our last message to it held
    int acknowledged        # ... the last one that it has answered
    double told_at

cdef struct Membership:
    int size
    int own
    char* states            # Peer
    char* left_broken       # peers that left because they failed
    char* ended             # the wire has reported that the process has ended
    char* mute              # peers that have not answered our departure in time
    int64_t* changes        # counts changes, for the trainer
    # departures
    unsigned char* departed # two bits for each engine, also for this one: it has left, because it failed
    int known               # departures in it
    Listener listeners[LISTENERS]
    int nlisteners
    bint unchecked          # something has changed for the listeners
    bint departing
    double said_at
    int owed                # departures that somebody must know before this engine ends: those known at its departure
    double answer_s         # the longest that a listener took to answer
    double end_at           # our departure is taken over; until then peers may not know, and ask. 0: it is not
    double leave_by         # 0: not leaving
    double checked_at       # when failures were last searched for

cdef bint open_membership(Membership* m, int own, int size, int64_t* changes) noexcept
cdef void close_membership(Membership* m) noexcept
cdef bint set_peer(Membership* m, int peer, Peer state) noexcept nogil
cdef void note_end(Membership* m, int peer) noexcept nogil
cdef bint is_gone(Membership* m, int peer) noexcept nogil
cdef int departed_nbytes(int size) noexcept nogil
cdef bint has_departed(const unsigned char* departed, int i) noexcept nogil
cdef int next_departed(Membership* m, const unsigned char* departed, int first) noexcept nogil
cdef void note_departure(Membership* m, int i, bint broken) noexcept nogil
cdef bint left_as_broken(const unsigned char* departed, int i) noexcept nogil
cdef bint knows_no_more(Membership* m, const unsigned char* departed) noexcept nogil
cdef void choose_listeners(Membership* m) noexcept nogil
cdef int hops(Membership* m) noexcept nogil
cdef Listener* listener_of(Membership* m, int peer) noexcept nogil
cdef bint is_taken_over(Membership* m, bint late) noexcept nogil
cdef void give_up_listeners(Membership* m, double before) noexcept nogil
