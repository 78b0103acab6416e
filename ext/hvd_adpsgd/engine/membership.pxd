# States of the peers as this engine knows them, and the peers (listeners) to which it sends departures.
from libc.stdint cimport int64_t

cdef enum Peer:
    ALIVE = 0
    SUSPECT = 1
    LEFT = 2
    FAILED = 3

cdef enum:
    LISTENERS = 64          # listeners at most: two for each power of two below the number of super learners

cdef struct Listener:       # a peer to which this engine sends departures
    int peer
    int sent                # how many departures our last message to it contained
    int acknowledged        # how many departures the last message contained that it has answered
    double told_at          # when our last message to it was sent

cdef struct Membership:
    int size
    int own
    char* states            # a Peer each
    char* left_broken       # peers that left because they failed
    char* ended             # peers of which the wire has reported that the process has ended
    char* mute              # peers that have not answered our BYE in time
    int64_t* changes        # counts changes of the membership, for the trainer (`peer_events`)
    # departures
    unsigned char* departed # two bits for each engine, this one included: it has left; because it failed
    int known               # how many departures `departed` contains
    Listener listeners[LISTENERS]
    int nlisteners
    bint unchecked          # states or departures have changed: listeners may have to be notified
    bint departing          # this engine has announced its departure
    double said_at          # ... at this time
    int owed                # departures known then: a peer must know as many before this engine ends
    double answer_s         # the longest time that a listener took to answer
    double end_at           # when this engine may end; 0: no listener has taken over its departure yet
    double leave_by         # when this engine ends at the latest; 0: it is not leaving
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
