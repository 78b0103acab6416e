# cython: language_level=3
# Why compiled: the engine's thread moves bytes through these functions without the GIL.
"""The wire over TCP connections, without MPI.

Messages from one engine to another travel on a connection that the sender has dialed, when it had something to say
first: each pair has none, one or two connections, and none is opened by both sides at once. A message is its length
and channel, 8 bytes, and its bytes, which go straight from the sender's buffer into the one of the receive that waits
for it (matching.pyx). Nothing blocks: `progress` asks epoll what has come, and what is free again.

Connections are opened, and their ends proven to be members of the job, by a thread beside this one (connections.py);
it hands them over through a pipe, and another pipe names the peers to dial.

A connection that ends is not a peer that fails: its sender dials again. The receiver counts the messages that have
come whole, and confirms the count (COUNT); the sender repeats what is not confirmed over the next connection, after
the count for which it asks (unconfirmed.pyx). So each message arrives once, in order:

    sender                              receiver
    messages 1, 2, 3  ------------->    1, 2 come whole; the connection ends
    dials, ASK_COUNT  ------------->
                      <-------------    COUNT 2
    message 3         ------------->

A large message is sent from its buffer, and complete when it is confirmed. A small one is copied, and complete when
the system has it.

A peer has failed when its host refuses a connection (its process has ended), or when nothing was heard of it for
`failure_s` while its host owed an answer: no acknowledgement, no connection, and no news of it by others (`lives`).
A stopped process is not failed: its host answers for it. An engine that leaves says CLOSE on each connection; its
peers wait a second for the news of its departure before they take it for failed. A peer that was taken for failed
and dials again is told so (OUT).
"""

from cpython.bytearray cimport PyByteArray_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, ENOBUFS, ENOMEM, errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport close, read, write

from hvd_adpsgd.engine.matching cimport (close_posts, complete_stray, cut_off, drop, expect, fail_posts, first_whole, forget_stray,
                                      give_up, is_here, receive_for, stray_bytes, take_post, take_stray)
from hvd_adpsgd.engine.unconfirmed cimport append, copied_post, counted, fail_all, let_go, note_sent, own, resume, take_count
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
    int shutdown(int fd, int how)
    enum: MSG_NOSIGNAL, MSG_DONTWAIT, SHUT_RDWR

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
    COUNT = -3              # ... of the receiver: so many messages have come whole (in place of `nbytes`)
    ASK_COUNT = -4          # ... of the sender: it needs COUNT now
    OUT = -5                # ... of the receiver: it has taken the sender for failed
    NEWS_DIALED = 1         # kinds of News
    NEWS_ACCEPTED = 2
    NEWS_REFUSED = 3
    NEWS_LIVES = 4
    EVENTS = 64             # of one epoll_wait
    PIECES = 16             # of one sendmsg
    WASTE = 65536           # bytes of a message that nobody receives, read at once
    TURN_NBYTES = 1 << 18   # read from one connection per turn, at most
    SMALL = 4096            # bytes: shorter messages are copied; so many are confirmed at once

cdef double SECOND_S = 1.0  # that the news of a peer's departure may take longer than the end of its connections
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
    link.used = link.since = time_of(s)
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


cdef void await_room(Sockets* s, Link* link, bint wanted) noexcept nogil:
    """Let epoll tell when the socket takes more, or no longer."""
    if link.fd < 0 or link.blocked == wanted:
        return
    link.blocked = wanted
    if not watch(s, link, EPOLL_CTL_MOD):
        end_link(s, link)


cdef void close_link(Sockets* s, Link* link) noexcept nogil:
    """Close the connection; a message that came in part will come again. The link is freed at the end of the turn: epoll
    may have named it."""
    cdef int fd
    if link.fd >= 0:
        epoll_ctl(s.epoll, EPOLL_CTL_DEL, link.fd, NULL)     # a forked child may hold the connection open
        fd, link.fd = link.fd, -1       # first: a child forked in between would close another file of that number
        close(fd)
    link.fd = -1
    if link.into != NULL:
        cut_off(&s.posts, link.into)
        link.into = NULL
    if link.stray != NULL:
        forget_stray(&s.posts, link.stray)
        link.stray = NULL
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


cdef void detach(Sockets* s, Link* link) noexcept nogil:
    """The peer has this connection no more."""
    cdef Neighbour* p = &s.peers[link.peer]
    if p.out == link:
        p.out = NULL
    elif p.inn == link:
        p.inn = NULL
    close_link(s, link)


cdef void end_link(Sockets* s, Link* link) noexcept nogil:
    """The connection has ended: as its sender said before, with its peer, or alone: then a dial shows whether the peer lives."""
    cdef Neighbour* p = &s.peers[link.peer]
    cdef bint rested = link.rested, dialed = p.out == NULL or p.out == link
    cdef int peer = link.peer
    cdef double since = link.owed_since
    detach(s, link)
    if rested or p.failed:
        return
    if not p.closed and not p.refused:
        p.broken = True
        if link_to(s, peer) != NULL and dialed and since > 0:
            p.out.since = since     # silent since then, not since now
    elif p.ended == 0:
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
        detach(s, p.out)
    if p.inn != NULL:
        detach(s, p.inn)
    fail_all(&p.outgoing, &s.posts)
    fail_posts(&s.posts, peer)


cdef void fail_ended(Sockets* s) noexcept nogil:
    """Peers that leave, or whose hosts refuse: failed when all of their connections have ended, or SECOND_S later."""
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


cdef bint is_silent(Sockets* s, Link* link, double t) noexcept nogil:
    """Whether the peer's host has owed an acknowledgement for `failure_s`, and sent none in that time.

    Two looks: what was owed at the first one would be acknowledged long before the second. What is owed at one look, be it
    a probe of a full window or a message after a long rest, may have been sent just before."""
    cdef tcp_info info
    cdef socklen_t nbytes = sizeof(info)
    memset(&info, 0, sizeof(info))
    if getsockopt(link.fd, IPPROTO_TCP, TCP_INFO, &info, &nbytes) != 0:
        return False
    if info.tcpi_unacked == 0 and info.tcpi_probes == 0:
        link.owed_since = 0
    elif link.owed_since == 0 or 1e-3 * info.tcpi_last_ack_recv < t - link.owed_since:
        link.owed_since = t
    return link.owed_since > 0 and t - link.owed_since > s.failure_s


cdef void look_around(Sockets* s) noexcept nogil:
    """Search for silent hosts and for connections to close; dial again, confirm again."""
    cdef double t = time_of(s)
    cdef Link* link = s.links
    cdef Link* following
    if t < s.looked + LOOK_S:
        return
    s.looked = t
    while link != NULL:
        following = link.after
        if look_at(s, link, t):
            following = s.links         # other links have ended, or are new
        link = following
    bury(s)


cdef bint look_at(Sockets* s, Link* link, double t) noexcept nogil:
    """Whether links other than this one may have changed."""
    cdef Neighbour* p = &s.peers[link.peer]
    if link.fd < 0:
        if t > max(p.heard, link.since) + s.failure_s:
            fail_peer(s, link.peer)
            return True
        dial(s, link)                   # an answer may be lost
    elif is_silent(s, link, t):
        end_link(s, link)
        return True
    elif link.incoming:
        if p.owed > 0:
            confirm(s, link)
    elif t > link.used + s.idle_s:
        rest(s, link)
    return False


cdef void tcp_lives(Wire* wire, int peer) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    s.peers[peer].heard = time_of(s)


# ---- sending -------------------------------------------------------------------------------

cdef bint is_idle(Sockets* s, Link* link) noexcept nogil:
    """Whether all that was sent is confirmed: then the other end may drop this connection without a look."""
    return link.fd >= 0 and s.peers[link.peer].outgoing.first == NULL


cdef void rest(Sockets* s, Link* link) noexcept nogil:
    """Close an outgoing connection that is idle; the next message opens another one."""
    if is_idle(s, link) and say(link, REST, 0):
        link.rested = True
        end_link(s, link)


cdef bint say(Link* link, int channel, int number) noexcept nogil:
    """Send a head alone, at once or not at all."""
    cdef Head head = [number, channel]
    cdef iovec piece = [&head, sizeof(Head)]
    cdef msghdr message
    cdef ssize_t n
    memset(&message, 0, sizeof(message))
    message.msg_iov = &piece
    message.msg_iovlen = 1
    n = sendmsg(link.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
    if 0 < n < <ssize_t>sizeof(Head):
        shutdown(link.fd, SHUT_RDWR)        # what follows could not be read
    return n == sizeof(Head)


cdef void make_room(Sockets* s) noexcept nogil:
    """If there are too many connections: close the one that was used least recently, once all that it carried is confirmed."""
    cdef Link* link = s.links
    cdef Link* oldest = NULL
    if s.nout <= s.most:
        return
    while link != NULL:
        if not link.incoming and link.fd >= 0 and s.peers[link.peer].outgoing.unsent == NULL and (
                oldest == NULL or link.used < oldest.used):
            oldest = link
        link = link.after
    if oldest != NULL and is_idle(s, oldest):
        rest(s, oldest)
    elif oldest != NULL:
        say(oldest, ASK_COUNT, 0)


cdef void dial(Sockets* s, Link* link) noexcept nogil:
    """Ask for this connection; again if it is not there at the next look: the other thread knows what it dials."""
    cdef int32_t called = link.peer
    write(s.dials, &called, sizeof(called))


cdef Link* link_to(Sockets* s, int peer) noexcept nogil:
    """The connection to a peer, which may have to be dialed; NULL without memory, or at the end."""
    cdef Neighbour* p = &s.peers[peer]
    if p.out == NULL and not s.over:
        p.out = open_link(s, peer, False, -1)
        if p.out != NULL:
            dial(s, p.out)
            make_room(s)
    return p.out


cdef void enqueue(Sockets* s, Link* link, Post* post) noexcept nogil:
    link.used = time_of(s)
    if append(&s.peers[link.peer].outgoing, post) and link.fd >= 0:
        send_queue(s, link)


cdef Status tcp_send(Wire* wire, Transfer* t, const void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    cdef Link* link
    cdef Post* post = NULL
    t.peer = peer
    t.receives = t.cancelled = t.in_use = False
    if s.peers[peer].failed:
        return PEER_DOWN
    link = link_to(s, peer)
    if link != NULL and nbytes < SMALL:
        post = copied_post(&s.posts, peer, channel, buffer, nbytes)
    elif link != NULL:
        post = take_post(&s.posts, peer, channel, <void*>buffer, nbytes)
    if post == NULL:
        t.code = ENOMEM
        return WIRE_DOWN
    t.handle = <uint64_t>post
    t.in_use = True
    enqueue(s, link, post)
    return PENDING


cdef int pieces_of(Unconfirmed* u, Head* heads, iovec* pieces) noexcept nogil:
    """What is left of the first messages that are not sent, with their heads."""
    cdef Post* post = u.unsent
    cdef int n = 0, i = 0
    cdef int64_t skip = u.moved, nbytes = -skip
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


cdef void count_sent(Unconfirmed* u, int64_t nbytes) noexcept nogil:
    """The system has so many bytes more."""
    cdef Post* post = u.unsent
    cdef int64_t left
    while post != NULL:
        left = <int64_t>sizeof(Head) + post.nbytes - u.moved
        if nbytes < left:
            u.moved += nbytes
            return
        nbytes -= left
        post = note_sent(u)


cdef bint is_passing(int error) noexcept nogil:
    """Whether the same call may succeed soon: the socket, or the system, has no room."""
    return error == EAGAIN or error == EINTR or error == ENOBUFS or error == ENOMEM


cdef void send_queue(Sockets* s, Link* link) noexcept nogil:
    """Send what the socket takes, a part of it in this turn: what is sent in large parts has left the caches."""
    cdef Neighbour* p = &s.peers[link.peer]
    cdef Head heads[PIECES]
    cdef iovec pieces[PIECES]
    cdef msghdr message
    cdef ssize_t n
    if p.outgoing.resumes:
        return
    memset(&message, 0, sizeof(message))
    message.msg_iov = pieces
    message.msg_iovlen = pieces_of(&p.outgoing, heads, pieces)
    n = sendmsg(link.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) if message.msg_iovlen > 0 else 0
    if n >= 0:
        count_sent(&p.outgoing, n)
    elif not is_passing(errno):
        read_link(s, link)          # what the peer said before it ended
        if link.fd >= 0:
            end_link(s, link)
        return
    await_room(s, link, p.outgoing.unsent != NULL)


cdef bint obey_count(Sockets* s, Link* link, uint32_t count) noexcept nogil:
    """The peer has so many messages whole. False if it cannot have them."""
    cdef Unconfirmed* u = &s.peers[link.peer].outgoing
    cdef bint resumed = u.resumes
    if not take_count(u, &s.posts, count):
        return False
    if resumed:
        await_room(s, link, u.unsent != NULL)
    if u.first == NULL:
        s.crowded = s.nout > s.most
    return True


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
    if head.nbytes < 0:
        return False
    if head.channel < 0:
        return obey(s, link, head)
    if not link.incoming:
        return False
    link.into = receive_for(&s.posts, link.peer, head.channel)
    if link.into == NULL:
        link.stray = take_stray(&s.posts, link.peer, head.channel, head.nbytes)
        return link.stray != NULL
    if link.into.nbytes < head.nbytes:
        link.into.status = TOO_LONG
        link.into = NULL
    return True


cdef bint obey(Sockets* s, Link* link, Head* head) noexcept nogil:
    """A head without a message. False if no peer sends it, or if the connection is over."""
    cdef Neighbour* p = &s.peers[link.peer]
    cdef int number = head.nbytes
    head.nbytes = 0                 # nothing follows
    if head.channel == COUNT and not link.incoming:
        return obey_count(s, link, number)
    if number != 0:
        return False
    if head.channel == CLOSE:
        p.closed = True
    elif head.channel == REST and link.incoming:
        link.rested = True
    elif head.channel == ASK_COUNT and link.incoming:
        p.owed += SMALL
    elif head.channel == OUT and not link.incoming:
        s.wire.fenced = p.refused = True
        s.wire.fenced_by = link.peer
        return False
    else:
        return False
    return True


cdef void end_message(Sockets* s, Link* link) noexcept nogil:
    cdef Neighbour* p = &s.peers[link.peer]
    link.moved = 0
    if link.head.channel < 0:
        return
    p.received = counted(p.received)
    p.owed += <int64_t>sizeof(Head) + link.head.nbytes
    if link.into != NULL:
        link.into.nbytes = link.head.nbytes
        link.into.status = DONE
        link.into = NULL
    elif link.stray != NULL:
        complete_stray(&s.posts, link.stray)
        link.stray = NULL


cdef void confirm(Sockets* s, Link* link) noexcept nogil:
    """Say how many messages have come whole, at once or when there is room."""
    cdef Neighbour* p = &s.peers[link.peer]
    cdef bint said = say(link, COUNT, p.received)
    if said:
        p.owed = 0
    await_room(s, link, not said)


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
    cdef Neighbour* p = &s.peers[link.peer]
    if p.failed:
        turn_away(s, link)
        return
    p.heard = time_of(s)
    if not read_messages(s, link):
        end_link(s, link)
    elif link.incoming and p.owed >= SMALL:
        confirm(s, link)


cdef bint read_messages(Sockets* s, Link* link) noexcept nogil:
    """Read a part of what has come. False if the connection has ended."""
    cdef size_t wanted
    cdef ssize_t n
    cdef int64_t taken = 0
    while taken < TURN_NBYTES:
        n = read_some(link, &wanted)
        if n < 0 and errno == EINTR:
            continue
        if n < 0 and is_passing(errno):
            return True
        if n <= 0:
            return False
        taken += n
        link.moved += n
        if link.moved == sizeof(Head) and not begin_message(s, link):
            return False
        if link.moved == <int64_t>sizeof(Head) + link.head.nbytes:
            end_message(s, link)
        if <size_t>n < wanted:
            return True
    return True


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
    if news.kind == NEWS_LIVES:
        p.heard = time_of(s)
    elif news.kind == NEWS_REFUSED:
        take_refusal(s, p)
    elif news.kind == NEWS_DIALED:
        take_dialed(s, p, news.fd)
    else:
        take_accepted(s, p, news)


cdef void take_refusal(Sockets* s, Neighbour* p) noexcept nogil:
    """Nobody listens there: the process has ended. If no connection has ended before, it may have left in order."""
    if p.out != NULL and p.out.fd < 0:
        p.refused = True
        p.closed = p.closed or not p.broken
        end_link(s, p.out)


cdef void turn_away(Sockets* s, Link* link) noexcept nogil:
    """A peer that was taken for failed has dialed and sends: it learns so, and what it sends is dropped."""
    cdef char waste[WASTE]
    cdef ssize_t n
    if not link.rested:
        link.rested = say(link, OUT, 0)
    n = recv(link.fd, waste, WASTE, MSG_DONTWAIT)
    if n == 0 or (n < 0 and not is_passing(errno)):
        detach(s, link)


cdef void take_dialed(Sockets* s, Neighbour* p, int fd) noexcept nogil:
    """With messages that are not confirmed, its first COUNT, for which it asks, says which of them are lost."""
    cdef bint asks
    if p.failed or p.out == NULL:
        close(fd)
        return
    if p.out.fd >= 0:               # the peer reads the newest one
        epoll_ctl(s.epoll, EPOLL_CTL_DEL, p.out.fd, NULL)
        close(p.out.fd)
    s.dialed += 1
    p.out.fd = fd
    p.out.moved = p.out.owed_since = 0
    p.out.blocked = False
    resume(&p.outgoing)
    asks = p.outgoing.resumes or p.broken        # also to learn whether the peer takes this engine for failed
    p.broken = False
    if not watch(s, p.out, EPOLL_CTL_ADD) or (asks and not say(p.out, ASK_COUNT, 0)):
        end_link(s, p.out)
    elif p.outgoing.unsent != NULL:
        send_queue(s, p.out)


cdef void take_accepted(Sockets* s, Neighbour* p, News* news) noexcept nogil:
    """The peer has dropped the connection before. It repeats what has not come whole.

    Nothing is sent on it before the peer has: the last word of the handshake, which the other thread sends, must come
    first.
    """
    cdef Link* link = open_link(s, news.peer, True, news.fd)
    if link == NULL:
        close(news.fd)
        return
    if p.inn != NULL:
        detach(s, p.inn)
    s.accepted += 1
    p.broken = False
    p.owed = 0
    p.inn = link
    if not watch(s, link, EPOLL_CTL_ADD):
        end_link(s, link)


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
            if link.incoming:
                confirm(s, link)
            else:
                send_queue(s, link)
    if s.listed != NOBODY:
        fail_ended(s)
    if s.crowded:
        s.crowded = False
        make_room(s)
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
    let_go(&s.posts, post)
    return status


cdef bint tcp_release(Wire* wire, Transfer* t) noexcept nogil:
    """A receive is forgotten, and what arrives for it is lost. A message that is not confirmed is copied, and still goes."""
    cdef Sockets* s = <Sockets*>wire.own
    cdef Post* post = <Post*>t.handle
    if not t.in_use:
        return True
    if not own(post):
        return False
    if t.receives and post.status == PENDING:
        forget(s, post)
    let_go(&s.posts, post)
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
    cdef int peer
    s.over = True
    while s.links != NULL:
        detach(s, s.links)
    for peer in range(s.size if s.peers != NULL else 0):
        s.peers[peer].failed = True
        fail_all(&s.peers[peer].outgoing, &s.posts)
    bury(s)


cdef bint has_unsent(Sockets* s, bint lost) noexcept nogil:
    """Whether a message is not sent; or, with `lost`, is to be sent again because its connection has ended."""
    cdef Link* link = s.links
    cdef Unconfirmed* u
    while link != NULL:
        u = &s.peers[link.peer].outgoing
        if not link.incoming and (u.unsent != NULL or (lost and u.first != NULL and (link.fd < 0 or u.resumes))):
            return True
        link = link.after
    return False


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
    LIVES = NEWS_LIVES

    def __cinit__(self, AnyClock clock, int rank, int size, int news, int dials, int most, double idle_s,
                  double failure_s):
        cdef Sockets* s = &self.sockets
        cdef epoll_event event
        memset(s, 0, sizeof(Sockets))
        self.keep = clock
        s.clock = &clock.calls
        s.wire = &self.calls
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
        self.calls.lives = tcp_lives

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
        post.owned = post.released = True
        enqueue(s, link, post)

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
        return has_unsent(&self.sockets, False)

    @property
    def unfinished(self):
        """Whether there is such a message, or one to be sent again because its connection has ended."""
        return has_unsent(&self.sockets, True)

    def close(self):
        """Say CLOSE on each connection and close them; transfers under way fail. After the engine's thread has ended."""
        cdef Link* link = self.sockets.links
        while link != NULL:
            if link.fd >= 0 and (link.incoming or self.sockets.peers[link.peer].outgoing.unsent == NULL):
                say(link, CLOSE, 0)
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
