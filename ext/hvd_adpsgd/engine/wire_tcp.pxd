# The wire over TCP connections.
from libc.stdint cimport int32_t, int64_t, uint32_t

from hvd_adpsgd.engine.matching cimport Post, Posts, Stray
from hvd_adpsgd.engine.unconfirmed cimport Unconfirmed
from hvd_adpsgd.engine.wire cimport AnyWire, Clock, Wire

cdef struct Head:           # before each message on a connection
    int32_t nbytes
    int32_t channel         # of the message; or a word without one: REST, CLOSE, COUNT, ...

cdef struct News:           # from the connections' thread
    int32_t kind
    int32_t peer
    int32_t fd

cdef struct Link:           # a connection; messages travel from the side that dialed
    int fd                  # -1: being dialed
    int peer
    bint incoming
    bint rested             # its sender ended it, and dials again when it has something to send
    bint blocked            # epoll tells when the socket takes more
    double used             # when a message was last sent
    double since            # of one being dialed: the peer has answered nothing since then
    double owed_since       # when its host was first seen to owe an acknowledgement that has not come; 0: owes none
    Head head               # of the incoming message under way
    int64_t moved           # bytes of it, with its head
    Post* into              # where an incoming message goes; neither this nor `stray`: nowhere
    Stray* stray
    Link* before            # among all links, or among those to be freed
    Link* after

cdef struct Neighbour:      # a peer
    Link* out
    Link* inn
    Unconfirmed outgoing    # messages to it
    uint32_t received       # messages of the peer that have come whole, so far
    int64_t owed            # bytes of those that are not confirmed to it
    double heard            # when something came from it, or of it
    bint failed
    bint closed             # it said CLOSE, or refused with no connection broken before: it may have left
    bint refused            # its host refuses: its process has ended
    bint broken             # a connection ended without a word, and none was opened since
    bint listed             # among those that are ending, or whose failure was not reported
    double ended            # when its first connection ended for good; 0: none has
    int next_listed

cdef struct Sockets:
    Wire* wire
    Clock* clock
    int rank
    int size
    int epoll
    int news                # pipes from the connections' thread, and to it
    int dials
    News coming             # a record that has come in part
    int come
    Neighbour* peers
    int listed              # first Neighbour in that list
    Posts posts
    Link* links
    Link* dead
    int nout                # connections that were dialed
    int most                # ... at most, but for those in use
    double idle_s           # connections that carried nothing for so long are closed
    double failure_s        # a peer of which nothing is heard for so long has failed
    double looked           # when connections were last searched for such
    int64_t dialed
    int64_t accepted
    bint crowded            # there were too many connections, and one is idle
    bint over

cdef class TcpWire(AnyWire):
    cdef Sockets sockets
    cdef object keep
