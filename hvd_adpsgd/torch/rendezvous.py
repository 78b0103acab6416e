"""torch's store, in which processes meet that torchrun or a launcher like it has started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed

from hvd_adpsgd.runtime.rendezvous import PATIENCE_S, Place

__all__ = ["tcp_store"]


def tcp_store(place: Place) -> torch.distributed.Store:
    """The TCPStore at this place: torchrun's own, else one that the first process serves.

    Scripts that use torch.distributed beside this share it; names of a restarted job differ.
    """
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    store = torch.distributed.TCPStore(
        place.host,
        place.port,
        place.size,
        is_master=place.rank == 0 and not of_agent,
        timeout=timedelta(seconds=PATIENCE_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(f"hvd_adpsgd/{start}", store)
