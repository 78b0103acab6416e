"""The states of a peer super learner: alive, suspect, left, failed."""

import enum


class PeerState(enum.IntEnum):
    """State of a peer super learner; the values are those of ext/hvd_adpsgd/engine/core.pxd.

    ALIVE    --silent-->    SUSPECT    no new exchange is started with it, but its requests are answered
    SUSPECT  --answers-->   ALIVE
    either   --leaves-->    LEFT       final: it has finished, and its process may exit
    either   --fails-->     FAILED     final: its process has exited, or cannot be reached
    """

    ALIVE = 0
    SUSPECT = 1
    LEFT = 2
    FAILED = 3
