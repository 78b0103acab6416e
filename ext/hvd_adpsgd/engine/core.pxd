# One engine: its owners, each with its own state, and what it is handed.
#
#     wire, clock     handed in: bytes between super learners, time
#     memory          the model in chunks (store.pyx)
#     mailbox            orders of the trainer, and what it reads (mailbox.pxd)
#     membership      states of the peers, and departures (membership.pyx)
#     control         control messages under way (control.pyx)
#     reports         what super learners say of themselves (reports.pyx)
#     pairs           exchanges (pairs.pyx, lanes.pyx, exchange.pyx)
#     mean            the mean of all (mean.pyx)
from libc.stdint cimport int64_t, uint64_t

from hvd_adpsgd.engine.agreement cimport AgreementState
from hvd_adpsgd.engine.butterfly cimport Network, Sum
from hvd_adpsgd.engine.membership cimport Membership
from hvd_adpsgd.engine.mailbox cimport Mailbox, load
from hvd_adpsgd.engine.reports cimport REPORTS, Report, Reports
from hvd_adpsgd.engine.store cimport Memory, Neighbour
from hvd_adpsgd.engine.wire cimport Clock, Transfer, Wire

cdef enum:
    LANES = 8               # chunks of one exchange or mean in flight at once
    SPARES = 2              # sets of buffers kept for the next exchange
    SETS = 8                # sets of buffers in the memory shared on a host
    STAMP = 64              # bytes before each shared buffer: which chunk of which exchange it holds

# ---- control -------------------------------------------------------------------------------

cdef enum Kind:
    NONE = 0                # what no engine sends
    ASK = 1
    YES = 2
    NO = 3
    BYE = 4                 # the sender has left; behind the message all departures that it knows of
    NEWS = 5                # others have left: as behind BYE
    BYE_SEEN = 6            # answer of an engine that stays; `exchange` is that of the BYE or NEWS
    CUT = 7                 # request: end this exchange after `nchunks` chunks, or a few more
    CUT_SEEN = 8            # answer: it ends after `nchunks`
    REPORT = 9              # `nchunks` reports follow it

cdef struct Message:
    int kind
    int exchange            # number of the exchange; of BYE and NEWS how many departures
    int nchunks
    int first               # of ASK: where the exchange begins
    int generation
    uint64_t fingerprint
    double weight
    int64_t round

cdef struct Parcel:         # a REPORT
    Message message
    Report reports[REPORTS]

cdef struct Letter:         # a message on its way; its bytes follow
    Transfer transfer
    Letter* next_one

cdef struct Control:
    Message* inbox          # with room for departures, and for a Parcel
    Message* taken          # the last one that has arrived
    Transfer listening
    Letter* outgoing

# ---- pairs ---------------------------------------------------------------------------------

cdef enum Phase:
    IDLE = 0                # over: the pool takes it back at the end of the poll
    ASKED = 1
    RUNNING = 2
    CLOSING = 3             # on a shared host: until the peer has read all of our snapshots
    BROKEN = 4              # the peer has failed, and the wire may still use the buffers

cdef struct Place:          # where a chunk is in the sender's shared memory: a snapshot, or a difference
    int64_t offset
    int64_t nbytes          # 0: it was not finite
    int64_t step            # of a difference: the receiver's snapshot in it

cdef enum Way:              # that a chunk takes
    SENT = 0                # each side sends its snapshot
    WRITTEN = 1             # ... writes it to shared memory, and sends its place
    COMPARES = 2            # this side reads the peer's model where it lies, and writes the difference
    AWAITS = 3              # the peer does

cdef struct Lane:
    bint busy
    Way way
    bint sent
    bint received
    bint merged
    int nbytes              # received
    bint void               # our snapshot was not finite: neither side merges
    int index               # in the exchange
    int chunk
    int64_t step
    char* out
    char* keep              # our snapshot, in the caches; on a shared host a second copy: `out` bypasses them
    char* inp
    Place here              # on a shared host: of our snapshot, and of the peer's
    Place there
    Transfer sending
    Transfer receiving

cdef struct Exchange:
    int peer
    Phase phase
    bint active             # this side asked
    bint parked
    int number              # by the side that asked
    int first               # chunk; the others follow, around the model
    int total               # chunks of the model that both sides know
    int nchunks             # of this exchange
    int next                # not yet begun; counts from `first`
    int done
    int channel
    int answers             # channel of differences
    bint cut ""               # this side has asked for an early end
    bint held               # ... and begins no chunk until CUT_SEEN says how many there are
    double began
    double moved            # when something last arrived from the peer, or the wire took something of ours
    bint heard              # ... whether something arrived in this turn
    double square           # sum of squared differences
    int64_t elements
    int64_t nbytes
    char* buffers           # private memory, or NULL
    int set                 # set of buffers in shared memory, or NOBODY
    Transfer last_sending
    Transfer last_receiving
    Lane lanes[LANES]
    Exchange* next_one      # in `running`, or in `pool`

cdef struct Pairs:
    # the plan
    int* schedule
    int64_t schedule_length
    int64_t cursor
    double weight
    int wire_type           # element type of chunks on the wire, -1: their own
    bint offered_only
    double share            # of the model's chunks that an exchange moves
    double deadline_s
    int64_t lane_nbytes
    int lanes               # chunks of one exchange in flight at once, at most LANES
    # exchanges
    Exchange* running       # those that are not over, newest first
    Exchange* pool
    int asking              # peer of our ASK or active exchange
    int serving             # peer of our passive exchange
    int number              # of our last ASK
    int64_t windows         # that our exchanges have moved
    double ask_after
    double retry_s
    # buffers
    char* spares[SPARES]
    char* shared            # our memory that peers on this host map, or NULL
    int64_t shared_nbytes
    bint changing           # a chunk that this side compares was changing in this turn: it is tried again soon
    Neighbour* neighbours   # outboxes and models of peers, by peer. NULL if nothing is shared
    bint taken[SETS]

# ---- mean of all ---------------------------------------------------------------------------

cdef enum MeanStage:
    SUMMING = 0
    AGREEING = 1

cdef struct Share:          # one chunk of a mean of all, in flight
    bint busy
    bint void               # ours was not finite
    int64_t count
    int itemsize
    int64_t step
    char* mine              # our chunk in the type of sums, with two numbers behind it
    bint summing
    Sum sum

cdef struct Sums:           # LANES chunks in flight, and behind this struct their buffers
    Share shares[LANES]
    Sums* next_one          # of those given up, which the wire may still use

cdef struct Mean:
    bint enabled
    bint survives           # failures are reported: all agree that a mean is complete, else it is repeated
    Network network
    AgreementState* agreement
    char* inbox             # of the agreement
    Transfer listening
    Letter* letters
    Sums* sums
    Sums* abandoned
    int64_t seen            # changes of the membership
    int64_t searched        # `seen` at the last search for departed members, and 1
    MeanStage stage
    int64_t vote            # number of the decision that this engine has voted for
    int64_t wanted          # means that the trainer has asked for; finished: those that are over
    int64_t finished
    bint running
    int64_t replace         # the model becomes the mean; else the difference is a correction
    int nchunks
    int next
    int done
    double began
    double moved
    double square
    int64_t nbytes

# ---- all of it -----------------------------------------------------------------------------

cdef struct Generation:     # of the layout, which grows by parameter groups
    int nchunks
    uint64_t fingerprint

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


cdef inline Generation* generation(Core* e) noexcept nogil:
    """The layout as of now."""
    return &e.generations[load(&e.ngenerations) - 1]
