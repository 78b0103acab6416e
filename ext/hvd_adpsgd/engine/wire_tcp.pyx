# cython: language_level=3
# Why compiled: the engine's thread moves bytes through these functions without the GIL.
"""The wire over TCP connections, without MPI.

Messages from one engine to another travel on a connection that the sender has dialed, when it had something to say
first: each pair has none, one or two connections, and none is opened by both sides at once. A message is its length
and channel, 8 bytes, and its bytes, which go straight from the sender's buffer into the one of the receive that waits
for it (posts.pyx). Nothing blocks: `progress` asks epoll what has come, and what is free again.

Connections are opened, and their ends proven to be members of the job, by a thread beside this one (connections.py);
it hands them over through a pipe, and is told through another one whom to dial.

A peer has failed when its connections have ended, a living kernel closes those of a killed process at once, or when
its host has acknowledged nothing for `failure_s`. A stopped process is not failed: its host acknowledges for it. An
engine that leaves says CLOSE on each connection; its peers have a second to hear of its departure in another way
before they take it for failed.
"""

from cpython.bytearray cimport PyByteArray_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, ENOMEM, errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport close, read, write

from hvd_adpsgd.engine.posts cimport (close_posts, complete_stray, cut_off, drop, expect, fail_posts, first_whole,
                                      give_post, give_up, is_here, receive_for, stray_bytes, take_post, take_stray)
from hvd_adpsgd.engine.wire cimport *

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void* ptr
    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int op, int fd, epoll_event* event)
    int epoll_wait(int epoll, epoll_event* events, int most, int milliseconds)
    enum: EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_DEL
    enum: EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP, EPOLLRDHUP

cdef extern from "<sys/socket.h>" nogil:
    cdef struct iovec:
        void* iov_base
        size_t iov_len
    cdef struct msghdr:
        iovec* msg_iov
        size_t msg_iovlen
    ctypedef unsigned int socklen_t
    ssize_t sendmsg(int fd, const msghdr* message, int flags)
    ssize_t recv(int fd, void* buffer, size_t nbytes, int flags)
    int getsockopt(int fd, int level, int name, void* value, socklen_t* nbytes)
    enum: MSG_NOSIGNAL, MSG_DONTWAIT

cdef extern from "<linux/tcp.h>" nogil:
    cdef struct tcp_info:
        unsigned char tcpi_backoff
        unsigned char tcpi_probes
        uint32_t tcpi_unacked
        uint32_t tcpi_last_ack_recv     # milliseconds ago
    enum: TCP_INFO

cdef extern from "<netinet/in.h>" nogil:
    enum: IPPROTO_TCP

cdef enum:
    REST = -1               # channels of heads: the sender closes this connection, and dials again when it needs one
    CLOSE = -2              # ... the sender's engine ends
    NEWS_DIALED = 1         # kinds of News
    NEWS_ACCEPTED = 2
    NEWS_REFUSED = 3
    EVENTS = 64             # of one epoll_wait
    PIECES = 16             # of one sendmsg
    WASTE = 65536           # bytes of a message that nobody receives, read at once
    TURN_NBYTES = 1 << 18   # read from one connection per turn, at most

cdef double SECOND_S = 1.0  # that a peer's other connections, and the news of its departure, may take longer
cdef double LOOK_S = 1.0    # between searches for silent hosts and idle connections


cdef inline double time_of(Sockets* s) noexcept nogil:
    return s.clock.now(s.clock)


# ---- links ---------------------------------------------------------------------------------

cdef Link* open_link(Sockets* s, int peer, bint incoming, int fd) noexcept nogil:
    """A link among all links; NULL without memory."""
    cdef Link* link = <Link*>calloc(1, sizeof(Link))
    if link == NULL:
        return NULL
    link.fd = fd
    link.peer = peer
    link.incoming = incoming
    link.used = time_of(s)
    link.after = s.links
    if s.links != NULL:
        s.links.before = link
    s.links = link
    s.nout += not incoming
    return link


cdef bint watch(Sockets* s, Link* link, int op) noexcept nogil:
    """Let epoll tell of what comes, and if blocked of room to send."""
    cdef epoll_event event
    event.events = EPOLLIN | EPOLLRDHUP | (EPOLLOUT if link.blocked else 0)
    event.data.ptr = link
    return epoll_ctl(s.epoll, op, link.fd, &event) == 0


cdef void close_link(Sockets* s, Link* link) noexcept nogil:
    """Close the connection and fail what it carried. The link is freed at the end of the turn: epoll may have named it."""
    cdef Post* post
    cdef int fd
    if link.fd >= 0:
        if not link.waits:
            epoll_ctl(s.epoll, EPOLL_CTL_DEL, link.fd, NULL)     # a forked child may hold the connection open
        fd, link.fd = link.fd, -1       # first: a child forked in between would close another file of that number
        close(fd)
    while link.first != NULL:
        post = link.first
        link.first = post.after
        post.status = PEER_DOWN
        if post.owned:
            give_post(&s.posts, post)
    if link.into != NULL:
        cut_off(&s.posts, link.into)
        link.into = NULL
    if link.before != NULL:
        link.before.after = link.after
    else:
        s.links = link.after
    if link.after != NULL:
        link.after.before = link.before
    link.before = NULL
    link.after = s.dead
    s.dead = link
    s.nout -= not link.incoming


cdef void bury(Sockets* s) noexcept nogil:
    cdef Link* link
    while s.dead != NULL:
        link = s.dead
        s.dead = link.after
        free(link)


cdef void leave_row(Neighbour* p, Link* link) noexcept nogil:
    """Of the incoming connections of a peer, which are read one after the other."""
    cdef Link** place = &p.inn
    while place[0] != NULL and place[0] != link:
        place = &place[0].follower
    if place[0] != NULL:
        place[0] = link.follower


cdef void end_link(Sockets* s, Link* link) noexcept nogil:
    """The connection has ended: as its sender said before, or with its peer."""
    cdef Neighbour* p = &s.peers[link.peer]
    cdef bint rested = link.rested
    cdef int peer = link.peer
    if p.out == link:
        p.out = NULL
    else:
        leave_row(p, link)
    close_link(s, link)
    if p.inn != NULL and p.inn.waits:
        p.inn.waits = False
        watch(s, p.inn, EPOLL_CTL_ADD)
    if rested or p.failed:
        return
    if p.ended == 0:
        p.ended = time_of(s)
        list_peer(s, peer)


# ---- failed peers --------------------------------------------------------------------------

cdef void list_peer(Sockets* s, int peer) noexcept nogil:
    cdef Neighbour* p = &s.peers[peer]
    if not p.listed:
        p.listed = True
        p.next_listed = s.listed
        s.listed = peer


cdef void fail_peer(Sockets* s, int peer) noexcept nogil:
    """Nothing comes from this peer any more, and nothing reaches it."""
    cdef Neighbour* p = &s.peers[peer]
    p.failed = True
    list_peer(s, peer)
    if p.out != NULL:
        end_link(s, p.out)
    while p.inn != NULL:
        end_link(s, p.inn)
    fail_posts(&s.posts, peer)


cdef void fail_ended(Sockets* s) noexcept nogil:
    """Peers one of whose connections has ended have failed when the others have, or SECOND_S later."""
    cdef int peer = s.listed
    cdef Neighbour* p
    take_news(s)            # a connection that the peer has opened before it ended
    while peer != NOBODY:
        p = &s.peers[peer]
        if not p.failed and ((p.inn == NULL and (p.out == NULL or p.out.fd < 0)) or time_of(s) > p.ended + SECOND_S):
            fail_peer(s, peer)
        peer = p.next_listed


cdef int tcp_next_failed(Wire* wire, bint look) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    cdef int peer, before = NOBODY
    cdef Neighbour* p
    if look:
        look_around(s)
    peer = s.listed
    while peer != NOBODY:
        p = &s.peers[peer]
        if p.failed and (not p.closed or time_of(s) > p.ended + SECOND_S):
            if before == NOBODY:
                s.listed = p.next_listed
            else:
                s.peers[before].next_listed = p.next_listed
            p.listed = False
            return peer
        before = peer
        peer = p.next_listed
    return NOBODY


cdef bint is_silent(Sockets* s, Link* link) noexcept nogil:
    """Whether the peer's host owes acknowledgements, for longer than a living one may."""
    cdef tcp_info info
    cdef socklen_t nbytes = sizeof(info)
    memset(&info, 0, sizeof(info))
    if getsockopt(link.fd, IPPROTO_TCP, TCP_INFO, &info, &nbytes) != 0:
        return False
    return ((info.tcpi_unacked > 0 or info.tcpi_probes > 0) and
            info.tcpi_last_ack_recv > 1e3 * s.failure_s)


cdef void look_around(Sockets* s) noexcept nogil:
    """Search for silent hosts and for connections to close."""
    cdef double t = time_of(s)
    cdef Link* link = s.links
    cdef Link* following
    if t < s.looked + LOOK_S:
        return
    s.looked = t
    while link != NULL:
        following = link.after
        if link.fd >= 0 and is_silent(s, link):
            fail_peer(s, link.peer)
            following = s.links         # others of this peer have ended too
        elif not link.incoming and t > link.used + s.idle_s:
            rest(s, link)
        link = following
    bury(s)


# ---- sending -------------------------------------------------------------------------------

cdef bint is_idle(Link* link) noexcept nogil:
    return link.fd >= 0 and link.first == NULL


cdef void rest(Sockets* s, Link* link) noexcept nogil:
    """Close an outgoing connection that is idle; the next message opens another one."""
    if is_idle(link) and say(link, REST):
        link.rested = True
        end_link(s, link)


cdef bint say(Link* link, int channel) noexcept nogil:
    """Send a head alone, at once or not at all."""
    cdef Head head = [0, channel]
    cdef iovec piece = [&head, sizeof(Head)]
    cdef msghdr message
    memset(&message, 0, sizeof(message))
    message.msg_iov = &piece
    message.msg_iovlen = 1
    return sendmsg(link.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(Head)


cdef void make_room(Sockets* s) noexcept nogil:
    """Before one more connection: close the idle one that was used least recently, if there are too many."""
    cdef Link* link = s.links
    cdef Link* oldest = NULL
    if s.nout < s.most:
        return
    while link != NULL:
        if not link.incoming and is_idle(link) and (oldest == NULL or link.used < oldest.used):
            oldest = link
        link = link.after
    if oldest != NULL:
        rest(s, oldest)


cdef Link* link_to(Sockets* s, int peer) noexcept nogil:
    """The connection to a peer, which may have to be dialed; NULL without memory, or without the other thread."""
    cdef Neighbour* p = &s.peers[peer]
    cdef int32_t called = peer
    if p.out == NULL and not s.over:
        make_room(s)
        p.out = open_link(s, peer, False, -1)
        if p.out != NULL and write(s.dials, &called, sizeof(called)) != sizeof(called):
            close_link(s, p.out)
            p.out = NULL
    return p.out


cdef void enqueue(Sockets* s, Link* link, Post* post) noexcept nogil:
    if link.first == NULL:
        link.first = post
    else:
        link.last.after = post
    link.last = post
    link.used = time_of(s)


cdef Status tcp_send(Wire* wire, Transfer* t, const void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    cdef Link* link
    cdef Post* post
    t.peer = peer
    t.receives = t.cancelled = t.in_use = False
    if s.peers[peer].failed:
        return PEER_DOWN
    link = link_to(s, peer)
    post = take_post(&s.posts, peer, channel, <void*>buffer, nbytes) if link != NULL else NULL
    if post == NULL:
        t.code = ENOMEM
        return WIRE_DOWN
    enqueue(s, link, post)
    t.handle = <uint64_t>post
    t.in_use = True
    if link.first == post and link.fd >= 0:
        send_queue(s, link)
    return PENDING


cdef int pieces_of(Link* link, Head* heads, iovec* pieces) noexcept nogil:
    """What is left of the first messages of the queue, with their heads."""
    cdef Post* post = link.first
    cdef int n = 0, i = 0
    cdef int64_t skip = link.moved, nbytes = -skip
    while post != NULL and n + 2 <= PIECES and nbytes < TURN_NBYTES:
        nbytes += <int64_t>sizeof(Head) + post.nbytes
        heads[i] = [post.nbytes, post.channel]
        if skip < <int64_t>sizeof(Head):
            pieces[n] = [<char*>&heads[i] + skip, sizeof(Head) - skip]
            n += 1
            skip = sizeof(Head)
        pieces[n] = [post.buffer + (skip - sizeof(Head)), post.nbytes - (skip - sizeof(Head))]
        n += 1
        skip = 0
        i += 1
        post = post.after
    return n


cdef void count_sent(Sockets* s, Link* link, int64_t nbytes) noexcept nogil:
    """Complete the messages of the queue that have been sent."""
    cdef Post* post = link.first
    cdef int64_t left
    while post != NULL:
        left = <int64_t>sizeof(Head) + post.nbytes - link.moved
        if nbytes < left:
            link.moved += nbytes
            return
        nbytes -= left
        link.moved = 0
        link.first = post.after
        post.after = NULL
        post.status = DONE
        if post.owned:
            give_post(&s.posts, post)
        post = link.first
    link.last = NULL


cdef void send_queue(Sockets* s, Link* link) noexcept nogil:
    """Send what the socket takes, a part of it in this turn: what is sent in large parts has left the caches."""
    cdef Head heads[PIECES]
    cdef iovec pieces[PIECES]
    cdef msghdr message
    cdef ssize_t n
    memset(&message, 0, sizeof(message))
    message.msg_iov = pieces
    message.msg_iovlen = pieces_of(link, heads, pieces)
    n = sendmsg(link.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
    if n >= 0:
        count_sent(s, link, n)
    elif errno != EAGAIN and errno != EINTR:
        read_link(s, link)          # what the peer said before it ended
        return
    if link.blocked != (link.first != NULL):
        link.blocked = not link.blocked
        watch(s, link, EPOLL_CTL_MOD)


# ---- receiving -----------------------------------------------------------------------------

cdef Status tcp_receive(Wire* wire, Transfer* t, void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    cdef Post* post
    t.peer = peer
    t.receives = True
    t.cancelled = t.in_use = False
    if peer != NOBODY and s.peers[peer].failed and not is_here(&s.posts, peer, channel):
        return PEER_DOWN
    post = take_post(&s.posts, peer, channel, buffer, nbytes)
    if post == NULL:
        t.code = ENOMEM
        return WIRE_DOWN
    t.handle = <uint64_t>post
    t.in_use = True
    expect(&s.posts, post)
    return PENDING


cdef bint begin_message(Sockets* s, Link* link) noexcept nogil:
    """A head has come: where do its bytes go? False if it is none that a peer sends."""
    cdef Head* head = &link.head
    if head.channel == REST:
        link.rested = link.incoming and head.nbytes == 0
        return link.rested
    if head.channel == CLOSE and head.nbytes == 0:
        s.peers[link.peer].closed = True
        return True
    if not link.incoming or head.nbytes < 0 or head.channel < 0:
        return False
    link.into = receive_for(&s.posts, link.peer, head.channel)
    if link.into == NULL:
        link.stray = take_stray(&s.posts, link.peer, head.channel, head.nbytes)
        return link.stray != NULL
    if link.into.nbytes < head.nbytes:
        link.into.status = TOO_LONG
        link.into = NULL
    return True


cdef void end_message(Sockets* s, Link* link) noexcept nogil:
    link.moved = 0
    if link.into != NULL:
        link.into.nbytes = link.head.nbytes
        link.into.status = DONE
        link.into = NULL
    elif link.stray != NULL:
        complete_stray(&s.posts, link.stray)
        link.stray = NULL


cdef ssize_t read_some(Link* link, size_t* wanted) noexcept nogil:
    """Read the rest of the head, or of the message."""
    cdef char waste[WASTE]
    cdef int64_t at = link.moved - <int64_t>sizeof(Head)
    if at < 0:
        wanted[0] = -at
        return recv(link.fd, <char*>&link.head + link.moved, wanted[0], MSG_DONTWAIT)
    wanted[0] = link.head.nbytes - at
    if link.into != NULL:
        return recv(link.fd, link.into.buffer + at, wanted[0], MSG_DONTWAIT)
    if link.stray != NULL:
        return recv(link.fd, stray_bytes(link.stray) + at, wanted[0], MSG_DONTWAIT)
    wanted[0] = min(wanted[0], <size_t>WASTE)
    return recv(link.fd, waste, wanted[0], MSG_DONTWAIT)


cdef void read_link(Sockets* s, Link* link) noexcept nogil:
    """Read what has come, to the end of the connection if it has ended."""
    cdef size_t wanted
    cdef ssize_t n
    cdef int64_t taken = 0
    while taken < TURN_NBYTES:
        n = read_some(link, &wanted)
        if n < 0 and errno == EINTR:
            continue
        if n < 0 and errno == EAGAIN:
            return
        if n <= 0:
            end_link(s, link)
            return
        taken += n
        link.moved += n
        if link.moved == sizeof(Head) and not begin_message(s, link):
            end_link(s, link)
            return
        if link.moved == <int64_t>sizeof(Head) + link.head.nbytes:
            end_message(s, link)
        if <size_t>n < wanted:
            return


# ---- connections ---------------------------------------------------------------------------

cdef void take_news(Sockets* s) noexcept nogil:
    """Take connections that were opened, and hear of those that could not be."""
    cdef ssize_t n
    while not s.over:
        n = read(s.news, <char*>&s.coming + s.come, sizeof(News) - s.come)
        if n <= 0:
            return
        s.come += <int>n
        if s.come == sizeof(News):
            s.come = 0
            take_one(s, &s.coming)


cdef void take_one(Sockets* s, News* news) noexcept nogil:
    cdef Neighbour* p = &s.peers[news.peer]
    if news.kind == NEWS_REFUSED:
        if p.out != NULL and p.out.fd < 0:
            p.closed = True
            end_link(s, p.out)
    elif p.failed:
        close(news.fd)
    elif news.kind == NEWS_DIALED:
        take_dialed(s, p, news.fd)
    else:
        take_accepted(s, p, news)


cdef void take_dialed(Sockets* s, Neighbour* p, int fd) noexcept nogil:
    if p.out == NULL or p.out.fd >= 0:
        close(fd)
        return
    p.out.fd = fd
    s.dialed += 1
    watch(s, p.out, EPOLL_CTL_ADD)
    send_queue(s, p.out)


cdef void take_accepted(Sockets* s, Neighbour* p, News* news) noexcept nogil:
    cdef Link* link = open_link(s, news.peer, True, news.fd)
    cdef Link** place = &p.inn
    if link == NULL:
        close(news.fd)
        return
    s.accepted += 1
    while place[0] != NULL:
        place = &place[0].follower
    place[0] = link
    link.waits = link != p.inn      # the older ones are read to their ends first
    if not link.waits:
        watch(s, link, EPOLL_CTL_ADD)


# ---- the wire ------------------------------------------------------------------------------

cdef void tcp_progress(Wire* wire) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    cdef epoll_event events[EVENTS]
    cdef Link* link
    cdef int i, n = epoll_wait(s.epoll, events, EVENTS, 0)
    for i in range(n):
        link = <Link*>events[i].data.ptr
        if link == NULL:
            take_news(s)
            continue
        if link.fd >= 0 and events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR):
            read_link(s, link)
        if link.fd >= 0 and events[i].events & EPOLLOUT:
            send_queue(s, link)
    if s.listed != NOBODY:
        fail_ended(s)
    bury(s)


cdef Status tcp_test(Wire* wire, Transfer* t) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    cdef Post* post = <Post*>t.handle
    cdef Status status = post.status
    if status == PENDING:
        return PENDING
    if t.receives and (status == DONE or status == TOO_LONG):
        t.peer = post.peer
        t.nbytes = post.nbytes
    t.in_use = False
    give_post(&s.posts, post)
    return status


cdef bint tcp_release(Wire* wire, Transfer* t) noexcept nogil:
    """A receive is forgotten, and what arrives for it is lost. A message that was not sent yet is copied, and still goes."""
    cdef Sockets* s = <Sockets*>wire.own
    cdef Post* post = <Post*>t.handle
    cdef char* copy
    if not t.in_use:
        return True
    if post.status == PENDING and not t.receives:
        copy = <char*>malloc(post.nbytes + 1)
        if copy == NULL:
            return False
        memcpy(copy, post.buffer, post.nbytes)
        post.buffer = copy
        post.owned = True
    else:
        if post.status == PENDING:
            forget(s, post)
        give_post(&s.posts, post)
    t.in_use = False
    return True


cdef void forget(Sockets* s, Post* post) noexcept nogil:
    """Of a receive: let go of its buffer."""
    cdef Link* link = s.links
    while link != NULL:
        if link.into == post:
            link.into = NULL
            return
        link = link.after
    give_up(&s.posts, post)


cdef void close_sockets(Sockets* s) noexcept nogil:
    s.over = True
    while s.links != NULL:
        s.peers[s.links.peer].failed = True
        end_link(s, s.links)
    bury(s)


cdef bint has_unsent(Sockets* s) noexcept nogil:
    cdef Link* link = s.links
    while link != NULL and link.first == NULL:
        link = link.after
    return link != NULL


cdef class TcpWire(AnyWire):
    """The wire of one engine over TCP. Its peers are dialed and accepted by `connections.Connections`.

    Args:
        clock: tells the time.
        rank: of this engine.
        size: engines in all.
        news: descriptor from which connections come, records of News; it does not block.
        dials: descriptor to which the ranks to be dialed are written, int32; it does not block.
        most: connections that are dialed and kept, at most, but for those in use.
        idle_s: a dialed connection is closed when it has carried nothing for so long, seconds.
        failure_s: a peer whose host acknowledges nothing for so long has failed, seconds.
    """

    DIALED = NEWS_DIALED
    ACCEPTED = NEWS_ACCEPTED
    REFUSED = NEWS_REFUSED

    def __cinit__(self, AnyClock clock, int rank, int size, int news, int dials, int most, double idle_s,
                  double failure_s):
        cdef Sockets* s = &self.sockets
        cdef epoll_event event
        memset(s, 0, sizeof(Sockets))
        self.keep = clock
        s.clock = &clock.calls
        s.rank, s.size, s.news, s.dials = rank, size, news, dials
        s.most, s.idle_s, s.failure_s, s.listed = most, idle_s, failure_s, NOBODY
        s.epoll = epoll_create1(EPOLL_CLOEXEC)
        s.peers = <Neighbour*>calloc(size, sizeof(Neighbour))
        if s.epoll < 0 or s.peers == NULL:
            raise MemoryError("wire")
        event.events = EPOLLIN
        event.data.ptr = NULL
        epoll_ctl(s.epoll, EPOLL_CTL_ADD, news, &event)
        self.calls.own = s
        self.calls.rank, self.calls.size = rank, size
        self.calls.send = tcp_send
        self.calls.receive = tcp_receive
        self.calls.test = tcp_test
        self.calls.release = tcp_release
        self.calls.next_failed = tcp_next_failed
        self.calls.progress = tcp_progress

    def __dealloc__(self):
        close_sockets(&self.sockets)
        close_posts(&self.sockets.posts)
        free(self.sockets.peers)
        if self.sockets.epoll > 0:
            close(self.sockets.epoll)

    # ---- without an engine: one thread at a time

    def progress(self):
        """Move bytes once; where no engine's thread does, or after it has ended."""
        tcp_progress(&self.calls)

    def post(self, int peer, int channel, bytes head, const unsigned char[::1] data):
        """Queue a message, copied, of two parts; one to a peer that has failed is dropped."""
        cdef Sockets* s = &self.sockets
        cdef Py_ssize_t n = len(head), nbytes = n + data.shape[0]
        cdef Link* link
        cdef Post* post
        cdef char* copy
        if s.peers[peer].failed or s.over:
            return
        link = link_to(s, peer)
        copy = <char*>malloc(nbytes + 1)
        post = take_post(&s.posts, peer, channel, copy, nbytes) if link != NULL and copy != NULL else NULL
        if post == NULL:
            free(copy)
            raise MemoryError("wire")
        memcpy(copy, <const char*>head, n)
        if data.shape[0]:
            memcpy(copy + n, &data[0], data.shape[0])
        post.owned = True
        enqueue(s, link, post)
        if link.first == post and link.fd >= 0:
            send_queue(s, link)

    def take(self):
        """(peer, bytearray) of the first message that has come whole; None if none has. No receive is posted beside it."""
        cdef Stray* stray = first_whole(&self.sockets.posts)
        if stray == NULL:
            return None
        found = stray.peer, PyByteArray_FromStringAndSize(stray_bytes(stray), stray.nbytes)
        drop(&self.sockets.posts, stray)
        return found

    def rest_all(self):
        """Close what is idle, as after idle_s; the next message opens another connection."""
        cdef Link* link = self.sockets.links
        cdef Link* following
        while link != NULL:
            following = link.after
            if not link.incoming:
                rest(&self.sockets, link)
            link = following
        bury(&self.sockets)

    def fileno(self):
        """Of epoll: readable when `progress` has something to do."""
        return self.sockets.epoll

    def next_failed(self, bint look):
        """A peer that has failed since the last call, NOBODY if none has; searches for silent hosts too if told."""
        return tcp_next_failed(&self.calls, look)

    def call(self, int peer):
        """Have a connection to a peer, so that its end is noticed."""
        cdef Link* link
        if not self.sockets.peers[peer].failed:
            link = link_to(&self.sockets, peer)
            if link != NULL:
                link.used = time_of(&self.sockets)      # is not idle

    @property
    def unsent(self):
        """Whether a message has not been handed to the system yet."""
        return has_unsent(&self.sockets)

    def close(self):
        """Say CLOSE on each connection and close them; transfers under way fail. After the engine's thread has ended."""
        cdef Link* link = self.sockets.links
        while link != NULL:
            if link.incoming or is_idle(link):
                say(link, CLOSE)
            link = link.after
        close_sockets(&self.sockets)
        if self.sockets.epoll >= 0:         # now, not when the last reference goes
            close(self.sockets.epoll)
            self.sockets.epoll = -1

    def forget(self):
        """In a forked child: close its copies of the descriptors, which would keep connections of the parent open."""
        cdef Link* link = self.sockets.links
        while link != NULL:
            if link.fd >= 0:
                close(link.fd)
                link.fd = -1
            link = link.after
        close(self.sockets.epoll)
        self.sockets.epoll = -1

    @property
    def connections(self):
        """(dialed, accepted) that are open now, and the same since the start."""
        cdef Link* link = self.sockets.links
        cdef int dialed = 0, accepted = 0
        while link != NULL:
            dialed += link.fd >= 0 and not link.incoming
            accepted += link.fd >= 0 and link.incoming
            link = link.after
        return dialed, accepted, self.sockets.dialed, self.sockets.accepted
