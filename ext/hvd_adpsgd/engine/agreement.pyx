# cython: language_level=3
# Why compiled: the engine's thread agrees without the GIL; exploration copies the state a million times.
"""Agreement among members that may crash, as a pure state machine.

Open MPI's agreement returns different results to different members while several threads use MPI. This
agreement is made of plain messages that the caller moves, in order and without loss on each pair's channel
until one of the two members crashes.

    member                     coordinator: the lowest member believed alive
    VOTE(number) ------------> waits for every member that it does not believe failed
               <-------------- PREPARE(number, attempt, value)
    accepts; ACK ------------> waits for every member that it does not believe failed
               <-------------- COMMIT(number, value)

A value is the bitwise AND of the flags, whether all digests are equal, and all members failed so far. A
coordinator whose predecessor is believed failed first asks: ASK(attempt) -> ANSWER(vote, accepted value). It
repeats the accepted value of the highest attempt; only if there is none, it makes one from the votes.

With `direct`, two steps without a coordinator suffice as long as no failure is suspected: every member sends
its vote to all; a member that has all votes accepts the value that follows from them, and sends ACK to all; a
member that has all acknowledgements has decided. This takes n^2 messages and half of the time. As soon as a
failure is suspected, the coordinator asks, as above.

Why decisions do not split. An attempt is the coordinator's rank, so each member has one attempt per decision,
and attempts rise as coordinators fail; the direct attempt is below all. A member that has answered an attempt
takes no part in a lower one, nor in an attempt of a member that it believes failed. A commit needs an
acknowledgement of every member that its coordinator does not believe failed, so a later coordinator finds the
value at any of these members that answers: at itself, unless the earlier coordinator believed it failed. Two
different decisions therefore need two members that each believe the other failed, and no member that either
of them believes alive. A falsely suspected coordinator lacks an acknowledgement, waits, and is sent the
decision; a decision that declares this coordinator failed makes it `excluded`: it decides nothing more.

Beliefs (which members have failed) are never withdrawn. Votes, questions and values carry them: if a single
member believes that a coordinator has failed, the next coordinator adopts that belief; if it believes that
another member has failed, its coordinator does. One false suspicion blocks no member. Several at once may
(three members that suspect each other in a circle: each waits for the next).

Old decisions: the last one is enough. A decision needs the vote of every member that it does not declare
failed, and a member votes for number k + 1 after it has decided k. So a member that still asks for k meets peers
that have decided at most k, or k + 1 with that member among the failed: `last` answers both.
"""

from collections import namedtuple

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

cdef enum:
    LISTS = 6 + 2 * AGREEMENT_QUEUE     # arrays of a byte per member

Decision = namedtuple("Decision", ("number", "flag", "equal", "failed"))


# ---- memory -------------------------------------------------------------------------------------


cdef size_t nbytes_of(int n) noexcept nogil:
    return sizeof(AgreementState) + n * sizeof(Vote) + <size_t>LISTS * n


cdef void lay_out(AgreementState* a) noexcept nogil:
    """Set the pointers of `a` into the one block of memory that holds the whole state."""
    cdef int i
    cdef char* lists
    a.votes = <Vote*>(<char*>a + sizeof(AgreementState))
    lists = <char*>(a.votes + a.n)
    a.last.failed = lists
    a.held.failed = lists + a.n
    a.found.failed = lists + 2 * a.n
    a.suspected = lists + 3 * a.n
    a.heard = lists + 4 * a.n
    a.acks = lists + 5 * a.n
    lists += 6 * a.n
    for i in range(AGREEMENT_QUEUE):
        a.queue[i].failed = lists + 2 * i * a.n
        a.queue[i].targets = lists + (2 * i + 1) * a.n


cdef AgreementState* agreement_new(int n, int me) noexcept nogil:
    cdef int i
    cdef AgreementState* a = <AgreementState*>calloc(1, nbytes_of(n))
    if a == NULL:
        return NULL
    a.n = n
    a.me = me
    lay_out(a)
    begin(a)
    for i in range(n):
        a.votes[i].number = -1
    return a


cdef void agreement_go_direct(AgreementState* a) noexcept nogil:
    """Decide in two steps while no failure is suspected."""
    a.direct = True
    begin(a)


cdef AgreementState* agreement_copy(const AgreementState* a) noexcept nogil:
    cdef AgreementState* copy = <AgreementState*>malloc(nbytes_of(a.n))
    if copy != NULL:
        memcpy(copy, a, nbytes_of(a.n))
        lay_out(copy)
    return copy


cdef void agreement_free(AgreementState* a) noexcept nogil:
    free(a)


cdef size_t agreement_message_size(int n) noexcept nogil:
    """Return the length of the longest message among n members, in bytes."""
    return sizeof(Header) + n * sizeof(int32_t)


# ---- members, and what is believed of them ------------------------------------------------------


cdef int lowest(const char* failed, int n) noexcept nogil:
    """Return the lowest member that is not marked in `failed`; n if all are."""
    cdef int i = 0
    while i < n and failed[i]:
        i += 1
    return i


cdef bint agreement_voted(const AgreementState* a) noexcept nogil:
    return a.votes[a.me].number == a.number


cdef bint all_heard(const AgreementState* a) noexcept nogil:
    """Whether every peer believed alive has answered in this stage."""
    cdef int i
    for i in range(a.n):
        if i != a.me and not a.suspected[i] and not a.heard[i]:
            return False
    return True


cdef bint doubts(const AgreementState* a) noexcept nogil:
    """Whether this member believes another one failed that no decision has declared failed."""
    cdef int i
    for i in range(a.n):
        if a.suspected[i] and not a.last.failed[i]:
            return True
    return False


cdef bint all_acknowledged(const AgreementState* a) noexcept nogil:
    cdef int i
    for i in range(a.n):
        if i != a.me and not a.last.failed[i] and not a.acks[i]:
            return False
    return True


cdef bint all_voted(const AgreementState* a) noexcept nogil:
    cdef int i
    for i in range(a.n):
        if not a.suspected[i] and a.votes[i].number != a.number:
            return False
    return True


# ---- outgoing messages --------------------------------------------------------------------------


cdef Outgoing* post(AgreementState* a, MessageKind kind, int64_t number) noexcept nogil:
    """Append a message without targets to the queue, and return it."""
    cdef Outgoing* out = &a.queue[(a.first + a.queued) % AGREEMENT_QUEUE]
    a.queued += 1           # fits: AGREEMENT_QUEUE is twice what one input adds
    memset(&out.header, 0, sizeof(Header))
    memset(out.targets, 0, a.n)
    memset(out.failed, 0, a.n)
    out.header.kind = kind
    out.header.number = number
    out.header.accepted = NO_ATTEMPT
    return out


cdef void to_living(AgreementState* a, Outgoing* out) noexcept nogil:
    cdef int i
    for i in range(a.n):
        out.targets[i] = i != a.me and not a.suspected[i]


cdef void put_value(AgreementState* a, Outgoing* out, const Value* value) noexcept nogil:
    out.header.outcome = value.outcome
    out.header.equal = value.equal
    memcpy(out.failed, value.failed, a.n)


cdef void put_vote(AgreementState* a, Outgoing* out) noexcept nogil:
    out.header.flag = a.votes[a.me].flag
    out.header.digest = a.votes[a.me].digest


cdef Outgoing* post_vote(AgreementState* a) noexcept nogil:
    cdef Outgoing* out = post(a, VOTE, a.number)
    put_vote(a, out)
    memcpy(out.failed, a.suspected, a.n)
    return out


cdef void send_answer(AgreementState* a) noexcept nogil:
    """Answer the coordinator `asker`: this member's vote, and the value that it has accepted."""
    cdef Outgoing* out = post(a, ANSWER, a.number)
    put_vote(a, out)
    out.header.attempt = a.asker
    out.header.accepted = a.accepted
    if a.accepted > NO_ATTEMPT:
        put_value(a, out, &a.held)
    out.targets[a.asker] = 1


cdef Outgoing* post_last(AgreementState* a) noexcept nogil:
    """Queue a COMMIT of the last decision, for members that may lack it."""
    cdef Outgoing* out = post(a, COMMIT, a.number - 1)
    put_value(a, out, &a.last)
    return out


cdef size_t agreement_take(AgreementState* a, int* peer, void* message) noexcept nogil:
    """Write the next outgoing message to `message`, and its receiver to `peer`; return nbytes, 0 for none."""
    cdef Outgoing* out
    cdef Header* header = <Header*>message
    cdef int32_t* ranks = <int32_t*>(header + 1)
    cdef int i, target
    while a.queued:
        out = &a.queue[a.first]
        target = 0
        while target < a.n and not out.targets[target]:
            target += 1
        if target < a.n:
            out.targets[target] = 0
            header[0] = out.header
            for i in range(a.n):
                if out.failed[i]:
                    ranks[header.count] = i
                    header.count += 1
            peer[0] = target
            return sizeof(Header) + header.count * sizeof(int32_t)
        a.first = (a.first + 1) % AGREEMENT_QUEUE
        a.queued -= 1
    return 0


# ---- the course of a decision -------------------------------------------------------------------


cdef void begin(AgreementState* a) noexcept nogil:
    """Reset the state for decision a.number; keep the votes for it that have already arrived."""
    cdef int i
    a.promised = DIRECT if a.direct else lowest(a.last.failed, a.n)     # the first attempt sends no ASK
    a.accepted = NO_ATTEMPT
    a.asker = -1
    a.best = NO_ATTEMPT
    a.stage = MEMBER
    a.held.outcome = a.found.outcome = 0
    a.held.equal = a.found.equal = False
    memset(a.held.failed, 0, a.n)
    memset(a.found.failed, 0, a.n)
    memset(a.heard, 0, a.n)
    memset(a.acks, 0, a.n)
    for i in range(a.n):
        if a.votes[i].number < a.number:
            memset(&a.votes[i], 0, sizeof(Vote))
            a.votes[i].number = -1


cdef void decide(AgreementState* a, const Value* value, bint told) noexcept nogil:
    """Adopt a committed value as decision a.number, and begin the next decision.

    Args:
        told: every member has been sent the value. If not, send it to members that this one believes failed:
            such a member may be alive, may have asked in vain, and does not ask again."""
    cdef int i
    cdef Outgoing* out
    if not told:
        out = post(a, COMMIT, a.number)
        put_value(a, out, value)
        for i in range(a.n):
            out.targets[i] = i != a.me and (value.failed[i] or a.suspected[i]) and not a.last.failed[i]
    a.last.outcome = value.outcome
    a.last.equal = value.equal
    memcpy(a.last.failed, value.failed, a.n)
    for i in range(a.n):
        if value.failed[i] and i != a.me:
            a.suspected[i] = 1
    a.excluded = value.failed[a.me] != 0
    a.number += 1
    begin(a)
    if not a.excluded:
        take_role(a)


cdef void take_role(AgreementState* a) noexcept nogil:
    """Become the coordinator if every lower member is believed failed; take all steps possible now."""
    cdef Outgoing* out
    if a.direct and not doubts(a):
        go_directly(a)
        return
    if lowest(a.suspected, a.n) != a.me or a.promised > a.me:
        return
    if a.stage == MEMBER and not a.direct and lowest(a.last.failed, a.n) == a.me:
        a.stage = COLLECTING
    elif a.stage == MEMBER:
        if a.number > 0:
            to_living(a, post_last(a))      # before ASK: members may lack the last decision
        a.stage = TAKING_OVER
    if a.stage == TAKING_OVER and agreement_voted(a):
        a.promised = a.me
        a.best = a.accepted
        copy_value(a, &a.found, &a.held)
        memset(a.heard, 0, a.n)
        out = post(a, ASK, a.number)
        out.header.attempt = a.me
        memcpy(out.failed, a.suspected, a.n)
        to_living(a, out)
        a.stage = ASKING
    progress(a)


cdef void go_directly(AgreementState* a) noexcept nogil:
    """Accept the value that follows from all votes; decide it once all members have accepted it."""
    cdef Outgoing* out
    if a.promised > DIRECT:
        return
    if a.accepted == NO_ATTEMPT and all_voted(a):
        count_votes(a)
        a.accepted = DIRECT
        out = post(a, ACK, a.number)
        out.header.attempt = DIRECT
        to_living(a, out)
    if a.accepted == DIRECT and all_acknowledged(a):
        decide(a, &a.held, False)


cdef void copy_value(AgreementState* a, Value* to, const Value* value) noexcept nogil:
    to.outcome = value.outcome
    to.equal = value.equal
    memcpy(to.failed, value.failed, a.n)


cdef void progress(AgreementState* a) noexcept nogil:
    """As coordinator: enter the next stage if every member believed alive has answered."""
    cdef Outgoing* out
    if a.stage == COLLECTING and all_voted(a) or a.stage == ASKING and all_heard(a):
        propose(a)
    if a.stage == PREPARING and all_heard(a):
        out = post(a, COMMIT, a.number)
        put_value(a, out, &a.held)
        for i in range(a.n):
            out.targets[i] = i != a.me and not a.last.failed[i]     # also to members believed failed
        decide(a, &a.held, True)


cdef void propose(AgreementState* a) noexcept nogil:
    """Accept and send the value of the highest attempt; without one, the value that the votes give."""
    cdef Outgoing* out
    if a.best > NO_ATTEMPT:
        copy_value(a, &a.held, &a.found)
    else:
        count_votes(a)
    a.accepted = a.me
    memset(a.heard, 0, a.n)
    a.stage = PREPARING
    out = post(a, PREPARE, a.number)
    out.header.attempt = a.me
    put_value(a, out, &a.held)
    to_living(a, out)


cdef void count_votes(AgreementState* a) noexcept nogil:
    """held = the value that follows from the votes of all members believed alive."""
    cdef int i
    a.held.outcome = 0xFFFFFFFF
    a.held.equal = True
    memcpy(a.held.failed, a.suspected, a.n)
    for i in range(a.n):
        if not a.suspected[i]:
            a.held.outcome &= a.votes[i].flag
            a.held.equal = a.held.equal and a.votes[i].digest == a.votes[a.me].digest


# ---- inputs -------------------------------------------------------------------------------------


cdef int agreement_vote(AgreementState* a, uint32_t flag, uint64_t digest) noexcept nogil:
    """Vote for decision a.number. Returns -1 if this member has voted for it, or is excluded."""
    cdef int coordinator
    if a.excluded or agreement_voted(a):
        return -1
    a.votes[a.me].number = a.number
    a.votes[a.me].flag = flag
    a.votes[a.me].digest = digest
    coordinator = lowest(a.suspected, a.n)
    if a.asker >= 0 and not a.suspected[a.asker]:
        send_answer(a)
    elif a.direct and not doubts(a):
        to_living(a, post_vote(a))
    elif coordinator != a.me:
        post_vote(a).targets[coordinator] = 1
    take_role(a)
    return 0


cdef int agreement_failed(AgreementState* a, int peer) noexcept nogil:
    """Mark a peer as failed; this is never withdrawn. Return -1 if `peer` is no other member."""
    if not 0 <= peer < a.n or peer == a.me:
        return -1
    if not a.suspected[peer] and not a.excluded:
        a.suspected[peer] = 1
        beliefs_changed(a, a.me)
    return 0


cdef void beliefs_changed(AgreementState* a, int source) noexcept nogil:
    """Send vote and beliefs to the coordinator, which may lack both if it is new.

    Nothing is sent if `source`, the member from which the beliefs came, is the coordinator."""
    cdef int coordinator = lowest(a.suspected, a.n)
    if coordinator not in (a.me, source) and agreement_voted(a):
        post_vote(a).targets[coordinator] = 1
    take_role(a)


cdef void adopt(AgreementState* a, int peer, const Header* header, const int32_t* ranks) noexcept nogil:
    """Mark the members as failed that a peer believes failed, but not this member itself."""
    cdef int i
    cdef bint changed = False
    for i in range(header.count):
        if ranks[i] != a.me and not a.suspected[ranks[i]]:
            a.suspected[ranks[i]] = 1
            changed = True
    if changed:
        beliefs_changed(a, peer)


cdef void read_value(AgreementState* a, Value* value, const Header* header, const int32_t* ranks) noexcept nogil:
    cdef int i
    value.outcome = header.outcome
    value.equal = header.equal
    memset(value.failed, 0, a.n)
    for i in range(header.count):
        value.failed[ranks[i]] = 1


cdef bint well_formed(const AgreementState* a, int peer, const Header* header, const int32_t* ranks,
                      size_t nbytes) noexcept nogil:
    cdef int i
    if not 0 <= peer < a.n or peer == a.me or nbytes < sizeof(Header):
        return False
    if not 0 <= header.count <= a.n or nbytes != sizeof(Header) + header.count * sizeof(int32_t):
        return False
    for i in range(header.count):
        if not 0 <= ranks[i] < a.n:
            return False
    if header.kind in (ASK, PREPARE) and header.attempt != peer:
        return False
    return header.number >= 0 and VOTE <= header.kind <= COMMIT and NO_ATTEMPT <= header.accepted < a.n


cdef int agreement_receive(AgreementState* a, int peer, const void* message, size_t nbytes) noexcept nogil:
    cdef const Header* header = <const Header*>message
    cdef const int32_t* ranks = <const int32_t*>(header + 1)
    if not well_formed(a, peer, header, ranks, nbytes):
        return -1
    if header.kind == VOTE and header.number > a.number + 1:    # a.number needs this member's vote
        return -1
    if a.excluded:
        return 0
    if header.kind == COMMIT:
        on_commit(a, header, ranks)
    elif header.number < a.number:
        if header.kind in (VOTE, ASK, PREPARE):     # the peer lacks the last decision
            post_last(a).targets[peer] = 1
    elif not a.suspected[peer]:
        on_message(a, peer, header, ranks)
    return 0


cdef void on_commit(AgreementState* a, const Header* header, const int32_t* ranks) noexcept nogil:
    """Adopt a committed decision, whichever member sends it."""
    cdef int i
    if header.number == a.number:
        read_value(a, &a.held, header, ranks)
        decide(a, &a.held, False)
    elif header.number > a.number:      # decided without this member's vote: it was declared failed
        for i in range(header.count):
            if ranks[i] == a.me:
                a.excluded = True


cdef void on_message(AgreementState* a, int peer, const Header* header, const int32_t* ranks) noexcept nogil:
    """Act on a message of a member believed alive, about this decision; a VOTE may be about the next one."""
    if header.kind == VOTE:
        a.votes[peer].number = header.number
        a.votes[peer].digest = header.digest
        a.votes[peer].flag = header.flag
        adopt(a, peer, header, ranks)
        take_role(a)
    elif header.number > a.number:
        return
    elif header.kind == ASK and header.attempt >= a.promised:
        a.promised = header.attempt
        a.asker = peer
        if agreement_voted(a):
            send_answer(a)
        adopt(a, peer, header, ranks)
    elif header.kind == PREPARE and header.attempt >= a.promised:
        a.promised = header.attempt
        a.accepted = header.attempt
        read_value(a, &a.held, header, ranks)
        post(a, ACK, a.number).targets[peer] = 1
        a.queue[(a.first + a.queued - 1) % AGREEMENT_QUEUE].header.attempt = header.attempt
        adopt(a, peer, header, ranks)
    elif header.kind == ANSWER and a.stage == ASKING and header.attempt == a.me:
        a.votes[peer].number = header.number
        a.votes[peer].digest = header.digest
        a.votes[peer].flag = header.flag
        a.heard[peer] = 1
        if header.accepted > a.best:
            a.best = header.accepted
            read_value(a, &a.found, header, ranks)
        progress(a)
    elif header.kind == ACK and header.attempt == DIRECT:
        a.acks[peer] = 1
        take_role(a)
    elif header.kind == ACK and a.stage == PREPARING and header.attempt == a.me:
        a.heard[peer] = 1
        progress(a)


# ---- for Python ---------------------------------------------------------------------------------


cdef class Agreement:
    """One member's part in agreements among `n` members, without communication.

    After each input, send what take_outgoing() returns, in this order.

    Args:
        n: how many members, numbered from 0.
        me: this member.
        direct: decide in two steps while no failure is suspected, with n^2 messages. All members must pass
            the same value.
    """
    cdef AgreementState* core

    def __cinit__(self, int n, int me, bint direct=False):
        if not 0 <= me < n:
            raise ValueError(f"Agreement: me={me}, allowed are ranks in [0, {n}).")
        self.core = agreement_new(n, me)
        if self.core == NULL:
            raise MemoryError
        if direct:
            agreement_go_direct(self.core)

    def __dealloc__(self):
        agreement_free(self.core)

    @property
    def number(self):
        """The number of the decision under way; all lower numbers are decided."""
        return self.core.number

    @property
    def voted(self):
        """Whether this member has voted for decision `number`."""
        return bool(agreement_voted(self.core))

    @property
    def excluded(self):
        """Whether a decision has declared this member failed; it decides nothing more."""
        return bool(self.core.excluded)

    @property
    def suspected(self):
        """Members believed failed."""
        return [i for i in range(self.core.n) if self.core.suspected[i]]

    def vote(self, uint32_t flag, uint64_t digest=0):
        """Vote for decision `number`, and return that number."""
        number = self.core.number
        if agreement_vote(self.core, flag, digest) != 0:
            raise RuntimeError(f"decision {number}: this member has voted, or is excluded")
        return number

    def receive(self, int peer, const uint8_t[::1] message not None):
        """Process a message that `peer` has sent."""
        if message.shape[0] == 0 or agreement_receive(self.core, peer, &message[0], message.shape[0]) != 0:
            raise ValueError(f"malformed message of {message.shape[0]} bytes from member {peer}")

    def failed(self, int peer):
        """Mark `peer` as failed; this is never withdrawn."""
        if agreement_failed(self.core, peer) != 0:
            raise ValueError(f"failed({peer}): allowed are the peers among {self.core.n} members")

    def take_outgoing(self):
        """Return the outgoing messages as [(peer, message)], in the order in which to send them."""
        cdef int peer
        cdef size_t nbytes
        cdef bytearray message = bytearray(agreement_message_size(self.core.n))
        cdef char* buffer = message
        taken = []
        while True:
            nbytes = agreement_take(self.core, &peer, buffer)
            if nbytes == 0:
                return taken
            taken.append((peer, buffer[:nbytes]))

    def decision(self, int64_t number):
        """Return decision `number`, None if it is not decided yet. Only the last decision is kept.

        Its `failed` lists the members that all decisions so far have declared failed."""
        if number >= self.core.number:
            return None
        if number != self.core.number - 1:
            raise ValueError(f"decision {number}: only the last one, {self.core.number - 1}, is kept")
        failed = tuple(i for i in range(self.core.n) if self.core.last.failed[i])
        return Decision(number, self.core.last.outcome, bool(self.core.last.equal), failed)

    def last_commit(self):
        """Return the last decision as a message, for peers that may lack it; b"" if nothing is decided."""
        cdef int peer, other = 1 if self.core.me == 0 else 0
        cdef bytearray message = bytearray(agreement_message_size(self.core.n))
        cdef char* buffer = message
        if self.core.number == 0 or self.core.n == 1 or self.core.queued:
            return b""
        post_last(self.core).targets[other] = 1
        return buffer[:agreement_take(self.core, &peer, buffer)]

    def copy(self):
        """Return another Agreement with the same state."""
        cdef Agreement made = Agreement.__new__(Agreement, self.core.n, self.core.me)
        agreement_free(made.core)
        made.core = agreement_copy(self.core)
        if made.core == NULL:
            raise MemoryError
        return made

    def state(self):
        """Return all state that the effect of later inputs depends on, hashable.

        Outgoing messages must have been taken."""
        cdef AgreementState* a = self.core
        cdef size_t lists = 6 * a.n
        if a.excluded:      # nothing else counts any more
            return ("excluded", a.me)
        return (a.number, a.stage, a.promised, a.accepted, a.asker, a.best, a.last.outcome, a.last.equal,
                a.held.outcome, a.held.equal, a.found.outcome, a.found.equal,
                (<char*>a.votes)[:a.n * sizeof(Vote)], a.last.failed[:lists])
