"""The states of a peer."""

from __future__ import annotations

import enum

__all__ = ["PeerState"]


class PeerState(enum.IntEnum):
    """As in ext/hvd_adpsgd/engine/membership.pxd.

    ALIVE    --silent-->    SUSPECT    passed over, but served when it answers
    SUSPECT  --answers-->   ALIVE
    either   --leaves-->    LEFT       final: done, and its process may exit
    either   --fails-->     FAILED     final: its process has exited, or cannot be reached
    """

    ALIVE = 0
    SUSPECT = 1
    LEFT = 2
    FAILED = 3
