# Agreement among members that may crash: a state machine without MPI, clock or thread.
#
# The caller feeds it (vote, receive, failed) and then takes every outgoing message before the next input.
# Nothing is allocated after agreement_new. All functions return 0, or -1 for a misuse or a malformed message.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    AGREEMENT_QUEUE = 12    # broadcasts between two inputs; one input makes at most 6

cdef enum:                  # attempts beside the coordinators' ranks
    NO_ATTEMPT = -2
    DIRECT = -1             # without a coordinator, while no failure is suspected

cdef enum MessageKind:
    VOTE = 1      # member -> coordinator, or all
    ASK = 2       # a new coordinator asks what the members hold
    ANSWER = 3    # vote and accepted value
    PREPARE = 4
    ACK = 5
    COMMIT = 6

cdef enum Stage:
    MEMBER = 0        # waits for the coordinator
    COLLECTING = 1    # first coordinator: waits for votes
    TAKING_OVER = 2   # later coordinator: has not voted yet
    ASKING = 3        # later coordinator: waits for answers
    PREPARING = 4     # waits for acknowledgements

cdef struct Header:         # of a message; `count` ranks (int32_t) follow
    int64_t number
    uint64_t digest         # the vote's
    uint32_t flag           # the vote's
    uint32_t outcome        # the value's
    int32_t attempt         # the coordinator's rank, or DIRECT
    int32_t accepted        # attempt of the accepted value, or NO_ATTEMPT
    int32_t count
    uint8_t kind
    uint8_t equal           # the value's
    uint8_t unused[2]

cdef struct Vote:
    int64_t number          # -1: none
    uint64_t digest
    uint32_t flag

cdef struct Value:          # what may be decided
    uint32_t outcome        # bitwise AND of the votes' flags
    bint equal              # all digests are equal
    char* failed            # a byte per member

cdef struct Outgoing:
    Header header
    char* failed            # the list: a byte per member
    char* targets           # a byte per member

cdef struct AgreementState:
    int n
    int me
    bint majority
    bint direct
    bint excluded           # a decision declared this member failed
    int64_t number          # of the decision under way; all below it are decided
    Stage stage
    int promised            # highest attempt answered
    int accepted            # attempt of `held`, or NO_ATTEMPT
    int asker               # its ASK waits for this member's vote; -1: none
    int best                # highest attempt among the answers, or NO_ATTEMPT
    Value last              # decision number - 1; `failed` of all decisions so far
    Value held              # the accepted value
    Value found             # the value of attempt `best`
    char* suspected         # believed failed; includes last.failed
    char* heard             # has answered in this stage
    char* acks              # has accepted the direct value
    Vote* votes
    int first, queued       # of the queue
    Outgoing queue[AGREEMENT_QUEUE]

cdef AgreementState* agreement_new(int n, int me, bint majority) noexcept nogil      # NULL: no memory
cdef void agreement_go_direct(AgreementState* a) noexcept nogil         # at once after agreement_new, on all
cdef AgreementState* agreement_copy(const AgreementState* a) noexcept nogil               # NULL: no memory
cdef void agreement_free(AgreementState* a) noexcept nogil
cdef size_t agreement_message_size(int n) noexcept nogil
cdef int agreement_vote(AgreementState* a, uint32_t flag, uint64_t digest) noexcept nogil
cdef int agreement_receive(AgreementState* a, int peer, const void* message, size_t nbytes) noexcept nogil
cdef int agreement_failed(AgreementState* a, int peer) noexcept nogil
cdef size_t agreement_take(AgreementState* a, int* peer, void* message) noexcept nogil   # nbytes; 0: none left
cdef bint agreement_voted(const AgreementState* a) noexcept nogil
cdef bint agreement_quorum(const AgreementState* a) noexcept nogil
