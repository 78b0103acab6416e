# Agreement among members that may crash: a state machine without MPI, clock or thread.
#
# After each input (agreement_vote, _receive, _failed) the caller takes all outgoing messages
# (agreement_take). Nothing is allocated after agreement_new. All functions return 0, or -1 for a misuse or a
# malformed message.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    AGREEMENT_QUEUE = 12    # entries of the queue of outgoing messages; one input adds at most 6

cdef enum:                  # values of `attempt` that are not a coordinator's rank
    NO_ATTEMPT = -2
    DIRECT = -1             # an attempt without a coordinator, while no failure is suspected

cdef enum MessageKind:
    VOTE = 1      # member -> coordinator, or all
    ASK = 2       # a new coordinator asks each member for its vote and accepted value
    ANSWER = 3    # the answer to ASK
    PREPARE = 4
    ACK = 5
    COMMIT = 6

cdef enum Stage:
    MEMBER = 0        # waits for the coordinator
    COLLECTING = 1    # first coordinator: waits for votes
    TAKING_OVER = 2   # later coordinator: has not voted yet
    ASKING = 3        # later coordinator: waits for answers
    PREPARING = 4     # waits for acknowledgements

cdef struct Header:         # of a message; `count` ranks of failed members (int32_t) follow
    int64_t number
    uint64_t digest         # of the sender's vote
    uint32_t flag           # of the sender's vote
    uint32_t outcome        # of the value that the message carries
    int32_t attempt         # the coordinator's rank, or DIRECT
    int32_t accepted        # attempt of the accepted value, or NO_ATTEMPT
    int32_t count
    uint8_t kind
    uint8_t equal           # of the value that the message carries
    uint8_t unused[2]

cdef struct Vote:
    int64_t number          # decision that the vote is for; -1: no vote
    uint64_t digest
    uint32_t flag

cdef struct Value:          # a possible decision
    uint32_t outcome        # bitwise AND of the votes' flags
    bint equal              # all digests are equal
    char* failed            # members that it declares failed: a byte per member

cdef struct Outgoing:
    Header header
    char* failed            # members that the message lists as failed: a byte per member
    char* targets           # members that the message is still to be sent to: a byte per member

cdef struct AgreementState:
    int n
    int me
    bint direct
    bint excluded           # a decision declared this member failed
    int64_t number          # of the decision under way; all lower numbers are decided
    Stage stage
    int promised            # highest attempt that this member has answered
    int accepted            # attempt of `held`, or NO_ATTEMPT
    int asker               # coordinator whose ASK waits for this member's vote; -1: none
    int best                # highest attempt among the answers, or NO_ATTEMPT
    Value last              # decision number - 1; `failed` of all decisions so far
    Value held              # the accepted value
    Value found             # the value of attempt `best`
    char* suspected         # members believed failed; includes last.failed
    char* heard             # members that have answered in this stage
    char* acks              # members that have accepted the direct value
    Vote* votes
    int first, queued       # index of the oldest entry of `queue`, and how many entries there are
    Outgoing queue[AGREEMENT_QUEUE]

cdef AgreementState* agreement_new(int n, int me) noexcept nogil      # NULL: no memory
cdef void agreement_go_direct(AgreementState* a) noexcept nogil         # right after agreement_new
cdef AgreementState* agreement_copy(const AgreementState* a) noexcept nogil               # NULL: no memory
cdef void agreement_free(AgreementState* a) noexcept nogil
cdef size_t agreement_message_size(int n) noexcept nogil
cdef int agreement_vote(AgreementState* a, uint32_t flag, uint64_t digest) noexcept nogil
cdef int agreement_receive(AgreementState* a, int peer, const void* message, size_t nbytes) noexcept nogil
cdef int agreement_failed(AgreementState* a, int peer) noexcept nogil
cdef size_t agreement_take(AgreementState* a, int* peer, void* message) noexcept nogil   # nbytes; 0: none
cdef bint agreement_voted(const AgreementState* a) noexcept nogil
