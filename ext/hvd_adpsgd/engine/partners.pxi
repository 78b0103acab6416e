"""Which peer an engine asks next: the next one of its schedule, or the fastest of the next three.

With probability `prefer` an engine looks at the next three peers that it can ask, and asks the one whose
latest exchanges took the fewest seconds per byte; all three count as asked. A peer on the same host, or without
an exchange so far, counts as the fastest, so that each is tried. With a uniformly random schedule every peer is
still asked with probability (1 - prefer) / (n - 1) or more, which bounds how slowly the models approach their
mean (theory/partners.py). Measured: docs/log/0130-fast-peers.md.

Source: partners by the measured speed of links: NetMax, Zhou et al., arXiv:2009.05766. The choice of three is
ours.
"""

cdef enum:
    TRIES = 64              # entries of the schedule in which a peer is looked for
    CANDIDATES = 3          # peers of which the fastest is asked

cdef double JUMP = 4.0      # an exchange counts as at most so many times as slow as those before it


cdef bint open_speeds(Pairs* p, int rank, int size, double prefer) noexcept:
    """Let the engine prefer fast peers. Return False if memory is exhausted."""
    p.prefer = prefer
    p.luck = <uint64_t>0x9E3779B97F4A7C15ULL * <uint64_t>(rank + 1)
    p.seconds_of = <double*>calloc(size, sizeof(double))
    return p.seconds_of != NULL


cdef double chance(Pairs* p) noexcept nogil:
    """Return a random number in [0, 1), by xorshift64*."""
    p.luck ^= p.luck >> 12
    p.luck ^= p.luck << 25
    p.luck ^= p.luck >> 27
    return (p.luck * <uint64_t>2685821657736338717ULL >> 11) * 2.0 ** -53


cdef bint eligible(Core* e, int peer) noexcept nogil:
    """Whether a peer can be asked now."""
    return (peer >= 0 and peer != e.wire.rank and e.membership.states[peer] == ALIVE
            and find(e, peer) == NULL and has_room(e, peer))


cdef int next_eligible(Core* e) noexcept nogil:
    """Return the next peer of the schedule that can be asked, or NOBODY."""
    cdef Pairs* p = &e.pairs
    cdef int64_t tries = min(p.schedule_length, TRIES)
    cdef int peer
    while tries > 0:
        peer = p.schedule[p.cursor % p.schedule_length]
        p.cursor += 1
        tries -= 1
        if eligible(e, peer):
            return peer
    return NOBODY


cdef int choose(Core* e) noexcept nogil:
    """Return the peer to ask, or NOBODY."""
    cdef Pairs* p = &e.pairs
    cdef int best = next_eligible(e), other, i
    if best == NOBODY or p.seconds_of == NULL or chance(p) >= p.prefer:
        return best
    for i in range(CANDIDATES - 1):
        other = next_eligible(e)
        if other != NOBODY and p.seconds_of[other] < p.seconds_of[best]:
            best = other
    return best


cdef void note_speed(Core* e, int peer, double seconds) noexcept nogil:
    """Note the seconds per byte of an exchange that is over: half of it counts, and half of those before."""
    cdef Pairs* p = &e.pairs
    cdef double before
    if p.seconds_of == NULL:
        return
    before = p.seconds_of[peer]
    if before == 0:                     # a first exchange is compared with the latest ones of our link
        p.seconds_of[peer] = min(seconds, JUMP * p.pace)
    else:
        p.seconds_of[peer] = (before + min(seconds, JUMP * before)) / 2
