"""Windows: which chunks of the model an exchange moves.

An exchange moves a window of chunks, which ASK and YES name by a first place and a length. Without rare
chunks, place i is chunk i, and chunk 0 follows the last one. Rare chunks move in every `period`th exchange
only. The places are then rounds, one after the other, each of all frequent chunks and the next part of the
rare ones:

    frequent, rare part 0, frequent, rare part 1, ..., frequent, rare part period - 1, frequent, rare part 0, ...

A window of at most a round, wherever it begins, has no chunk twice, and the exchange of a whole model is a
round. Both sides know the same rounds, because they follow from the layout.

Windows follow one another, so that each chunk has its turn. Where the trainer wants it (`aim`), a random half of the
windows are aimed instead: they begin where the sum of the chunks' scores is largest. The score of a chunk is the
squared distance d of the two models at its last exchange, times 1 + k, with k exchanges since then: d (1 + k). ASK marks
aimed windows, and both sides leave them out of their estimate of the consensus distance, because they are not a sample
of the model.
"""

cdef int set_layout(Generation* layout, int nchunks, rare, int period) except -1:
    """Lay out rounds of `nchunks` chunks; those in `rare` move in every `period`th exchange.

    Rounds are fewer than `period` if parts of equal size are enough; where the last part is shorter, it repeats
    chunks of the part before."""
    cdef int i, each = -(-len(rare) // period), frequent = nchunks - len(rare)
    layout.nchunks = layout.turn = layout.frequent = nchunks
    layout.period = 1
    if each == len(rare):
        return 0
    period = -(-len(rare) // each)
    layout.order = <int*>calloc(frequent + each * period, sizeof(int))
    if layout.order == NULL:
        raise MemoryError("no memory for the averaging engine")
    seldom = set(rare)
    for i, chunk in enumerate([c for c in range(nchunks) if c not in seldom] + sorted(rare)):
        layout.order[i] = chunk
    for i in range(nchunks, frequent + each * period):
        layout.order[i] = layout.order[i - each]
    layout.turn, layout.frequent, layout.period = frequent + each, frequent, period
    return 0


cdef Generation* layout_of(Core* e, int total) noexcept nogil:
    """Return the newest layout of at most `total` chunks; the first one if there is none."""
    cdef int64_t i = load(&e.ngenerations) - 1
    while i > 0 and e.generations[i].nchunks > total:
        i -= 1
    return &e.generations[i]


cdef int window_of(Core* e, int total) noexcept nogil:
    """Return how many of `total` chunks this side moves in one exchange at most: at least one.

    The two sides may have different shares: an exchange moves the smaller number, which YES names."""
    return share_of(e, total, e.mailbox.orders.share)


cdef int share_of(Core* e, int total, double share) noexcept nogil:
    """Return how many of `total` chunks a share is: at least one."""
    cdef int whole = min(total, layout_of(e, total).turn)
    return min(whole, max(1, <int>ceil(share * whole - 1e-9)))


cdef int next_first(Core* e, int total) noexcept nogil:
    """Return the place where our next window begins."""
    cdef Generation* layout = layout_of(e, total)
    cdef int64_t aimed = load(&e.pairs.aimed)
    return <int>((aimed - 1 if aimed else load(&e.pairs.position)) % places_of(layout))


cdef inline int64_t places_of(Generation* layout) noexcept nogil:
    """Return the number of places of all rounds, at least 1."""
    return max(1, <int64_t>layout.turn * layout.period)


cdef void mark_next(Core* e, int total, double share, unsigned char* marks) noexcept nogil:
    """Set to 1 the marks of the chunks that our next window has, with a share; on any thread."""
    cdef Exchange x
    cdef int i
    x.layout, x.total, x.first = layout_of(e, total), total, next_first(e, total)
    for i in range(share_of(e, total, share)):
        marks[chunk_of(&x, i)] = 1


cdef void open_window(Core* e, Exchange* x, int total, int window) noexcept nogil:
    """Let an exchange move `window` chunks of `total`, from place x.first on."""
    x.layout = layout_of(e, total)
    x.total = total
    x.first %= <int>places_of(x.layout)
    x.nchunks = window
    x.whole = window == min(total, x.layout.turn)


cdef int chunk_of(Exchange* x, int index) noexcept nogil:
    """Return the chunk at a place of an exchange's window."""
    cdef Generation* layout = x.layout
    cdef int place = x.first + index, at
    if layout.order == NULL:
        return place % x.total
    at = place % layout.turn
    if at >= layout.frequent:
        at += place // layout.turn % layout.period * (layout.turn - layout.frequent)
    return layout.order[at]


cdef double stands_for(Exchange* x, int index) noexcept nogil:
    """Return the number of chunks of which the chunk at a place is a sample: 1 if it is frequent."""
    cdef Generation* layout = x.layout
    if layout.order == NULL or (x.first + index) % layout.turn < layout.frequent:
        return 1
    return <double>(layout.nchunks - layout.frequent) / (layout.turn - layout.frequent)


cdef double turn_elements(Core* e, Exchange* x) noexcept nogil:
    """Return the elements of an exchange of the whole model, in the mean of all rounds."""
    cdef Generation* layout = x.layout
    cdef int64_t frequent = 0, rare = 0
    cdef int i
    for i in range(x.total if layout.order == NULL else layout.nchunks):
        if layout.order == NULL:
            frequent += memory_elements(e.memory, i)
        elif i < layout.frequent:
            frequent += memory_elements(e.memory, layout.order[i])
        else:
            rare += memory_elements(e.memory, layout.order[i])
    if rare == 0:
        return <double>frequent
    return frequent + <double>rare * (layout.turn - layout.frequent) / (layout.nchunks - layout.frequent)


cdef int64_t common(int64_t a, int64_t b) noexcept nogil:
    """Return the greatest common divisor of two numbers, at least 1."""
    while b:
        a, b = b, a % b
    return max(1, a)


cdef void move_on(Core* e, int total, Exchange* x, int window) noexcept nogil:
    """After YES to a window: let our next one begin behind it, unless it is aimed; or aim the next one."""
    cdef Pairs* p = &e.pairs
    cdef int i
    if not x.aimed:
        pass_by(e, total, window)
    if not p.coin or not may_aim(e, total, window) or not tossed(p):
        store(&p.aimed, 0)
        return
    open_window(e, x, total, window)
    for i in range(window):
        note_distance(e, chunk_of(x, i), 0)     # they are exchanged now
    store(&p.aimed, 1 + most_distant(e, total, window))


cdef void pass_by(Core* e, int total, int window) noexcept nogil:
    """Let our next window begin behind one of `window` chunks, so that each chunk has its turn.

    When both the windows of all places and the schedule have begun anew, one window is skipped: else a peer
    could always get the same chunks."""
    cdef Generation* layout = layout_of(e, total)
    cdef Pairs* p = &e.pairs
    cdef int64_t places = places_of(layout), length = max(1, p.schedule_length)
    cdef int64_t cycle = places // common(places, window)
    cycle = max(1, length // common(length, cycle) * cycle)
    p.windows += 1
    store(&p.position, p.position + (window if p.windows % cycle else 2 * window))


# ---- aimed windows ---------------------------------------------------------------------------

cdef bint tossed(Pairs* p) noexcept nogil:
    """Return True in a random half of all calls."""
    p.coin = p.coin * <uint64_t>6364136223846793005 + <uint64_t>1442695040888963407
    return p.coin >> 63


cdef void note_distance(Core* e, int chunk, double square) noexcept nogil:
    """Store the squared distance of the two models in a chunk that is being exchanged."""
    cdef Chunk* c = chunk_at(e.memory, chunk)
    c.apart, c.exchanged = square, e.mailbox.finished


cdef bint may_aim(Core* e, int total, int window) noexcept nogil:
    """Whether windows are parts of the model, and each place of this layout has had its turn.

    A chunk that was never exchanged would count as equal."""
    cdef Generation* layout = layout_of(e, total)
    cdef Pairs* p = &e.pairs
    if p.places != places_of(layout):
        p.places = places_of(layout)
        p.aims_from = p.position + p.places
    return 0 < window < min(total, layout.turn) and p.position > p.aims_from


cdef double score_at(Core* e, Generation* layout, int total, int64_t place) noexcept nogil:
    """Return the score of the chunk at a place; 0 before its first exchange."""
    cdef Exchange x
    cdef Chunk* c
    x.layout, x.total, x.first = layout, total, <int>(place % places_of(layout))
    c = chunk_at(e.memory, chunk_of(&x, 0))
    return c.apart * (1 + max(0, e.mailbox.finished - c.exchanged))


cdef int64_t most_distant(Core* e, int total, int window) noexcept nogil:
    """Return the place of this round from which a window of `window` chunks has the highest score."""
    cdef Generation* layout = layout_of(e, total)
    cdef int64_t start = e.pairs.position // layout.turn * layout.turn, place, best = start
    cdef double found = 0, most
    for place in range(start, start + window):
        found += score_at(e, layout, total, place)
    most = found
    for place in range(start + 1, start + layout.turn):
        found += score_at(e, layout, total, place + window - 1) - score_at(e, layout, total, place - 1)
        if found > most:
            most, best = found, place
    return best
