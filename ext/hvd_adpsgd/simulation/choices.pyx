# cython: language_level=3
# Why compiled: engines call it as their wire, through C function pointers.
"""A wire and clocks whose open orders are choices: an explorer makes every one of them.

A choice is made when an engine asks, so orders that no engine can tell apart are one. What the contract of a wire
(engine/wire.pxd) leaves open: whether a message has arrived when its receive is tested, whose message a receive from
anybody gets, when a send is complete, when the end of a peer is noticed and by which call, how many messages of a
crashed engine still arrive, and when the buffers of a failed peer are given back.

A suspicion takes a living peer for failed. As a lost connection, it is for good; the peer may notice it or not.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memmove, memset

from hvd_adpsgd.engine.core cimport ASKED, CLOSING, IDLE, RUNNING, Exchange, Message
from hvd_adpsgd.engine.wire cimport (CONTROL, DONE, NOBODY, PEER_DOWN, PENDING, TOO_LONG, AnyClock, AnyWire, Clock,
                                     Status, Transfer, Wire)
from hvd_adpsgd.simulation.choices cimport *


cdef int choose(Choices* c, int options) noexcept nogil:
    """One of 0 to options - 1: the one of the path, beyond it the first."""
    if options <= 1:
        return 0
    if c.next_one == c.count:
        open_choice(c, options)
    c.next_one += 1
    return c.made[c.next_one - 1].taken


cdef Choice* open_choice(Choices* c, int options) noexcept nogil:
    """Append a choice to the path: its first option."""
    cdef Choice* made
    if c.count == c.room:
        c.room = max(1024, 2 * c.room)
        c.made = <Choice*>realloc(c.made, c.room * sizeof(Choice))
    made = &c.made[c.count]
    memset(made, 0, sizeof(Choice))
    made.options = options
    c.count += 1
    c.deepest = max(c.deepest, c.count)
    return made


cdef void tell(Wires* f, int deed, int who, int peer, int what, int64_t number) noexcept nogil:
    if f.story != NULL and f.lines < MOST_LINES:
        f.story[f.lines] = [deed, who, peer, what, number]
        f.lines += 1


cdef void misuse(Wires* f, const char* what) noexcept nogil:
    if f.misuse == NULL:
        f.misuse = what


cdef void cover(Wires* f, int who, int peer, int kind) noexcept nogil:
    """What an engine is told, in which state of its exchange with that peer; once, not when the path is taken again."""
    cdef Exchange* x = f.cores[who].pairs.running
    if f.choices.next_one == f.choices.count:
        while x != NULL and (x.peer != peer or x.phase == IDLE):
            x = x.next_one
        f.coverage[(0 if x == NULL else state_of(x)) * MESSAGES + kind] += 1


cdef int state_of(Exchange* x) noexcept nogil:
    """In the order of hvd_adpsgd.simulation.job.STATES."""
    if x.phase == ASKED:
        return 1
    if x.phase == RUNNING:
        return 4 if x.parked else 3 if x.held else 2
    if x.phase == CLOSING:
        return 6 if x.parked else 5
    return 7


# ---- failures ------------------------------------------------------------------------------

cdef bint finds_down(Wires* f, int who, int peer) noexcept nogil:
    """Whether the wire of `who` knows now that the peer has failed, or has ended."""
    cdef End* mine = &f.ends[who]
    cdef bint ended = f.dead[peer] or (f.over[peer] and f.ends_are_found)
    cdef bint lost = f.ends[peer].suspects[who]         # the peer has given up the connection
    if mine.down[peer]:
        return True
    if not (ended or lost or (f.suspicions and not f.over[peer])) or not choose(f.choices, 2):
        return False
    if not ended:
        f.faulty = f.optional = True
        f.suspicions -= not lost
        mine.suspects[peer] = True
    mine.down[peer] = True
    cover(f, who, peer, 0)
    tell(f, FINDS_DOWN, who, peer, 0, 0)
    if not in_order(f, who, peer):
        spoil(mine, peer)
    return True


cdef inline bint in_order(Wires* f, int who, int peer) noexcept nogil:
    """The peer has left, so all that it has sent arrives."""
    return f.over[peer] and not f.ends[who].suspects[peer] and not f.ends[peer].suspects[who]


cdef void spoil(End* mine, int peer) noexcept nogil:
    """Until they are given back, buffers of a failed peer may hold anything."""
    cdef int i
    for i in range(mine.nposted):
        if mine.posted[i].src == peer:
            memset(mine.posted[i].buffer, 0xA5, mine.posted[i].nbytes)


cdef void kill(Wires* f, int who) noexcept nogil:
    """Its process is dead: what it has sent arrives as far as is chosen."""
    cdef int i
    f.dead[who] = f.faulty = True
    for i in range(f.nmessages):
        if f.messages[i].src == who:
            keep_copy(&f.messages[i])
    drop_sent_to(f, who)
    f.ends[who].nposted = 0


cdef void end(Wires* f, int who) noexcept nogil:
    """It has left."""
    f.over[who] = True
    drop_sent_to(f, who)


cdef void drop_sent_to(Wires* f, int who) noexcept nogil:
    """Nothing depends any more on messages that nobody will take, and whose sends are complete."""
    cdef int i
    for i in range(f.nmessages - 1, -1, -1):
        if f.messages[i].dst == who and f.messages[i].sending == NULL:
            remove(f, i)


# ---- messages ------------------------------------------------------------------------------

cdef void keep_copy(Underway* m) noexcept nogil:
    """From now on the sender may change its buffer."""
    if m.source != NULL:
        memcpy(m.copy, m.source, m.nbytes)
    m.source = NULL
    m.sending = NULL


cdef void remove(Wires* f, int i) noexcept nogil:
    f.nmessages -= 1
    memmove(&f.messages[i], &f.messages[i + 1], (f.nmessages - i) * sizeof(Underway))


cdef Underway* message_of(Wires* f, Transfer* t) noexcept nogil:
    cdef int i
    for i in range(f.nmessages):
        if f.messages[i].sending == t:
            return &f.messages[i]
    return NULL


cdef Status choice_send(Wire* wire, Transfer* t, const void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    cdef Wires* f = <Wires*>wire.own
    cdef Underway* m = &f.messages[f.nmessages]
    t.receives = t.cancelled = False
    t.handle = NOT_YET
    t.peer = peer
    t.in_use = not finds_down(f, wire.rank, peer)
    if not t.in_use:
        return PEER_DOWN
    if f.nmessages == MOST_MESSAGES or nbytes > MOST_NBYTES:
        misuse(f, b"more or longer messages than the explorer holds")
        return PENDING
    memset(m, 0, sizeof(Underway))
    m.src = wire.rank
    m.dst = peer
    m.channel = channel
    m.nbytes = nbytes
    m.source = buffer
    m.sending = t
    f.nmessages += 1
    if channel == CONTROL:
        tell(f, SENDS, wire.rank, peer, (<const Message*>buffer).kind, (<const Message*>buffer).exchange)
    else:
        tell(f, SENDS, wire.rank, peer, 0, channel)
    if f.completion == AT_POST or (f.completion == AT_RECEIPT and channel == CONTROL):
        keep_copy(m)
        t.handle = COMPLETE
        if f.dead[peer] or f.over[peer]:
            drop_sent_to(f, peer)
    return PENDING


cdef Status choice_receive(Wire* wire, Transfer* t, void* buffer, int nbytes, int peer, int channel) noexcept nogil:
    cdef Wires* f = <Wires*>wire.own
    cdef End* mine = &f.ends[wire.rank]
    cdef Posted* p = &mine.posted[mine.nposted]
    cdef int i
    t.receives = True
    t.cancelled = False
    t.handle = NOT_YET
    t.peer = peer
    t.in_use = peer == NOBODY or not finds_down(f, wire.rank, peer) or in_order(f, wire.rank, peer)
    if not t.in_use:
        return PEER_DOWN
    for i in range(mine.nposted):
        if buffer != NULL and mine.posted[i].buffer == buffer:
            misuse(f, b"a buffer is posted twice")
    if mine.nposted == MOST_POSTED:
        misuse(f, b"more receives than the explorer holds")
        return PENDING
    p[0] = [t, buffer, nbytes, peer, channel]
    mine.nposted += 1
    return PENDING


cdef Status choice_test(Wire* wire, Transfer* t) noexcept nogil:
    cdef Wires* f = <Wires*>wire.own
    cdef Status status = test_receive(f, wire.rank, t) if t.receives else test_send(f, wire.rank, t)
    if status == DONE or status == TOO_LONG:
        t.in_use = False
    return status


cdef Status test_send(Wires* f, int who, Transfer* t) noexcept nogil:
    cdef Underway* m
    if t.handle == COMPLETE:
        return DONE
    if t.handle == NOT_YET and finds_down(f, who, t.peer) and not in_order(f, who, t.peer):
        return PEER_DOWN
    if t.handle == GIVEN and f.completion == AT_RECEIPT:
        return DONE
    if f.completion != AT_ANY_TIME or not choose(f.choices, 2):
        return PENDING
    m = message_of(f, t)
    if m != NULL:
        keep_copy(m)
        if f.dead[t.peer] or f.over[t.peer]:
            drop_sent_to(f, t.peer)
    return DONE


cdef Status test_receive(Wires* f, int who, Transfer* t) noexcept nogil:
    cdef End* mine = &f.ends[who]
    cdef int sources[MOST_ENGINES]
    cdef int found = 0, place = place_of(mine, t), way
    cdef int peer = mine.posted[place].src
    if older(mine, place):
        return PENDING
    found = arriving(f, who, &mine.posted[place], sources)
    if peer != NOBODY and mine.down[peer]:
        if not (in_order(f, who, peer) and found):
            return PEER_DOWN
    way = choose(f.choices, found + 1)
    if way > 0:
        return take(f, who, place, sources[way - 1])
    if peer != NOBODY and finds_down(f, who, peer) and not in_order(f, who, peer):
        return PEER_DOWN
    return PENDING


cdef int place_of(End* mine, Transfer* t) noexcept nogil:
    cdef int i = 0
    while mine.posted[i].transfer != t:
        i += 1
    return i


cdef bint older(End* mine, int place) noexcept nogil:
    """Whether an older receive gets the next message of that channel."""
    cdef int i
    for i in range(place):
        if mine.posted[i].src == mine.posted[place].src and mine.posted[i].channel == mine.posted[place].channel:
            return True
    return False


cdef int arriving(Wires* f, int who, Posted* p, int* sources) noexcept nogil:
    """The first message of each channel that the receive may get; their number."""
    cdef int i, k, found = 0
    cdef Underway* m
    for i in range(f.nmessages):
        m = &f.messages[i]
        if m.dst != who or m.channel != p.channel or (p.src != NOBODY and p.src != m.src):
            continue
        for k in range(found):
            if f.messages[sources[k]].src == m.src:
                break
        else:
            sources[found] = i
            found += 1
    return found


cdef Status take(Wires* f, int who, int place, int i) noexcept nogil:
    """The receive gets the message."""
    cdef End* mine = &f.ends[who]
    cdef Posted p = mine.posted[place]
    cdef Underway m = f.messages[i]
    if m.nbytes > p.nbytes:
        p.transfer.handle = OVERLONG
    else:
        memcpy(p.buffer, content_of(&m), m.nbytes)
        p.transfer.handle = COMPLETE
    if mine.down[m.src] and not in_order(f, who, m.src):
        f.optional = True                   # its last messages may arrive, or may not
    if m.channel == CONTROL:
        tell(f, TAKES, who, m.src, (<Message*>p.buffer).kind, (<Message*>p.buffer).exchange)
        cover(f, who, m.src, (<Message*>p.buffer).kind)
    else:
        tell(f, TAKES, who, m.src, 0, m.channel)
    p.transfer.peer = m.src
    p.transfer.nbytes = m.nbytes
    if m.sending != NULL:
        m.sending.handle = GIVEN
    remove(f, i)
    forget_posted(mine, place)
    return DONE if p.transfer.handle == COMPLETE else TOO_LONG


cdef void forget_posted(End* mine, int place) noexcept nogil:
    mine.nposted -= 1
    memmove(&mine.posted[place], &mine.posted[place + 1], (mine.nposted - place) * sizeof(Posted))


cdef bint choice_release(Wire* wire, Transfer* t) noexcept nogil:
    """Forget the transfer of a failed peer, now or when asked again; at the end also those of living ones."""
    cdef Wires* f = <Wires*>wire.own
    cdef End* mine = &f.ends[wire.rank]
    cdef Underway* m
    if not t.in_use:
        return True
    if not t.receives and t.handle != GIVEN and t.handle != COMPLETE and not mine.down[t.peer]:
        return False                        # its receiver may still take it
    if not (t.receives and t.peer == NOBODY) and not choose(f.choices, 2):
        return False
    if t.receives:
        forget_posted(mine, place_of(mine, t))
    else:
        m = message_of(f, t)
        if m != NULL:
            cut_off(f, <int>(m - f.messages))
    t.in_use = False
    return True


cdef void cut_off(Wires* f, int first) noexcept nogil:
    """Neither this message nor a later one of its channel arrives."""
    cdef Underway m = f.messages[first]
    cdef int i
    for i in range(f.nmessages - 1, first - 1, -1):
        if f.messages[i].src == m.src and f.messages[i].dst == m.dst and f.messages[i].channel == m.channel:
            if f.messages[i].sending != NULL:
                f.messages[i].sending.handle = GIVEN
            remove(f, i)


cdef int choice_next_failed(Wire* wire, bint look) noexcept nogil:
    cdef Wires* f = <Wires*>wire.own
    cdef End* mine = &f.ends[wire.rank]
    cdef int peer
    for peer in range(f.n):
        if peer != wire.rank and not mine.told[peer] and finds_down(f, wire.rank, peer):
            mine.told[peer] = True
            return peer
    return NOBODY


cdef int open_transfers(Wires* f, int who) noexcept nogil:
    """Receives that an engine has posted, and sends of it that are not complete."""
    cdef int i, count = f.ends[who].nposted
    for i in range(f.nmessages):
        count += f.messages[i].src == who and f.messages[i].sending != NULL
    return count


cdef double choice_now(Clock* clock) noexcept nogil:
    return (<double*>clock.own)[0]


cdef void choice_sleep(Clock* clock, double seconds) noexcept nogil:
    pass                                # nothing in a turn sleeps


cdef class ChoiceWire(AnyWire):
    """The wire of one engine."""


cdef class ChoiceClock(AnyClock):
    """The clock of one engine: time passes when the explorer says so."""


cdef ChoiceWire wire_of(Wires* f, int rank):
    cdef ChoiceWire made = ChoiceWire()
    made.calls.own = f
    made.calls.rank = rank
    made.calls.size = f.n
    made.calls.send = choice_send
    made.calls.receive = choice_receive
    made.calls.test = choice_test
    made.calls.release = choice_release
    made.calls.next_failed = choice_next_failed
    return made


cdef ChoiceClock clock_of(Wires* f, int rank):
    cdef ChoiceClock made = ChoiceClock()
    made.calls.own = &f.now_s[rank]
    made.calls.now = choice_now
    made.calls.sleep = choice_sleep
    return made
