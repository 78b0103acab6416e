# cython: language_level=3
# Why compiled: it reads the structs of engines, millions of times.
"""Digests of all state that the future of an engine, its store and the messages between engines depends on.

Two states with the same digest count as one. A digest leaves out what no engine reads again: counters and
stale buffers. Of times it contains only how many deadlines have passed since, and whether an answer to a
departure came at once.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from hvd_adpsgd.engine.core cimport ASKED, BROKEN, LANES, SENT, SETS, Core, Exchange, Lane, Letter, Message
from hvd_adpsgd.engine.core cimport Membership
from hvd_adpsgd.engine.mailbox cimport load
from hvd_adpsgd.engine.store cimport Chunk, chunk_at
from hvd_adpsgd.engine.wire cimport Transfer
from hvd_adpsgd_lab.simulation.choices cimport Underway, Wires, content_of
from hvd_adpsgd_lab.simulation.digests cimport *

TICK_S = 0.6


cdef inline uint64_t mixed_transfer(uint64_t h, Transfer* t) noexcept nogil:
    return mixed(h, (<uint64_t>t.status << 16) + (t.handle << 8) + t.in_use)


cdef int age(Core* e, double since) noexcept nogil:
    """Return how many ticks have passed since a time; 2 for more."""
    cdef double ticks = (e.clock.now(e.clock) - since) / TICK_S + 0.5
    return <int>min(max(ticks, 0.0), 2.0)


cdef uint64_t digest_exchange(Core* e, Exchange* x) noexcept nogil:
    cdef uint64_t h = mixed(mixed(7, x.peer), (<uint64_t>x.number << 8) + (x.phase << 2) + (x.active << 1) + x.parked)
    cdef int i
    h = mixed(h, age(e, x.moved) if x.phase != BROKEN else 0)
    if x.phase == ASKED:
        return h
    h = mixed(mixed(h, (<uint64_t>x.nchunks << 32) + x.next), (<uint64_t>x.done << 2) + (x.cut << 1) + x.held)
    h = mixed(mixed(h, x.channel), (<uint64_t>(x.set + 1) << 1) + (x.buffers != NULL))
    h = mixed_transfer(mixed_transfer(h, &x.last_sending), &x.last_receiving)
    for i in range(LANES):
        if x.lanes[i].busy and x.phase != BROKEN:
            h = digest_lane(h, &x.lanes[i])
        elif x.phase == BROKEN:             # only transfers that the wire may still use count
            h = mixed_transfer(mixed_transfer(h, &x.lanes[i].sending), &x.lanes[i].receiving)
    return h


cdef uint64_t digest_lane(uint64_t h, Lane* lane) noexcept nogil:
    h = mixed(h, (<uint64_t>lane.chunk << 8) + (lane.sent << 3) + (lane.received << 2) + (lane.merged << 1) + lane.void)
    h = mixed_transfer(mixed_transfer(h, &lane.sending), &lane.receiving)
    if not lane.merged and lane.way == SENT:
        h = mixed_bytes(h, lane.out, LANE_NBYTES)
        if lane.received:
            h = mixed(mixed_bytes(h, lane.inp, LANE_NBYTES), lane.nbytes)
    return mixed(h, lane.step)


cdef uint64_t digest_pairs(Core* e) noexcept nogil:
    cdef Exchange* x = e.pairs.running
    cdef uint64_t h = mixed(3, (<uint64_t>(e.pairs.asking + 1) << 8) + e.pairs.serving + 1)
    cdef int i
    h = mixed(h, <uint64_t>e.pairs.number)
    h = mixed(h, e.pairs.cursor % max(1, e.pairs.schedule_length))
    h = mixed(h, e.clock.now(e.clock) < e.pairs.ask_after)
    while x != NULL:
        h = mixed(h, digest_exchange(e, x))
        x = x.next_one
    for i in range(SETS):
        h = mixed(h, e.pairs.taken[i])
    return h


cdef uint64_t digest_control(Core* e) noexcept nogil:
    """Return a digest of the control messages whose sends are not complete, and of the receive."""
    cdef Letter* letter = e.control.outgoing
    cdef uint64_t h = 5
    while letter != NULL:
        h = mixed(h, (<uint64_t>letter.transfer.peer << 8) + (<Message*>(letter + 1)).kind)
        h = mixed_transfer(h, &letter.transfer)
        letter = letter.next_one
    return mixed_transfer(h, &e.control.listening)


cdef uint64_t digest_membership(Core* e) noexcept nogil:
    cdef Membership* m = &e.membership
    cdef uint64_t h = mixed_bytes(11, m.states, m.size)
    h = mixed_bytes(mixed_bytes(h, m.left_broken, m.size), m.ended, m.size)
    h = mixed(mixed_bytes(h, m.answered, m.size), m.departing)
    h = mixed(h, age(e, m.said_at) if m.departing else 3)
    return mixed(h, age(e, m.leave_by - e.leave_deadline_s) if m.leave_by != 0 else 3)


cdef uint64_t digest_mailbox(Core* e) noexcept nogil:
    cdef uint64_t h = mixed(13, (<uint64_t>e.mailbox.given.fit << 4) + (e.mailbox.given.paused << 3)
                            + (e.mailbox.given.leaving << 2) + (e.mailbox.given.broken << 1) + (load(&e.mailbox.at_rest) != 0))
    h = mixed_bytes(h, &e.mailbox.given.credit, sizeof(double))
    return mixed(mixed(h, e.mailbox.given.step), (<uint64_t>e.mailbox.given.round << 8) + e.mailbox.given.wanted + 1)


cdef uint64_t digest_memory(Core* e) noexcept nogil:
    """Return a digest of what a snapshot, a merge or the trainer can read in a store."""
    cdef uint64_t h = mixed(17, e.memory.open)
    cdef Chunk* chunk
    cdef int c, s
    for c in range(e.memory.nchunks):
        chunk = chunk_at(e.memory, c)
        h = mixed_bytes(h, chunk.mirror, LANE_NBYTES)
        h = mixed(mixed(h, (<uint64_t>chunk.open << 1) + chunk.absorbed), chunk.step)
        for s in range(e.memory.nslots):
            h = mixed(h, chunk.full[s][0])
            if chunk.full[s][0]:
                h = mixed_bytes(h, chunk.slot[s], LANE_NBYTES)
    return h


cdef uint64_t digest_messages(Wires* f) noexcept nogil:
    """Return a digest of the messages in flight: their order counts within each channel only."""
    cdef uint64_t total = 0, h
    cdef Underway* m
    cdef int i, k, before
    for i in range(f.nmessages):
        m = &f.messages[i]
        before = 0
        for k in range(i):
            before += f.messages[k].src == m.src and f.messages[k].dst == m.dst and f.messages[k].channel == m.channel
        h = mixed(mixed(19, (<uint64_t>m.src << 32) + (m.dst << 16) + before), (<uint64_t>m.channel << 32) + m.nbytes)
        h = mixed_bytes(h, content_of(m), m.nbytes)
        total += mixed(h, m.sending != NULL)
    return total


cdef uint64_t digest_engine(Core* e) noexcept nogil:
    """Return a digest of an engine's state without its store."""
    return mixed(mixed(mixed(digest_pairs(e), digest_control(e)), digest_membership(e)), digest_mailbox(e))


# ---- digests that have been seen -----------------------------------------------------------

cdef bint add_seen(Seen* s, uint64_t digest) noexcept nogil:
    """Add a digest to the set. Return whether it was not in it."""
    cdef int64_t i
    digest += digest == 0
    if 2 * s.count >= s.room:
        grow_seen(s)
    i = digest & <uint64_t>(s.room - 1)
    while s.slots[i] != 0:
        if s.slots[i] == digest:
            return False
        i = (i + 1) & (s.room - 1)
    s.slots[i] = digest
    s.count += 1
    return True


cdef void grow_seen(Seen* s) noexcept nogil:
    cdef Seen grown
    cdef int64_t i
    grown.room = max(65536, 2 * s.room)
    grown.slots = <uint64_t*>calloc(grown.room, sizeof(uint64_t))
    grown.count = 0
    for i in range(s.room):
        if s.slots[i] != 0:
            add_seen(&grown, s.slots[i])
    free(s.slots)
    s[0] = grown
