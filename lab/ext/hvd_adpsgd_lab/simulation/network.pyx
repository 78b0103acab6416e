# cython: language_level=3
# Why compiled: engines call it as their wire, through C function pointers.
"""A wire and a clock for many engines in one process, in virtual time.

What the contract of a wire (engine/wire.pxd) leaves open is random, from a seed: when a message arrives, in
which order messages of different channels arrive, whether a send completes before its message is received
(eager) or at the receipt (then the receiver reads the sender's buffer, which reveals a buffer that was
changed too early), how many messages of a crashed engine still arrive, and whether these are written into a
buffer that was given up and not yet released.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from hvd_adpsgd.engine.agreement cimport Header
from hvd_adpsgd.engine.core cimport Message
from hvd_adpsgd.engine.matching cimport Post
from hvd_adpsgd.engine.wire cimport (AGREEMENT, CONTROL, DATA, DONE, NOBODY, PEER_DOWN, PENDING, TOO_LONG, AnyClock, AnyWire, Clock, Status,
                                     Transfer, Wire)
from hvd_adpsgd_lab.simulation.chance cimport happens, uniform
from hvd_adpsgd_lab.simulation.network cimport *

cdef double LATE = 200.0


# ---- the wire ------------------------------------------------------------------------------

cdef bint begin_send(Link* link, Transfer* t, int nbytes, int peer, int channel) noexcept nogil:
    """Initialise a send, and count its message. Return False if the peer has failed."""
    t.receives = t.cancelled = False
    t.handle = OPEN
    t.peer = peer
    t.in_use = down_of(link, peer) == NULL
    if t.in_use:
        link.sent_bytes += <int64_t>(nbytes * scale_of(link.net, channel))
        link.sent_messages += 1
    return t.in_use


cdef Status simulated_send(Wire* wire, Transfer* t, const void* buffer, int nbytes, int peer,
                           int channel) noexcept nogil:
    cdef Link* link = <Link*>wire.own
    cdef Net* net = link.net
    cdef Envelope* m
    if not begin_send(link, t, nbytes, peer, channel):
        return PEER_DOWN
    m = <Envelope*>calloc(1, sizeof(Envelope))
    m.src = link.first + wire.rank
    m.dst = link.first + peer
    m.channel = channel
    m.nbytes = nbytes
    m.source = buffer
    m.sending = t
    if happens(&net.chance, net.rules.eager):
        m.copy = malloc(max(1, nbytes))
        memcpy(m.copy, buffer, nbytes)
        m.source = m.copy
        m.sending = NULL
        t.handle = COMPLETE
    schedule(net, link, m)
    if net.trace != NULL:
        keep_trace(net, m)
    return PENDING


cdef inline double scale_of(Net* net, int channel) noexcept nogil:
    return net.rules.bytes_scale if channel >= DATA else 1.0


cdef void keep_trace(Net* net, Envelope* m) noexcept nogil:
    cdef int kind = -1
    cdef int64_t number = -1
    if m.channel == CONTROL:
        kind = (<const Message*>m.source).kind
        number = (<const Message*>m.source).exchange
    elif m.channel == AGREEMENT:
        kind = (<const Header*>m.source).kind
        number = (<const Header*>m.source).number
    if net.traced == net.trace_room:
        net.trace_room *= 2
        net.trace = <Sent*>realloc(net.trace, net.trace_room * sizeof(Sent))
    net.trace[net.traced] = [net.now_s, m.arrives, m.src, m.dst, m.channel, m.nbytes, kind, number]
    net.traced += 1


cdef void schedule(Net* net, Link* link, Envelope* m) noexcept nogil:
    """Compute when a message arrives: after earlier ones of its channel or stream, the link, and a cut."""
    cdef double starts = max(net.now_s, link.free_at)
    cdef double cut = cut_until(net, net.links[m.src].process, net.links[m.dst].process)
    cdef Envelope** end = &net.links[m.dst].coming
    if m.channel >= DATA:                   # small messages do not wait for the chunks on the link
        link.free_at = starts + m.nbytes * net.rules.bytes_scale / link.bytes_per_s
        starts = max(link.free_at, through_path(net, m, starts, link.free_at - starts))
    else:
        starts = net.now_s
    m.arrives = starts + net.rules.latency_s * (1.0 + net.rules.jitter * uniform(&net.chance))
    if happens(&net.chance, net.rules.late):
        m.arrives += LATE * net.rules.latency_s * uniform(&net.chance)
    if m.channel == CONTROL and net.rules.late_control > 0 and happens(&net.chance, net.rules.late_control):
        m.arrives += LATE * net.rules.latency_s * uniform(&net.chance)
    if cut > net.now_s:
        m.arrives += cut - net.now_s
    while end[0] != NULL:
        if follows(net, m, end[0]) and not end[0].lost and end[0].arrives >= m.arrives:
            m.arrives = end[0].arrives + 1e-9
        end = &end[0].next_one
    end[0] = m
    enter(net, m.arrives, ARRIVAL, m.dst, m)


cdef double through_path(Net* net, Envelope* m, double starts, double seconds) noexcept nogil:
    """Return when a chunk, sent in `seconds` from `starts` on, has passed the path to its receiver; 0: it is as fast."""
    cdef int src = net.links[m.src].process, dst = net.links[m.dst].process
    cdef Path* path
    if net.paths == NULL or max(src, dst) >= net.npaths:
        return 0
    path = &net.paths[<int64_t>src * net.npaths + dst]
    if path.slowness > 1:
        path.free_at = max(starts, path.free_at) + path.slowness * seconds
    return path.free_at


cdef inline bint follows(Net* net, Envelope* later, Envelope* m) noexcept nogil:
    """Whether message `later`, which is sent after `m`, must also arrive after it."""
    return later.src == m.src and (later.channel == m.channel or net.streams != NULL)


cdef Status simulated_receive(Wire* wire, Transfer* t, void* buffer, int nbytes, int peer,
                              int channel) noexcept nogil:
    cdef Link* link = <Link*>wire.own
    cdef Net* net = link.net
    cdef Posted** end = &link.posted
    cdef Posted* p = <Posted*>calloc(1, sizeof(Posted))
    t.receives = True
    t.cancelled = False
    t.handle = OPEN
    t.peer = peer
    t.in_use = True
    p.transfer = t
    p.buffer = buffer
    p.nbytes = nbytes
    p.src = NOBODY if peer == NOBODY else link.first + peer
    p.channel = channel
    if match_waiting(net, link, p):
        free(p)
        return PENDING
    if peer != NOBODY and down_of(link, peer) != NULL:
        free(p)
        t.in_use = False
        return PEER_DOWN
    while end[0] != NULL:
        end = &end[0].next_one
    end[0] = p
    return PENDING


cdef bint fits(Posted* p, Envelope* m) noexcept nogil:
    return (p.src == NOBODY or p.src == m.src) and p.channel == m.channel


cdef bint match_waiting(Net* net, Link* link, Posted* p) noexcept nogil:
    """Give a new receive the first message that has arrived for it. Return whether there was one."""
    cdef Envelope** at = &link.coming
    while at[0] != NULL:
        if at[0].arrived and fits(p, at[0]):
            take(net, at, p)
            return True
        at = &at[0].next_one
    return False


cdef void take(Net* net, Envelope** at, Posted* p) noexcept nogil:
    """Give a message to a receive, and complete both transfers."""
    cdef Envelope* m = at[0]
    at[0] = m.next_one
    if m.nbytes > p.nbytes:
        p.transfer.handle = OVERLONG
    else:
        memcpy(p.buffer, m.source, m.nbytes)
        p.transfer.handle = COMPLETE
    p.transfer.peer = m.src - net.links[m.src].first
    p.transfer.nbytes = m.nbytes
    if m.sending != NULL:
        m.sending.handle = COMPLETE
        wake(net, m.src)
    free(m.copy)
    free(m)


cdef void wake(Net* net, int who) noexcept nogil:
    if not net.links[who].woken:
        net.links[who].woken = True
        net.woken[net.nwoken] = who
        net.nwoken += 1


cdef Status simulated_test(Wire* wire, Transfer* t) noexcept nogil:
    if t.handle == OPEN:
        return PENDING
    if t.handle == LOST:
        return PEER_DOWN
    t.in_use = False
    return DONE if t.handle == COMPLETE else TOO_LONG


cdef bint simulated_release(Wire* wire, Transfer* t) noexcept nogil:
    """Release a transfer; sometimes only at a later call, as a library that still uses the buffer does."""
    cdef Link* link = <Link*>wire.own
    cdef Net* net = link.net
    if not t.in_use:
        return True
    if not t.receives and t.handle == OPEN:
        return False                        # the receiver may still read the buffer
    if happens(&net.chance, 0.3):
        return False
    if t.receives:
        forget_posted(net, link.first + wire.rank, t)
    else:
        forget_sent(net, link.first + t.peer, t)
    t.in_use = False
    return True


cdef void forget_posted(Net* net, int who, Transfer* t) noexcept nogil:
    cdef Posted** at = &net.links[who].posted
    cdef Posted* p
    while at[0] != NULL:
        p = at[0]
        if p.transfer == t:
            at[0] = p.next_one
            free(p)
            return
        at = &p.next_one


cdef void forget_sent(Net* net, int dst, Transfer* t) noexcept nogil:
    cdef Envelope* m = net.links[dst].coming
    while m != NULL:
        if m.sending == t:
            m.sending = NULL
        m = m.next_one


cdef int simulated_next_failed(Wire* wire, bint look) noexcept nogil:
    cdef Link* link = <Link*>wire.own
    cdef Down* d = link.downs
    if link.news == 0:
        return NOBODY
    while d.told:
        d = d.next_one
    d.told = True
    link.news -= 1
    return d.peer


cdef Down* down_of(Link* link, int peer) noexcept nogil:
    """Return the Down of a peer that the wire takes for failed, else NULL."""
    cdef Down* d = link.downs
    while d != NULL and d.peer != peer:
        d = d.next_one
    return d


cdef class SimulatedWire(AnyWire):
    """The wire of one engine in a Network."""

    def __cinit__(self, Network network, int at):
        cdef Link* link = &network.net.links[at]
        self.network = network
        self.calls.own = link
        self.calls.rank = at - link.first
        self.calls.size = link.size
        self.calls.send = simulated_send
        self.calls.receive = simulated_receive
        self.calls.test = simulated_test
        self.calls.release = simulated_release
        self.calls.next_failed = simulated_next_failed


# ---- the clock -----------------------------------------------------------------------------

cdef double simulated_now(Clock* clock) noexcept nogil:
    return (<Net*>clock.own).now_s


cdef void simulated_sleep(Clock* clock, double seconds) noexcept nogil:
    pass                                # nothing in a turn sleeps


cdef class SimulatedClock(AnyClock):
    """The virtual time of a Network."""

    def __cinit__(self, Network network):
        self.network = network
        self.calls.own = &network.net
        self.calls.now = simulated_now
        self.calls.sleep = simulated_sleep


# ---- the calendar --------------------------------------------------------------------------

cdef inline bint earlier(Entry* a, Entry* b) noexcept nogil:
    return a.at < b.at or (a.at == b.at and a.order < b.order)


cdef inline void swap(Entry* a, Entry* b) noexcept nogil:
    cdef Entry kept = a[0]
    a[0] = b[0]
    b[0] = kept


cdef void enter(Net* net, double at, int kind, int who, void* what) noexcept nogil:
    """Enter an event into the calendar, at virtual time `at`."""
    cdef int64_t i = net.entries
    cdef Entry* heap
    if net.entries == net.room:
        net.room = max(256, 2 * net.room)
        net.calendar = <Entry*>realloc(net.calendar, net.room * sizeof(Entry))
    heap = net.calendar
    heap[i] = [at, net.entered, kind, who, what]
    net.entered += 1
    net.entries += 1
    while i > 0 and earlier(&heap[i], &heap[(i - 1) // 2]):
        swap(&heap[i], &heap[(i - 1) // 2])
        i = (i - 1) // 2


cdef Entry leave(Net* net) noexcept nogil:
    """Remove and return the next event of the calendar."""
    cdef Entry* heap = net.calendar
    cdef Entry first = heap[0]
    cdef int64_t i = 0, child
    net.entries -= 1
    heap[0] = heap[net.entries]
    while True:
        child = 2 * i + 1
        if child >= net.entries:
            return first
        if child + 1 < net.entries and earlier(&heap[child + 1], &heap[child]):
            child += 1
        if not earlier(&heap[child], &heap[i]):
            return first
        swap(&heap[i], &heap[child])
        i = child


# ---- what happens to messages --------------------------------------------------------------

cdef void arrive(Net* net, Envelope* message) noexcept nogil:
    """Process the arrival of a message: give it to its receive, or keep it until that is posted."""
    cdef Envelope** at = &net.links[message.dst].coming
    message.arrived = True
    while at[0] != message:
        at = &at[0].next_one
    match_posted(net, at)


cdef void match_posted(Net* net, Envelope** at) noexcept nogil:
    cdef Posted** place = &net.links[at[0].dst].posted
    cdef Posted* p
    while place[0] != NULL:
        p = place[0]
        if not fits(p, at[0]):
            place = &p.next_one
            continue
        if p.down:                          # ended for its engine, and not released: only the buffer changes
            if happens(&net.chance, net.rules.late_write):
                memset(p.buffer, 0xA5, min(p.nbytes, at[0].nbytes))
            return
        place[0] = p.next_one
        take(net, at, p)
        free(p)
        return


cdef void crash(Net* net, int who) noexcept nogil:
    """Crash an engine: of its messages in flight, a random initial part of each channel still arrives."""
    cdef Envelope* m
    cdef int i
    net.links[who].sent_bytes = bytes_sent(net, who)
    net.links[who].free_at = net.now_s
    for i in range(net.n):
        m = net.links[i].coming
        while m != NULL:
            if m.src == who:
                m.sending = NULL
                if not m.arrived and happens(&net.chance, 0.5):
                    lose_from(net, m)
            m = m.next_one


cdef void lose_from(Net* net, Envelope* first) noexcept nogil:
    """Mark a message and all later ones of its channel or stream as lost."""
    cdef Envelope* m = first
    while m != NULL:
        if follows(net, m, first) and not m.arrived:
            m.lost = True
        m = m.next_one


cdef void report_down(Net* net, int observer, int peer) noexcept nogil:
    """Let the wire of engine `observer` notice that engine `peer` has failed."""
    cdef Link* link = &net.links[observer]
    cdef Posted* p = link.posted
    cdef Envelope* m = net.links[peer].coming
    cdef Down* d
    cdef int rank = peer - link.first
    if down_of(link, rank) != NULL:
        return
    d = <Down*>malloc(sizeof(Down))
    d[0] = [rank, False, link.downs]
    link.downs = d
    link.news += 1
    while p != NULL:
        if p.src == peer:
            p.transfer.handle = LOST
            p.down = True
        p = p.next_one
    while m != NULL:
        if m.src == observer and m.sending != NULL:
            m.sending.handle = LOST
        m = m.next_one


cdef void give_up(Net* net, int src, int dst) noexcept nogil:
    """Let a wire give up the connection to a living peer.

    It reads no buffer of the sender any more; of the messages in flight, a random initial part of each
    channel still arrives."""
    cdef Envelope* m = net.links[dst].coming
    while m != NULL:
        if m.src == src:
            if m.copy == NULL and m.post == NULL:
                m.copy = malloc(max(1, m.nbytes))
                memcpy(m.copy, m.source, m.nbytes)
                m.source = m.copy
            if not m.arrived and happens(&net.chance, 0.5):
                lose_from(net, m)
        m = m.next_one


cdef void cut_way(Net* net, int src, int dst, double until) noexcept nogil:
    """Let messages that one process sends to another before `until` arrive after it."""
    cdef Cut* c = <Cut*>malloc(sizeof(Cut))
    c[0] = [src, dst, until, net.cuts]
    net.cuts = c


cdef double cut_until(Net* net, int src, int dst) noexcept nogil:
    cdef double until = 0
    cdef Cut** at = &net.cuts
    cdef Cut* c
    while at[0] != NULL:
        c = at[0]
        if c.until <= net.now_s:                # the cut has ended
            at[0] = c.next_one
            free(c)
            continue
        if c.src == src and c.dst == dst:
            until = max(until, c.until)
        at = &c.next_one
    return until


cdef double last_arrival(Net* net, int src, int dst) noexcept nogil:
    """Return when all messages in flight from src to dst have arrived, and counts of the opposite stream."""
    cdef double last = net.streams[dst * net.n + src].counted_at if net.streams != NULL else 0
    cdef Envelope* m = net.links[dst].coming
    while m != NULL:
        if m.src == src and not m.lost:
            last = max(last, m.arrives)
        m = m.next_one
    return last


cdef int64_t bytes_sent(Net* net, int who) noexcept nogil:
    """Return the bytes that have left an engine's link; bytes that wait for the link do not count."""
    cdef Link* link = &net.links[who]
    cdef double waiting = max(0.0, link.free_at - net.now_s) * link.bytes_per_s
    return link.sent_bytes - <int64_t>min(waiting, <double>link.sent_bytes)


cdef int open_transfers(Net* net, int who) noexcept nogil:
    """Return how many receives and incomplete sends an engine has posted."""
    cdef Link* link = &net.links[who]
    cdef int i, count = 0
    cdef Posted* p = link.posted
    cdef Envelope* m
    while p != NULL:
        count += 1
        p = p.next_one
    for i in range(link.first, link.first + link.size):
        m = net.links[i].coming
        while m != NULL:
            count += m.src == who and m.sending != NULL
            m = m.next_one
        count += unconfirmed(&net.streams[who * net.n + i]) if net.streams != NULL else 0
    return count


cdef int unconfirmed(Stream* s) noexcept nogil:
    """Return how many sends of a stream are not complete."""
    cdef Post* post = s.outgoing.first
    cdef int count = 0
    while post != NULL:
        count += post.status == PENDING and not post.released
        post = post.after
    return count


cdef class Network:
    """The network of n engines, and the messages between them.

    Args:
        n: number of engines.
        seed: seed of all random choices.
        latency_s, jitter: a message takes latency_s times a random factor from 1 to 1 + jitter.
        bytes_per_s: speed of each sender's link, on which chunks wait for earlier ones.
        bytes_scale: bytes on the wire per byte of a chunk: few small chunks stand for a large model.
        eager: probability that a message is copied when it is sent.
        late: probability that a message takes up to 200 latencies more.
        late_control: probability that a control message takes up to 200 latencies more, so that others pass
            it.
        late_write: probability that a message of a failed peer is written into a buffer that is not released.
        trace: record all messages.
        room: how many engines may be added later.
        streams: messages from one engine to another keep their order, over connections that end
            (streams.pyx).
    """

    def __cinit__(self, int n, uint64_t seed, double latency_s, double jitter, double bytes_per_s,
                  double bytes_scale=1.0, double eager=0.5, double late=0.0, double late_write=0.5, bint trace=False,
                  int room=0, double late_control=0.0, bint streams=False):
        cdef Net* net = &self.net
        cdef int i
        memset(net, 0, sizeof(Net))
        self.size = n
        net.n = n + room
        net.chance = seed
        net.rules = [latency_s, jitter, bytes_per_s, bytes_scale, eager, late, late_control, late_write]
        net.now_s = 1.0                     # not 0, which a departure takes for "not leaving"
        net.links = <Link*>calloc(net.n, sizeof(Link))
        net.woken = <int*>calloc(net.n, sizeof(int))
        for i in range(n):
            self.place(i, 0, n, i)
        if streams:
            net.streams = open_streams(net.n)
        if trace:
            net.trace_room = 1024
            net.trace = <Sent*>malloc(net.trace_room * sizeof(Sent))

    def __dealloc__(self):
        cdef Net* net = &self.net
        cdef Cut* cut
        cdef int i
        for i in range(net.n):
            free_link(&net.links[i])
        free(net.links)
        free(net.woken)
        free_streams(net)
        while net.cuts != NULL:
            cut = net.cuts
            net.cuts = cut.next_one
            free(cut)
        free(net.paths)
        free(net.trace)
        free(net.calendar)

    cdef void place(self, int at, int first, int size, int process):
        """Give an engine of a process the index `at`; its peers are the `size` engines from `first` on."""
        cdef Link* link = &self.net.links[at]
        link.net = &self.net
        link.first, link.size, link.process = first, size, process
        link.bytes_per_s = self.net.rules.bytes_per_s

    def slow_paths(self, slowness):
        """Let chunks take longer than on their sender's link.

        Args:
            slowness: how many times as long, [from process][to process].
        """
        cdef Net* net = &self.net
        cdef int i, j
        cdef int64_t n = len(slowness)
        net.npaths = n
        net.paths = <Path*>calloc(n * n, sizeof(Path))
        if net.paths == NULL:
            raise MemoryError("no memory for the paths of a simulated network")
        for i in range(net.npaths):
            for j in range(net.npaths):
                net.paths[i * n + j].slowness = slowness[i][j]

    def messages(self):
        """Return the trace: [(sent at, arrives at, from process, to process, channel, bytes, kind, number)].

        Kind and number are those of a control or agreement message, of others -1."""
        cdef int64_t i
        cdef Sent* m
        out = []
        for i in range(self.net.traced):
            m = &self.net.trace[i]
            out.append((m.at, m.arrives, self.net.links[m.src].process, self.net.links[m.dst].process, m.channel, m.nbytes, m.kind, m.number))
        return out


cdef Stream* open_streams(int n) noexcept:
    cdef Stream* streams = <Stream*>calloc(n * n, sizeof(Stream))
    cdef int i
    for i in range(n * n):
        streams[i].src, streams[i].dst, streams[i].is_open = i // n, i % n, True
    return streams


cdef void free_streams(Net* net) noexcept:
    cdef Post* post = net.posts.pool
    cdef int64_t i
    while post != NULL:
        post.owned = False                  # its buffer is already freed
        post = post.after
    for i in range(net.nmade):
        if net.made[i].owned:
            free(net.made[i].buffer)
        free(net.made[i])
    free(net.made)
    free(net.streams)


cdef void free_link(Link* link) noexcept:
    cdef Envelope* m
    cdef Posted* p
    cdef Down* d
    while link.coming != NULL:
        m = link.coming
        link.coming = m.next_one
        free(m.copy)
        free(m)
    while link.posted != NULL:
        p = link.posted
        link.posted = p.next_one
        free(p)
    while link.downs != NULL:
        d = link.downs
        link.downs = d.next_one
        free(d)
