# cython: language_level=3
# Why compiled: the engine's thread moves bytes through these functions without the GIL.
"""The wire over TCP connections, without MPI.

Messages from one engine to another travel on a connection that the sender dialed when it had its first
message: each pair of engines has none, one or two connections, and no connection is dialed from both sides at
once. A message is its length and channel, 8 bytes, and its bytes, which are copied directly from the sender's
buffer into that of the matching receive (matching.pyx). Nothing blocks: `progress` asks epoll which sockets
have bytes to read, and which accept bytes again. An idle engine sleeps in epoll, too (`wait`).

Another thread (connections.py) opens connections and checks that their other ends are members of the job; it
passes them to this wire through a pipe. A second pipe passes it the ranks to dial.

The end of a connection is not the failure of a peer: the sender dials again. The receiver counts the messages
that it has received completely, and sends the count (COUNT). Over the next connection the sender asks for the
count, and sends the messages behind it again (matching.pyx). So each message arrives once, in order:

    sender                              receiver
    messages 1, 2, 3  ------------->    1, 2 arrive completely; the connection ends
    dials, ASK_COUNT  ------------->
                      <-------------    COUNT 2
    message 3         ------------->

A large message is sent from the engine's buffer, and its send is complete when it is confirmed. A small
message is copied, and its send is complete when the operating system has taken it.

A peer has failed when its host refuses a connection (its process has ended), or when its host owed an answer
for `failure_s` and none came: no acknowledgement, no connection, and no newer report from other engines
(`lives`). A stopped process has not failed: its host acknowledges for it. An engine that leaves sends CLOSE
on each connection; its peers wait SECOND_S for its BYE, or NEWS of it, before they take it for failed. A peer
that was taken for failed and dials again is sent OUT.
"""

from cpython.bytearray cimport PyByteArray_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, EMFILE, ENOBUFS, ENOMEM, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport close, read, write

from hvd_adpsgd.engine.matching cimport *
from hvd_adpsgd.engine.doorbell cimport Doorbell, times_rung
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

cdef extern from *:
    """
    #define adpsgd_waits(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
    #define adpsgd_set_waits(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
    """
    int64_t waits "adpsgd_waits"(int64_t*) nogil
    void set_waits "adpsgd_set_waits"(int64_t*, int64_t) nogil

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int value, int flags)
    enum: EFD_CLOEXEC, EFD_NONBLOCK

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
    CLOSE = -2              # Head.channel of a notice: the engine that sends this ends
    COUNT = -3              # from the receiver: it has received Head.nbytes messages completely
    ASK_COUNT = -4          # from the sender: it needs a COUNT now
    OUT = -5                # from the receiver: it has taken the sender for failed
    NEWS_DIALED = 1         # News.kind: a connection that this side dialed is open
    NEWS_ACCEPTED = 2       # a connection that the peer dialed is open
    NEWS_REFUSED = 3        # the peer's host has refused the connection
    NEWS_LIVES = 4          # the peer's host has answered
    EVENTS = 64             # events of one epoll_wait
    PIECES = 16             # pieces of one sendmsg
    WASTE = 65536           # bytes of a dropped message that one recv reads
    TURN_NBYTES = 1 << 18   # bytes read from one connection per turn, at most
    SMALL = 4096            # bytes: shorter messages are copied; when so many are unconfirmed, COUNT is sent

cdef double SECOND_S = 1.0  # longest time from the end of a leaving peer's connections to its BYE or NEWS
cdef double LOOK_S = 1.0    # period of searches for silent hosts and idle connections


cdef inline double time_of(Sockets* s) noexcept nogil:
    return s.clock.now(s.clock)


# ---- links ---------------------------------------------------------------------------------

cdef Link* open_link(Sockets* s, int peer, bint incoming, int fd) noexcept nogil:
    """Add a link to the list of all links, and return it; NULL if memory is exhausted."""
    cdef Link* link = <Link*>calloc(1, sizeof(Link))
    if link == NULL:
        return NULL
    link.fd = fd
    link.peer = peer
    link.incoming = incoming
    link.since = time_of(s)
    link.after = s.links
    if s.links != NULL:
        s.links.before = link
    s.links = link
    return link


cdef bint watch(Sockets* s, Link* link, int op) noexcept nogil:
    """Let epoll report bytes to read, and, if the link is blocked, room to send."""
    cdef epoll_event event
    event.events = EPOLLIN | EPOLLRDHUP | (EPOLLOUT if link.blocked else 0)
    event.data.ptr = link
    return epoll_ctl(s.epoll, op, link.fd, &event) == 0


cdef void await_room(Sockets* s, Link* link, bint wanted) noexcept nogil:
    """Let epoll report when the socket accepts more bytes, or stop that report."""
    if link.fd < 0 or link.blocked == wanted:
        return
    link.blocked = wanted
    if not watch(s, link, EPOLL_CTL_MOD):
        end_link(s, link)


cdef void close_link(Sockets* s, Link* link) noexcept nogil:
    """Close a connection; a message that was received in part will be sent again.

    The link is freed at the end of the turn, because an event of epoll may still point to it."""
    cdef int fd
    if link.fd >= 0:
        epoll_ctl(s.epoll, EPOLL_CTL_DEL, link.fd, NULL)     # a forked child may keep it open after close()
        fd, link.fd = link.fd, -1       # before close(): a forked child must not close a reused number
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


cdef void bury(Sockets* s) noexcept nogil:
    cdef Link* link
    while s.dead != NULL:
        link = s.dead
        s.dead = link.after
        free(link)


cdef void detach(Sockets* s, Link* link) noexcept nogil:
    """Remove a connection from its peer, and close it."""
    cdef Neighbour* p = &s.peers[link.peer]
    if p.out == link:
        p.out = NULL
    elif p.inn == link:
        p.inn = NULL
    close_link(s, link)


cdef void end_link(Sockets* s, Link* link) noexcept nogil:
    """Process the end of a connection.

    If the peer leaves or its host refused, the peer is listed as ending. Else the peer is dialed, which shows
    whether it lives."""
    cdef Neighbour* p = &s.peers[link.peer]
    cdef bint dialed = p.out == NULL or p.out == link
    cdef int peer = link.peer
    cdef double since = link.owed_since
    detach(s, link)
    if p.failed:
        return
    if not p.closed and not p.refused:
        p.broken = True
        if link_to(s, peer) != NULL and dialed and since > 0:
            p.out.since = since     # the peer has been silent since then
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
    """Mark a peer as failed: close its connections, and end all transfers with it."""
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
    """Mark listed peers, which leave or whose hosts refuse, as failed once their connections have ended.

    At the latest SECOND_S after the first of them has ended."""
    cdef int peer = s.listed
    cdef Neighbour* p
    take_news(s)            # the peer may have opened a connection before it ended
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

    Needs two looks: bytes sent before the first look would be acknowledged long before the second. At a
    single look the host may owe the acknowledgement of bytes that were sent just before, such as a probe of a
    full window or a message after a long pause."""
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
    """Every LOOK_S: search all connections for silent hosts; repeat dials and counts."""
    cdef double t = time_of(s)
    cdef Link* link = s.links
    cdef Link* following
    if t < s.looked + LOOK_S:
        return
    s.looked = t
    while link != NULL:
        following = link.after
        if look_at(s, link, t):
            following = s.links         # links were added or removed: begin again
        link = following
    bury(s)


cdef bint look_at(Sockets* s, Link* link, double t) noexcept nogil:
    """Do the work of look_around for one link. Return whether other links may have been added or removed."""
    cdef Neighbour* p = &s.peers[link.peer]
    if link.fd < 0:
        if t > max(p.heard, link.since) + s.failure_s:
            fail_peer(s, link.peer)
            return True
        dial(s, link)                   # again: the order or its answer may be lost
    elif is_silent(s, link, t):
        end_link(s, link)
        return True
    elif link.incoming and p.owed > 0:
        confirm(s, link)
    return False


cdef void tcp_lives(Wire* wire, int peer) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    s.peers[peer].heard = time_of(s)


# ---- sending -------------------------------------------------------------------------------

cdef bint say(Link* link, int channel, int number) noexcept nogil:
    """Send a notice: a head without a message. Return whether the socket has taken all of it."""
    cdef Head head = [number, channel]
    cdef iovec piece = [&head, sizeof(Head)]
    cdef msghdr message
    cdef ssize_t n
    memset(&message, 0, sizeof(message))
    message.msg_iov = &piece
    message.msg_iovlen = 1
    n = sendmsg(link.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
    if 0 < n < <ssize_t>sizeof(Head):
        shutdown(link.fd, SHUT_RDWR)        # the receiver could not parse what follows a part of a head
    return n == sizeof(Head)


cdef void dial(Sockets* s, Link* link) noexcept nogil:
    """Ask the thread of connections to dial a peer.

    Repeating this is harmless: that thread knows what it dials."""
    cdef int32_t called = link.peer
    write(s.dials, &called, sizeof(called))


cdef Link* link_to(Sockets* s, int peer) noexcept nogil:
    """Return the connection to a peer, and dial it if there is none. NULL without memory, or at the end."""
    cdef Neighbour* p = &s.peers[peer]
    if p.out == NULL and not s.over:
        p.out = open_link(s, peer, False, -1)
        if p.out != NULL:
            dial(s, p.out)
    return p.out


cdef void enqueue(Sockets* s, Link* link, Post* post) noexcept nogil:
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
    """Collect the unsent bytes of the first unsent messages, with their heads.

    Return the number of pieces."""
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
    """Note that the operating system has taken `nbytes` more bytes of the unsent messages."""
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
    """Whether the same call may succeed soon: the socket or the operating system has no room now."""
    return error == EAGAIN or error == EINTR or error == ENOBUFS or error == ENOMEM


cdef void send_queue(Sockets* s, Link* link) noexcept nogil:
    """Send unsent messages as far as the socket accepts them, at most about TURN_NBYTES in a turn.

    In larger parts the bytes would have left the caches before they are sent."""
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
        read_link(s, link)          # read notices that the peer sent before it ended
        if link.fd >= 0:
            end_link(s, link)
        return
    await_room(s, link, p.outgoing.unsent != NULL)


cdef bint obey_count(Sockets* s, Link* link, uint32_t count) noexcept nogil:
    """Process COUNT of a peer: it has received so many messages. Return False if so many were not sent."""
    cdef Unconfirmed* u = &s.peers[link.peer].outgoing
    cdef bint resumed = u.resumes
    if not take_count(u, &s.posts, count):
        return False
    if resumed:
        await_room(s, link, u.unsent != NULL)
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
    """Process a received head: choose where the bytes of its message go. False: no peer sends such a head."""
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
    """Process a notice. Return False if no peer sends such a notice, or if the connection is over."""
    cdef Neighbour* p = &s.peers[link.peer]
    cdef int number = head.nbytes
    head.nbytes = 0                 # no bytes follow a notice
    if head.channel == COUNT and not link.incoming:
        return obey_count(s, link, number)
    if number != 0:
        return False
    if head.channel == CLOSE:
        p.closed = True
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
    """Send COUNT, at once or when the socket has room."""
    cdef Neighbour* p = &s.peers[link.peer]
    cdef bint said = say(link, COUNT, p.received)
    if said:
        p.owed = 0
    await_room(s, link, not said)


cdef ssize_t read_some(Link* link, size_t* wanted) noexcept nogil:
    """Read bytes of the head, or of the message: `wanted` is set to what is missing."""
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
    """Read received bytes, at most TURN_NBYTES, and process the end of the connection."""
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
    """Read messages, at most TURN_NBYTES. Return False if the connection has ended or is not sound."""
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
    """Process all News: connections that were opened, peers that refused, and peers that answered."""
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
    """Process a refused connection: the peer's process has ended, because nothing listens on its port.

    If no connection of the peer broke before, it may have left in order."""
    if p.out != NULL and p.out.fd < 0:
        p.refused = True
        p.closed = p.closed or not p.broken
        end_link(s, p.out)


cdef void turn_away(Sockets* s, Link* link) noexcept nogil:
    """Send OUT to a peer that was taken for failed and has dialed again, and drop what it sends."""
    cdef char waste[WASTE]
    cdef ssize_t n
    if not link.turned_away:
        link.turned_away = say(link, OUT, 0)
    n = recv(link.fd, waste, WASTE, MSG_DONTWAIT)
    if n == 0 or (n < 0 and not is_passing(errno)):
        detach(s, link)


cdef void take_dialed(Sockets* s, Neighbour* p, int fd) noexcept nogil:
    """Use a connection that was dialed to a peer.

    If messages are not confirmed, ask for a COUNT, which shows which of them are lost."""
    cdef bint asks
    if p.failed or p.out == NULL:
        close(fd)
        return
    fd, p.out.fd = p.out.fd, fd     # before close(), see close_link
    if fd >= 0:                     # replaced: the peer reads from the newest connection only
        epoll_ctl(s.epoll, EPOLL_CTL_DEL, fd, NULL)
        close(fd)
    s.dialed += 1
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
    """Use a connection that a peer has dialed. The peer has dropped its earlier one, and repeats messages.

    This side sends nothing on it before the peer does: the last message of the handshake, which the other
    thread sends, must come first.
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
        if events[i].data.ptr == s:
            hush(s)
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
    bury(s)


cdef void hush(Sockets* s) noexcept nogil:
    """Make `alarm` unreadable again."""
    cdef uint64_t rung
    read(s.alarm, &rung, sizeof(rung))


cdef void tcp_wait(Wire* wire, Doorbell* doorbell, uint32_t heard, double seconds) noexcept nogil:
    """Sleep until epoll has something to report, or a ring of the doorbell is followed by tcp_wake.

    `waits` is set before the doorbell is looked at, and tcp_wake looks at `waits` after the ring: one of the two
    threads sees what the other one did."""
    cdef Sockets* s = <Sockets*>wire.own
    cdef epoll_event event
    set_waits(&s.waits, 1)
    if times_rung(doorbell) == heard:
        epoll_wait(s.epoll, &event, 1, max(1, <int>(1e3 * seconds)))
    set_waits(&s.waits, 0)


cdef void tcp_wake(Wire* wire) noexcept nogil:
    cdef Sockets* s = <Sockets*>wire.own
    cdef uint64_t once = 1
    if waits(&s.waits):
        write(s.alarm, &once, sizeof(once))


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
    """Give up a transfer.

    What arrives for a receive is lost; an unconfirmed message is copied, and still sent."""
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
    """Give up a pending receive: neither a connection nor a later message writes to its buffer."""
    cdef Link* link = s.links
    while link != NULL:
        if link.into == post:
            link.into = NULL
            return
        link = link.after
    give_up(&s.posts, post)


cdef void tcp_drop_sums(Wire* wire, int first, int last) noexcept nogil:
    drop_sums(&(<Sockets*>wire.own).posts, first, last)


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
    """Whether a message is unsent; with `lost`, also whether one is lost with its connection."""
    cdef Link* link = s.links
    cdef Unconfirmed* u
    while link != NULL:
        u = &s.peers[link.peer].outgoing
        if not link.incoming and (u.unsent != NULL or (lost and u.first != NULL and (link.fd < 0 or u.resumes))):
            return True
        link = link.after
    return False


cdef class TcpWire(AnyWire):
    """The wire of one engine over TCP connections, which `connections.Connections` dials and accepts.

    Args:
        clock: the clock of the engine.
        rank: rank of this engine.
        size: how many engines the wire connects.
        news: non-blocking descriptor from which News records (opened connections) are read.
        dials: non-blocking descriptor to which the ranks to dial are written, int32.
        failure_s: a peer whose host has owed an acknowledgement for so long has failed, seconds.
    """

    DIALED = NEWS_DIALED
    ACCEPTED = NEWS_ACCEPTED
    REFUSED = NEWS_REFUSED
    LIVES = NEWS_LIVES

    def __cinit__(self, AnyClock clock, int rank, int size, int news, int dials, double failure_s):
        cdef Sockets* s = &self.sockets
        cdef epoll_event event
        memset(s, 0, sizeof(Sockets))
        self.keep = clock
        s.clock = &clock.calls
        s.wire = &self.calls
        s.rank, s.size, s.news, s.dials = rank, size, news, dials
        s.failure_s, s.listed = failure_s, NOBODY
        s.epoll = epoll_create1(EPOLL_CLOEXEC)
        s.alarm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if s.epoll < 0 or s.alarm < 0:
            cure = " Raise the limit: ulimit -n." if errno == EMFILE else ""
            raise OSError(errno, f"no descriptor for the averaging engine's wire.{cure}")
        s.peers = <Neighbour*>calloc(size, sizeof(Neighbour))
        if s.peers == NULL:
            raise MemoryError("no memory for the averaging engine's wire")
        event.events = EPOLLIN
        event.data.ptr = NULL
        epoll_ctl(s.epoll, EPOLL_CTL_ADD, news, &event)
        event.data.ptr = s
        epoll_ctl(s.epoll, EPOLL_CTL_ADD, s.alarm, &event)
        self.calls.own = s
        self.calls.rank, self.calls.size = rank, size
        self.calls.send = tcp_send
        self.calls.receive = tcp_receive
        self.calls.test = tcp_test
        self.calls.release = tcp_release
        self.calls.next_failed = tcp_next_failed
        self.calls.progress = tcp_progress
        self.calls.lives = tcp_lives
        self.calls.drop_sums = tcp_drop_sums
        self.calls.wait = tcp_wait
        self.calls.wake = tcp_wake

    def __dealloc__(self):
        close_sockets(&self.sockets)
        close_posts(&self.sockets.posts)
        free(self.sockets.peers)
        self.close_own()

    # ---- without an engine; only one thread may call these at a time

    def progress(self):
        """Move bytes once, if no engine's thread uses this wire, or after that thread has ended."""
        tcp_progress(&self.calls)

    def post(self, int peer, int channel, bytes head, const unsigned char[::1] data):
        """Queue a copy of the message head + data for a peer; if the peer has failed, drop it."""
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
            raise MemoryError("no memory for the averaging engine's wire")
        memcpy(copy, <const char*>head, n)
        if data.shape[0]:
            memcpy(copy + n, &data[0], data.shape[0])
        post.owned = post.released = True
        enqueue(s, link, post)

    def take(self):
        """Return (peer, bytearray) of the first complete message; None if there is none.

        Must not be mixed with posted receives."""
        cdef Stray* stray = first_whole(&self.sockets.posts)
        if stray == NULL:
            return None
        found = stray.peer, PyByteArray_FromStringAndSize(stray_bytes(stray), stray.nbytes)
        drop(&self.sockets.posts, stray)
        return found

    def fileno(self):
        """Return epoll's descriptor, which is readable when `progress` has something to do."""
        return self.sockets.epoll

    def next_failed(self, bint look):
        """Return a peer whose failure was not returned before, NOBODY if none.

        `look`: search for silent hosts."""
        return tcp_next_failed(&self.calls, look)

    def call(self, int peer):
        """Connect to a peer, so that the end of the peer is noticed."""
        if not self.sockets.peers[peer].failed:
            link_to(&self.sockets, peer)

    @property
    def strays(self):
        """How many messages have arrived, at least in part, whose receives are not posted."""
        return self.sockets.posts.nstrays

    @property
    def unsent(self):
        """Whether the operating system has not yet taken all messages."""
        return has_unsent(&self.sockets, False)

    @property
    def unfinished(self):
        """Whether a message is unsent, or must be sent again because its connection has ended."""
        return has_unsent(&self.sockets, True)

    def close(self):
        """Send CLOSE on each connection and close all; unfinished transfers fail.

        Call this after the engine's thread has ended."""
        cdef Link* link = self.sockets.links
        while link != NULL:
            if link.fd >= 0 and (link.incoming or self.sockets.peers[link.peer].outgoing.unsent == NULL):
                say(link, CLOSE, 0)
            link = link.after
        close_sockets(&self.sockets)
        self.close_own()                    # now, not when the last reference goes

    cdef void close_own(self):
        """Close the descriptors that belong to no connection."""
        if self.sockets.epoll > 0:
            close(self.sockets.epoll)
        if self.sockets.alarm > 0:
            close(self.sockets.alarm)
        self.sockets.epoll = self.sockets.alarm = -1

    def forget(self):
        """Close the descriptors in a forked child, whose copies would keep the parent's connections open."""
        cdef Link* link = self.sockets.links
        while link != NULL:
            if link.fd >= 0:
                close(link.fd)
                link.fd = -1
            link = link.after
        self.close_own()

    @property
    def connections(self):
        """Open connections (dialed, accepted), and then both counts since the start."""
        cdef Link* link = self.sockets.links
        cdef int dialed = 0, accepted = 0
        while link != NULL:
            dialed += link.fd >= 0 and not link.incoming
            accepted += link.fd >= 0 and link.incoming
            link = link.after
        return dialed, accepted, self.sockets.dialed, self.sockets.accepted
