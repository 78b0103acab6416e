# cython: language_level=3
# Why compiled: engines call it as their wire, through C function pointers.
"""A wire and clocks whose behaviour an explorer chooses, so that it can try every possible order of events.

A choice is made only when an engine calls the wire, so that orders which no engine can distinguish count
once. The choices are what the contract of a wire (engine/wire.pxd) leaves open: whether a message has arrived
when its receive is tested, whose message a receive from any peer gets, when a send is complete, when the end
of a peer is noticed and by which call, how many messages of a crashed engine still arrive, and when the
buffers of transfers with a failed peer are released.

In a suspicion, a wire takes a living peer for failed. Like a lost connection it is permanent; the peer may
notice it or not.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memmove, memset

from hvd_adpsgd.engine.core cimport ASKED, CLOSING, IDLE, RUNNING, Exchange, Message
from hvd_adpsgd.engine.wire cimport (CONTROL, DONE, NOBODY, PEER_DOWN, PENDING, TOO_LONG, AnyClock, AnyWire, Clock,
                                     Status, Transfer, Wire)
from hvd_adpsgd_lab.simulation.choices cimport *


cdef int choose(Choices* c, int options) noexcept nogil:
    """Return the option, 0 to options - 1, that the path takes next; at its end, append option 0 to it."""
    if options <= 1:
        return 0
    if c.next_one == c.count:
        open_choice(c, options)
    c.next_one += 1
    return c.made[c.next_one - 1].taken


cdef Choice* open_choice(Choices* c, int options) noexcept nogil:
    """Append a choice to the path, which takes its first option."""
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
    """Count a message or failure of a peer, by the state of the exchange with that peer.

    Only at the end of the path: nothing is counted again when a path is repeated."""
    cdef Exchange* x = f.cores[who].pairs.running
    if f.choices.next_one == f.choices.count:
        while x != NULL and (x.peer != peer or x.phase == IDLE):
            x = x.next_one
        f.coverage[(0 if x == NULL else state_of(x)) * MESSAGES + kind] += 1


cdef int state_of(Exchange* x) noexcept nogil:
    """Return the state of an exchange, as an index of simulation.coverage.STATES."""
    if x.phase == ASKED:
        return 1
    if x.phase == RUNNING:
        return 4 if x.parked else 3 if x.held else 2
    if x.phase == CLOSING:
        return 6 if x.parked else 5
    return 7


# ---- failures ------------------------------------------------------------------------------

cdef bint finds_down(Wires* f, int who, int peer) noexcept nogil:
    """Whether the wire of `who` notices now, or has noticed, that the peer has failed or ended; a choice."""
    cdef End* mine = &f.ends[who]
    cdef bint ended = f.dead[peer] or (f.over[peer] and f.ends_are_found)
    cdef bint lost = f.ends[peer].suspects[who]         # the peer takes `who` for failed
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
    """Whether the peer has left in order, so that all of its messages arrive."""
    return f.over[peer] and not f.ends[who].suspects[peer] and not f.ends[peer].suspects[who]


cdef void spoil(End* mine, int peer) noexcept nogil:
    """Overwrite the buffers of receives from a failed peer, which may hold any bytes until their release."""
    cdef int i
    for i in range(mine.nposted):
        if mine.posted[i].src == peer:
            memset(mine.posted[i].buffer, 0xA5, mine.posted[i].nbytes)


cdef void kill(Wires* f, int who) noexcept nogil:
    """Crash an engine: later choices decide how many of its messages arrive."""
    cdef int i
    f.dead[who] = f.faulty = True
    for i in range(f.nmessages):
        if f.messages[i].src == who:
            keep_copy(&f.messages[i])
    drop_sent_to(f, who)
    f.ends[who].nposted = 0


cdef void end(Wires* f, int who) noexcept nogil:
    """Mark an engine as having left."""
    f.over[who] = True
    drop_sent_to(f, who)


cdef void drop_sent_to(Wires* f, int who) noexcept nogil:
    """Remove messages to an engine that is gone if their sends are complete: nothing depends on them."""
    cdef int i
    for i in range(f.nmessages - 1, -1, -1):
        if f.messages[i].dst == who and f.messages[i].sending == NULL:
            remove(f, i)


# ---- messages ------------------------------------------------------------------------------

cdef void keep_copy(Underway* m) noexcept nogil:
    """Complete a send: copy the message, because the sender may now change its buffer."""
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
    """Find the messages that a receive may get, the first one of each sender. Return how many there are."""
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
    """Give message i to a receive."""
    cdef End* mine = &f.ends[who]
    cdef Posted p = mine.posted[place]
    cdef Underway m = f.messages[i]
    if m.nbytes > p.nbytes:
        p.transfer.handle = OVERLONG
    else:
        memcpy(p.buffer, content_of(&m), m.nbytes)
        p.transfer.handle = COMPLETE
    if mine.down[m.src] and not in_order(f, who, m.src):
        f.optional = True                   # the last messages of a failed peer need not arrive
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
    """Release a transfer with a failed peer, now or at a later call; when the engine ends, any receive."""
    cdef Wires* f = <Wires*>wire.own
    cdef End* mine = &f.ends[wire.rank]
    cdef Underway* m
    if not t.in_use:
        return True
    if not t.receives and t.handle != GIVEN and t.handle != COMPLETE and not mine.down[t.peer]:
        return False                        # the receiver may still read the buffer
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
    """Remove a message and all later ones of its channel: they do not arrive."""
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
    """Return how many receives and incomplete sends an engine has posted."""
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
    """The clock of one engine: time passes only when the explorer chooses it."""


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
