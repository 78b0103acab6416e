# The wire over TCP connections: its connections, its peers, and the state of the wire.
from libc.stdint cimport int32_t, int64_t, uint32_t

from hvd_adpsgd.engine.matching cimport Post, Posts, Stray, Unconfirmed
from hvd_adpsgd.engine.wire cimport AnyWire, Clock, Wire

cdef struct Head:           # 8 bytes before each message on a connection: its length and its channel
    int32_t nbytes
    int32_t channel         # of the message; negative: no message but a notice (CLOSE, COUNT, ...)

cdef struct News:           # a record from the thread that opens connections
    int32_t kind
    int32_t peer
    int32_t fd

cdef struct Link:           # a connection, on which messages travel from the side that dialed to the other
    int fd                  # -1: the connection is being dialed
    int peer
    bint incoming           # the peer dialed
    bint turned_away        # the peer was sent OUT
    bint blocked            # epoll reports when the socket accepts more bytes
    double since            # while being dialed: since when the peer has answered nothing
    double owed_since       # since when the peer's host has owed an acknowledgement; 0: it owes none
    Head head               # of the message that is being received
    int64_t moved           # bytes received of this message and its head
    Post* into              # receive for this message; if this and `stray` are NULL, its bytes are dropped
    Stray* stray            # stray for this message
    Link* before            # the previous one in the list of all links
    Link* after             # the next one in that list, or in the list of links to be freed

cdef struct Neighbour:      # a peer
    Link* out               # connection for messages to the peer; NULL: none
    Link* inn               # connection for messages from the peer; NULL: none
    Unconfirmed outgoing    # messages to the peer
    uint32_t received       # how many messages of the peer were received completely so far
    int64_t owed            # bytes of received messages that are not confirmed to the peer
    double heard            # when bytes last came from the peer, or a newer report about it from others
    bint failed
    bint closed             # the peer sent CLOSE, or refused while no connection was broken: it may have left
    bint refused            # the peer's host refuses connections: its process has ended
    bint broken             # a connection ended without CLOSE, and none was opened since
    bint listed             # in the list of peers that are ending, or whose failure is not yet reported
    double ended            # when the first of its connections ended for good; 0: none has
    int next_listed         # the next peer in that list

cdef struct Sockets:
    Wire* wire
    Clock* clock
    int rank
    int size
    int epoll
    int news                # pipe with News from the thread that opens connections
    int dials               # pipe to that thread, with the ranks to dial
    News coming             # a record that was read in part
    int come                # bytes of it that were read
    Neighbour* peers        # by rank
    int listed              # first peer in the list through `next_listed`
    Posts posts
    Link* links             # list of all links
    Link* dead              # list of links to be freed
    double failure_s        # a peer whose host has owed an answer for so long has failed
    double looked           # when connections were last searched for silent hosts
    int64_t dialed          # connections dialed so far
    int64_t accepted        # connections accepted so far
    bint over               # the wire is closed
    int alarm               # descriptor of an eventfd: readable once tcp_wake was called
    int64_t waits           # 1 while the engine's thread is in tcp_wait

cdef class TcpWire(AnyWire):
    cdef Sockets sockets
    cdef object keep
    cdef void close_own(self)
