# The state of one engine (Core): a struct for each part of the engine, and the objects that it is created
# with.
#
#     wire, clock     passed in: the wire moves bytes between super learners, the clock returns the time
#     memory          the model in chunks (store.pyx)
#     mailbox         orders of the trainer to the engine's thread, and what the trainer reads (mailbox.pxd)
#     membership      states of the peers (membership.pxi), and this engine's departure (departures.pxi)
#     control         control messages that are being received or sent (control.pxi)
#     reports         the newest status report of each super learner (reports.pxi)
#     pairs           exchanges with one peer (pairs.pxi, lanes.pxi, partners.pxi, exchange.pxi)
#     mean            the exact mean of all models (mean.pxi)
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.agreement cimport AgreementState
from hvd_adpsgd.engine.doorbell cimport ring
from hvd_adpsgd.engine.mailbox cimport Mailbox, load
from hvd_adpsgd.engine.store cimport Memory, Neighbour
from hvd_adpsgd.engine.wire cimport Clock, Transfer, Wire

cdef enum:
    LANES = 8               # chunks of one exchange or mean in flight at once
    SPARES = 2              # private buffers of exchanges that are over, kept for later exchanges; at most
    SETS = 8                # sets of buffers for differences in the memory that an engine shares on its host
    STAMP = 64              # bytes before each of these buffers: they name the exchange and the chunk
    REPORT_NBYTES = 200     # longest text of a report
    REPORTS = 16            # reports in one message, at most

# ---- peers ---------------------------------------------------------------------------------

cdef enum Peer:
    ALIVE = 0
    SUSPECT = 1
    LEFT = 2
    FAILED = 3

cdef struct Membership:
    int size
    int own
    char* states            # a Peer each
    char* left_broken       # peers that left because they failed
    char* ended             # peers of which the wire has reported that the process has ended
    char* answered          # peers that have answered our BYE, or had left before
    int64_t* changes        # counts changes of the membership, for the trainer (`peer_events`)
    bint departing          # this engine has announced its departure
    double said_at          # ... at this time
    double leave_by         # when this engine ends at the latest; 0: it is not leaving
    double checked_at       # when failures were last searched for

cdef struct Report:
    int64_t version         # counts the reports that its super learner has made; 0: none
    int rank
    int nbytes
    char text[REPORT_NBYTES]

cdef struct Known:          # the newest report of a super learner, in a list: last received first
    Report report
    double heard            # when it was received
    Known* newer
    Known* older

cdef struct Reports:
    int own
    int size
    Known* known            # by rank; NULL: this engine sends no reports and stores none
    Known* newest           # first of the list
    double every_s          # seconds between two messages
    double next_at          # when the next message is due
    uint64_t chance         # state of the random generator that chooses peers

# ---- control -------------------------------------------------------------------------------

cdef enum Kind:
    NONE = 0                # a malformed message: no engine sends this kind
    ASK = 1
    YES = 2
    NO = 3
    BYE = 4                 # the sender has left
    BYE_SEEN = 5            # answer to BYE
    CUT = 6                 # request: end this exchange after `nchunks` chunks, or a few more
    CUT_SEEN = 7            # answer to CUT: the exchange ends after `nchunks` chunks
    REPORT = 8              # `nchunks` reports follow the message

cdef struct Message:
    int kind
    int exchange            # number of the exchange; in BYE: 1 if the sender has failed, else 0
    int nchunks
    int first               # in ASK: first place of the exchange's window, see windows.pxi
    int generation
    int window              # in ASK: most chunks that the sender moves; in YES: chunks of the exchange
    int aimed               # in ASK and YES: 1 if the window is aimed (windows.pxi), else 0
    int wire_format         # of chunks over the wire (kernels.h); in ASK: what the sender wants; in YES: of the exchange
    uint64_t fingerprint
    double weight
    int64_t round

cdef struct Parcel:         # a REPORT message with its reports
    Message message
    Report reports[REPORTS]

cdef struct Letter:         # a message that is being sent; its bytes follow this struct
    Transfer transfer
    Letter* next_one

cdef struct Control:
    Message* inbox          # receive buffer: a Parcel fits
    Message* taken          # the last message that has arrived, copied from `inbox`
    Transfer listening
    Letter* outgoing

# ---- pairs ---------------------------------------------------------------------------------

cdef enum Phase:
    IDLE = 0                # the exchange is over: it returns to the pool at the end of the poll
    ASKED = 1
    RUNNING = 2
    CLOSING = 3             # all chunks are merged; with shared memory: the peer may still read our differences
    BROKEN = 4              # the peer has failed; the wire may still use the buffers

cdef struct Place:          # where in the sender's shared memory the difference of a chunk is
    int64_t offset
    int64_t nbytes          # 0: the difference was not finite
    int64_t step            # of the receiver's model in it

cdef enum Way:              # how the two sides of an exchange average a chunk
    SENT = 0                # each side sends its snapshot
    COMPARES = 1            # this side reads the peer's model in shared memory, and writes the difference
    AWAITS = 2              # the peer writes the difference, and this side waits for its Place
    OFFERS = 3              # this side sends its snapshot in few bits, and waits for the difference
    ANSWERS = 4             # the peer sends its snapshot, and this side answers with the difference

cdef struct Lane:
    bint busy
    Way way
    bint sent
    bint received
    bint merged
    int nbytes              # bytes that were received; 0: the peer's snapshot was not finite
    int nbytes_sent         # bytes that `sending` moves over the wire, of the chunk: none through shared memory
    bint void               # our snapshot was not finite: neither side merges this chunk
    int index               # position of the chunk in the exchange
    int chunk
    int64_t step
    char* out               # our snapshot or answer, for the wire
    char* inp               # the peer's
    Place here              # with shared memory: where our difference is
    Place there             # ... or the peer's
    Transfer sending
    Transfer receiving

cdef struct Generation:     # a version of the layout of chunks: each added parameter group makes one
    int nchunks
    uint64_t fingerprint
    int turn                # chunks in an exchange of the whole model
    int frequent            # how many of them move in every exchange; the others are rare
    int period              # rare chunks move in every `period`th exchange
    int* order              # numbers of the frequent chunks, then of the rare ones; NULL: none is rare

cdef struct Exchange:
    int peer
    Phase phase
    bint active             # this side asked
    bint parked
    int number              # assigned by the side that asked
    int first               # the first place of its window; see windows.pxi
    Generation* layout      # names the chunks of places
    int total               # chunks of the model that both sides know
    int nchunks             # chunks of this exchange
    bint aimed              # its window is aimed, see windows.pxi
    int wire_format         # of its chunks over the wire, as in Orders
    bint whole              # the two sides agreed on a whole exchange
    int next                # the first chunk that is not yet begun; counts from `first`
    int done
    int channel
    int answers             # channel of the messages with a difference, or its Place
    bint cut ""               # this side has sent CUT
    bint held               # ... and begins no chunk until CUT_SEEN returns the new `nchunks`
    double began
    double moved            # when a chunk of this exchange was last begun, received, merged or sent
    bint heard              # whether a message of the peer arrived in this turn
    double square           # sum of squared differences of the two models, estimated: see stands_for
    int64_t elements        # of which it is a sum
    int64_t nbytes
    char* buffers           # buffers in private memory, or NULL
    int set                 # index of the set of buffers for differences in shared memory, or NOBODY
    Transfer last_sending
    Transfer last_receiving
    Lane lanes[LANES]
    Exchange* next_one      # the next one in the list `running` or `pool` of Pairs

cdef struct Pairs:
    # options and the schedule
    int* schedule
    int64_t schedule_length
    int64_t cursor
    double prefer           # probability with which the fastest of the next peers is asked
    double* seconds_of      # by rank: seconds per byte of latest exchanges over the link, 0: none yet; NULL: not needed
    uint64_t luck           # state of a random generator
    double weight
    int wire_format         # of all exchanges, unless `chooses_format`
    bint chooses_format     # each exchange has the format of fewer bits that its two sides want
    bint offered_only
    double deadline_s
    int64_t lane_nbytes
    int64_t room            # bytes of a private buffer: in few bits, also for the steps of a chunk's blocks
    int lanes               # chunks of one exchange in flight at once, at most LANES
    # exchanges
    Exchange* running       # exchanges that are not over, newest first
    Exchange* pool
    int asking              # peer of our unanswered ASK or active exchange, or NOBODY
    int serving             # peer of our passive exchange, or NOBODY
    int number              # number of our last ASK
    int64_t windows         # how many of our ASKs for windows in turn were answered with YES
    int64_t position        # where the next window begins, in places; modulo those of all rounds
    int64_t aimed           # place of the next window + 1 if that one is aimed, else 0
    uint64_t coin           # state of a random generator; 0: no window is aimed
    int64_t places          # of the layout of the last window
    int64_t aims_from       # value of `position` at which all of these have had their turn
    double busy_from        # since when an exchange has run without a break; 0: none runs
    double pace             # seconds per byte of our link, by the last exchange over it; 0 before the first one
    double ask_after
    bint nobody             # no peer could be asked when the last ask was due
    double retry_s
    # buffers
    char* spares[SPARES]
    char* shared            # this engine's memory that peers on the host map, or NULL
    int64_t shared_nbytes
    bint changing           # in this turn a peer was changing a chunk that this side compares: poll soon
    Neighbour* neighbours   # differences and models of peers, by rank. NULL if no peer shares memory
    bint all_ring           # all peers ring our doorbell when they send something
    bint taken[SETS]        # which sets of buffers in shared memory are in use

# ---- mean of all ---------------------------------------------------------------------------

cdef struct Network:        # the members of sums
    Wire* wire
    int* members            # ranks on the wire, ascending
    int rank                # of this engine among the members
    int size
    int epoch               # changes when sums are given up or members leave: selects the channels
    int stages              # of the butterfly, with the first and the last one, which fold
    int folded              # members that only send their numbers to a neighbour, and receive the sum from it

cdef struct Sum:            # a sum in flight
    int count
    bint double_precision
    int channel
    int stage
    bint torn               # a peer has sent another number of bytes
    char* total
    char* incoming
    Transfer outgoing
    Transfer arriving

cdef enum MeanStage:
    SUMMING = 0
    AGREEING = 1

cdef struct Share:          # this engine's part in the sum of one chunk, for a mean of all models
    bint busy
    bint void               # our chunk was not finite
    int64_t count
    int itemsize
    int64_t step
    char* mine              # our chunk in the type of sums, then two numbers: contributors, layout mark
    bint summing
    Sum sum

cdef struct Sums:           # LANES chunks in flight; their buffers follow this struct
    Share shares[LANES]
    Sums* next_one          # the next one in `abandoned`: sums given up, whose buffers the wire may still use

cdef struct Mean:
    bint enabled
    Network network
    AgreementState* agreement
    char* inbox             # receive buffer for a message of the agreement
    Transfer listening
    Letter* letters
    Sums* sums
    Sums* abandoned
    int64_t seen            # `peer_events` of the mailbox when departures and failures were last read
    int64_t searched        # `peer_events` + 1 at the last search for departed members; 0: none yet
    MeanStage stage
    int64_t vote            # number of the decision that this engine has voted for
    int64_t wanted          # means that the trainer has asked for so far; `finished`: those that are over
    int64_t finished
    bint running
    int64_t replace         # the mean replaces the model; else the difference to the mean is a correction
    int nchunks
    int next
    int done
    double began
    double moved
    double square
    int64_t nbytes

# ---- the engine ----------------------------------------------------------------------------


cdef struct Core:
    Wire* wire
    Clock* clock
    Memory* memory
    Mailbox mailbox
    Membership membership
    Control control
    Reports reports
    Pairs pairs
    Mean mean
    Generation* generations
    int64_t ngenerations
    double leave_deadline_s


cdef inline double now(Core* e) noexcept nogil:
    return e.clock.now(e.clock)


cdef inline void wake(Core* e) noexcept nogil:
    """Wake the engine's thread, whether it sleeps on its doorbell or in the wire."""
    ring(e.mailbox.doorbell)
    if e.wire.wake != NULL:
        e.wire.wake(e.wire)


cdef inline Generation* generation(Core* e) noexcept nogil:
    """Return the newest layout."""
    return &e.generations[load(&e.ngenerations) - 1]
