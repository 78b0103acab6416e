# The wire over TCP connections.
from libc.stdint cimport int32_t, int64_t

from hvd_adpsgd.engine.posts cimport Post, Posts, Stray
from hvd_adpsgd.engine.wire cimport AnyWire, Clock

cdef struct Head:           # before each message on a connection
    int32_t nbytes
    int32_t channel         # of the message, or REST or CLOSE

cdef struct News:           # from the connections' thread
    int32_t kind
    int32_t peer
    int32_t fd

cdef struct Link:           # a connection; messages travel from the side that dialed
    int fd                  # -1: being dialed
    int peer
    bint incoming
    bint waits              # of an incoming one: its predecessor has not been read to its end
    bint rested             # its sender ended it, and dials again when it has something to send
    bint blocked            # epoll tells when the socket takes more
    double used             # when a message was last sent
    Head head               # of the message under way
    int64_t moved           # bytes of it, with its head
    Post* into              # where an incoming message goes; neither this nor `stray`: nowhere
    Stray* stray
    Post* first             # queue of an outgoing one
    Post* last
    Link* before            # among all links, or among those to be freed
    Link* after
    Link* follower          # of an incoming one: the next of this peer

cdef struct Neighbour:      # a peer
    Link* out
    Link* inn
    bint failed
    bint closed             # it said CLOSE, or it no longer listens: it may have left
    bint listed             # among those that are ending, or of whom nobody was told
    double ended            # when its first connection ended; 0: none has
    int next_listed

cdef struct Sockets:
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
    double failure_s        # a peer whose host acknowledges nothing for so long has failed
    double looked           # when connections were last searched for such
    int64_t dialed
    int64_t accepted
    bint over

cdef class TcpWire(AnyWire):
    cdef Sockets sockets
    cdef object keep
